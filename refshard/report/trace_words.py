"""What the figures of traces come to, in sentences: the largest loss of each job, and what each chart shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refshard.quantities import format_bytes, format_ns, format_percent
from refshard.tracing.figures import Breakdown, GiveWay, MemoryPoint, TraceFigures, TraceWarning

SMALL = 0.01
"""A loss under this share of the step is not called one."""


MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a reader should know of one job: the headline, and what else there is to it."""

    title: str
    lead: str
    more: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """One way to lose time: ``of`` gives a trace's nanoseconds, None where the trace cannot tell."""

    name: str
    remedy: str
    of: Callable[[Breakdown, GiveWay], int | None]


_LOSSES = (
    _Loss(
        name="exposed communication",
        remedy="gather earlier, move fewer bytes, or give each rank more to compute",
        of=lambda part, _: part.exposed_ns,
    ),
    _Loss(
        name="idle time that waits for the host",
        remedy="launch earlier: fewer or larger kernels, CUDA graphs, no synchronisation within the step",
        of=lambda part, _: part.idle_host_ns,
    ),
    _Loss(
        name="idle time that waits for dependencies",
        remedy="see in the timeline what the next kernel waited for",
        of=lambda part, _: part.idle_dependency_ns,
    ),
    _Loss(
        name="idle time of unknown cause",
        remedy="the trace has no launches that would tell host-bound from dependency-bound",
        of=lambda part, _: part.idle_ns if part.idle_host_ns is None else 0,
    ),
    _Loss(
        name="give-way of preparatory kernels",
        remedy="prepare the reduction with fewer or no kernels beside the main stream",
        of=lambda _, giveway: giveway.lost_ns,
    ),
)


def parts(figures: TraceFigures) -> list[tuple[Breakdown, GiveWay]]:
    """The steps; of a trace without steps the whole."""
    steps = [(step.breakdown, step.giveway) for step in figures.steps]
    return steps or [(figures.whole, figures.giveway)]


def jobs(figures: Sequence[TraceFigures]) -> dict[int, list[TraceFigures]]:
    """Traces by job, in order."""
    found: dict[int, list[TraceFigures]] = {}
    for one in figures:
        found.setdefault(one.job, []).append(one)
    return dict(sorted(found.items()))


def findings(figures: Sequence[TraceFigures]) -> tuple[Finding, ...]:
    """One finding per job."""
    return tuple(_finding(job, members) for job, members in jobs(figures).items())


def _finding(job: int, members: Sequence[TraceFigures]) -> Finding:
    title = f"Job {job}: {_counted(len(members), 'trace')} of {members[0].device}"
    shares = sorted(((_share(members, loss), loss) for loss in _LOSSES), key=lambda pair: -pair[0])
    share, worst = shares[0]
    span = "step" if any(one.steps for one in members) else "trace"
    length = format_ns(_mean_span(members))
    if share < SMALL:
        lead = f"No loss reaches {format_percent(SMALL, 0)} of a {span} of {length}."
    else:
        lead = (
            f"The largest loss is {worst.name}: {format_percent(share)} of a {span} of {length}"
            f"{_spread(members, worst)}."
        )
    others = [f"{loss.name} {format_percent(value)}" for value, loss in shares[1:] if value >= SMALL / 10]
    more = [f"To win it back: {worst.remedy}."] if share >= SMALL else []
    if others:
        more.append(f"Beside it: {', '.join(others)}.")
    if told := late(members):
        more.append(told)
    return Finding(title=title, lead=lead, more=tuple(more))


def _share(members: Sequence[TraceFigures], loss: _Loss) -> float:
    every = [part for one in members for part in parts(one)]
    whole = sum(part.span_ns for part, _ in every)
    return sum(loss.of(*part) or 0 for part in every) / whole if whole else 0.0


def _mean_span(members: Sequence[TraceFigures]) -> float:
    spans = [part.span_ns for one in members for part, _ in parts(one)]
    return sum(spans) / len(spans)


def _spread(members: Sequence[TraceFigures], loss: _Loss) -> str:
    """From the rank that loses least to the one that loses most, where there are several."""
    if len(members) < 2:
        return ""
    shares = [(_share([one], loss), one) for one in members]
    told = {format_percent(share) for share, _ in shares}
    if len(told) == 1:
        return " on every rank"
    (least, low), (most, high) = min(shares, key=lambda p: p[0]), max(shares, key=lambda p: p[0])
    return f" (from {format_percent(least)} on {who(low)} to {format_percent(most)} on {who(high)})"


def late(members: Sequence[TraceFigures]) -> str:
    """The rank that the others wait for longest, in a sentence; empty where none waits."""
    total: dict[int, int] = {}
    for one in members:
        for wait in one.waits_for:
            total[wait.rank] = total.get(wait.rank, 0) + wait.waited_ns
    if not total:
        return ""
    last = max(total, key=lambda rank: total[rank])
    share = total[last] / sum(total.values()) if sum(total.values()) else 0
    return (
        f"Rank {last} is the last to enter most: the others stood {format_ns(total[last])} for it, "
        f"{format_percent(share, 0)} of all waiting of this job."
    )


def who(figures: TraceFigures) -> str:
    """How a trace is called in a sentence."""
    return figures.file if figures.rank is None else f"rank {figures.rank}"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def warning(told: TraceWarning) -> str:
    """A warning, with what it concerns where that is not in its words."""
    concerned = [f"{told.count:,} events"] if told.count is not None else []
    concerned += [format_ns(told.ns)] if told.ns is not None else []
    return f"{told.message} ({', '.join(concerned)})" if concerned else told.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A warning, and which traces give it."""

    sentence: str
    where: str


def doubts(figures: Sequence[TraceFigures]) -> tuple[Doubt, ...]:
    """Every warning once, with the traces that give it."""
    files: dict[str, list[str]] = {}
    for one in figures:
        for told in one.warnings:
            files.setdefault(warning(told), []).append(one.file)
    return tuple(
        Doubt(sentence=sentence, where=_named(givers, len(figures))) for sentence, givers in files.items()
    )  # fmt: skip


def _named(files: Sequence[str], whole: int) -> str:
    if len(files) == whole > 1:
        return f"all {whole} traces"
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return ", ".join(files[:MOST_NAMED]) + more


def giveway(found: GiveWay) -> str:
    """The give-way index, or why there is none."""
    if found.index is None:
        return f"- ({found.reason})" if found.reason else "-"
    return format_percent(found.index)


def steps_sentence(figures: TraceFigures) -> str:
    """What the bars of the steps show."""
    every = [part for part, _ in parts(figures)]
    exposed = [part.exposed_ns / part.span_ns for part in every if part.span_ns]
    idle = [part.idle_ns / part.span_ns for part in every if part.span_ns]
    if not exposed:
        return "The trace holds no time."
    what = _counted(len(every), "step") if figures.steps else "The whole trace, which has no steps"
    return f"{what}: exposed communication takes {_range(exposed)}, idle time {_range(idle)} of it."


def gaps_sentence(collective_gaps: Sequence[int], blocking: int, idle: Sequence[int]) -> str:
    """What the histogram of gaps shows."""
    told = []
    for noun, gaps in (("gap between collectives", collective_gaps), ("idle gap", idle)):
        if not gaps:
            told.append(f"No {noun}.")
            continue
        middle, longest = sorted(gaps)[len(gaps) // 2], max(gaps)
        told.append(
            f"{_counted(len(gaps), noun) if noun != 'gap between collectives' else _between(len(gaps))}, "
            f"{format_ns(sum(gaps))} together, median {format_ns(middle)}, longest {format_ns(longest)}"
            f"{f'; {blocking} blocking' if noun != 'idle gap' else ''}."
        )
    return " ".join(told)


def _between(n: int) -> str:
    return f"{n} gap{'' if n == 1 else 's'} between collectives"


def memory_sentence(points: Sequence[MemoryPoint]) -> str:
    """The peak of every device."""
    told = []
    for device in dict.fromkeys(point.device for point in points):
        mine = [point.bytes for point in points if point.device == device]
        told.append(f"{device}: from {format_bytes(mine[0])} at first to a peak of {format_bytes(max(mine))}.")
    return f"Bytes that torch's allocator holds. {' '.join(told)}"


def _range(shares: Sequence[float]) -> str:
    ends = format_percent(min(shares)), format_percent(max(shares))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
