"""What the figures of traces come to, in sentences: the largest loss of each job and what to do about it, which rank
the others wait for, and warnings.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from refshard.analysis.figures import Cause, StepFigures, TraceFigures, TraceWarning
from refshard.analysis.names import name_in_words
from refshard.quantities import format_ns, format_percent
from refshard.report.trace.communication import answer, short, unknown_waiting
from refshard.report.trace.idle import lone_copy_sentences
from refshard.report.trace.wording import (
    capital,
    counted,
    has_steps,
    in_each,
    is_alone,
    job_names,
    jobs,
    mean,
    of_each,
    parts,
    ranks,
    who,
)

LONGER = 1.02
"""A rank that computes so many times as long as another computes longer."""


def exposed_waits(one: TraceFigures) -> dict[int, int]:
    """Exposed nanoseconds in which a rank waited for others, by rank, the longest first; over its steps."""
    sums: Counter[int] = Counter()
    found = one.communication
    for part in () if found is None else found.steps or (found.whole,):
        for peer in part.waits_for:
            sums[peer.rank] += peer.waited_ns
    return dict(sums.most_common())


def balance(members: Sequence[TraceFigures], worst: TraceFigures, exposed: float, waits: dict[int, int]) -> str:
    """Why the ``worst`` rank, which exposes so many nanoseconds a step, ``waits`` (by rank), and what to look at."""
    a, steps = in_each(worst), len(parts(worst))
    last = next(iter(waits))
    whom = f"the last rank (longest for rank {last}: {format_ns(waits[last] / steps)})"
    whom = f"rank {last}" if len(waits) == 1 else whom
    text = (
        f"{capital(who(worst))} exposes {format_ns(exposed)} {a}, {format_ns(sum(waits.values()) / steps)} of it "
        f"waiting in collectives for {whom} to enter. "
    )
    late_one = next((one for one in members if one.rank == last), None)
    if late_one is None:
        return f"{text}Balance the work, or look at the host of rank {last}."
    its, own = (mean([one], lambda part: part.compute_ns) for one in (late_one, worst))
    times = f"{format_ns(its)} {a} against {format_ns(own)}"
    waited = sum(waits.values()) / steps
    # Compute explains a wait only if there is enough of it: 1 ms more does not hold another rank up for a second.
    if its > LONGER * own and its - own >= waited / 2:
        return f"{text}{capital(who(late_one))} computes {times}: balance the work, or look at that host."
    how = "less" if own > LONGER * its else "more" if its > LONGER * own else "about as long"
    text += f"{capital(who(late_one))} computes {how} ({times})"
    idle = mean([late_one], lambda part: part.idle_ns)
    if idle >= waited / 2 and late_one.idle:
        return f"{text} but idles for {format_ns(idle)}, {_mostly(late_one)}"
    return f"{text}: look at what else delays that host."


def _mostly(one: TraceFigures) -> str:
    """What a rank that others wait for idled for most, and what to do about it."""
    most = max(one.idle, key=lambda idle: idle.ns)
    place = "in" if most.cause == Cause.CALL else "before"
    what = name_in_words(most.what) if most.what else "the next kernel"
    return (
        f"{format_ns(most.ns / len(parts(one)))} of it {place} {what}: look at what that host does there, not at the "
        "network."
    )


def late(members: Sequence[TraceFigures]) -> str:
    """The rank that the others wait for longest, in a sentence; empty where none waits.

    The time is a mean over the other ranks and their steps, so that it never exceeds a step.
    """
    total: Counter[int] = Counter()
    of_rank: dict[int, float] = defaultdict(float)
    for one in members:
        for wait in one.waits_for:
            total[wait.rank] += wait.waited_ns
            of_rank[wait.rank] += wait.waited_ns / len(parts(one))
    if not total.total():
        return ""
    last, waited = total.most_common(1)[0]
    others = [one for one in members if one.rank != last]
    on_average = "" if len(others) == 1 else " on average"
    waiting = f"{who(others[0])} waits" if len(others) == 1 else f"the {len(others)} others wait"
    return (
        f"Of the {len(members)} ranks here, rank {last} is waited for longest: {waiting} "
        f"{format_ns(of_rank[last] / len(others))} {in_each(members[0])} for it{on_average} "
        f"({format_percent(waited / total.total(), 0)} of all waiting between them)."
    )


MOST_NAMED = 6


def warning(found: TraceWarning) -> str:
    """A warning, with what it concerns where that is not in its words."""
    says = rf"(?<![\d.,])(?:{found.count:,}|{found.count})(?![\d,]|\.\d)" if found.count is not None else ""
    concerned = [] if found.count is None or re.search(says, found.message) else [counted(found.count, "event")]
    concerned += [] if found.ns is None or format_ns(found.ns) in found.message else [format_ns(found.ns)]
    return f"{found.message} ({', '.join(concerned)})" if concerned else found.message


def warnings_text(figures: Sequence[TraceFigures]) -> list[str]:
    """Every warning once, with the traces that give it, where there are several traces."""
    givers: dict[str, list[str]] = {}
    for one in figures:
        for found in one.warnings:
            files = givers.setdefault(f"[{found.code}] {warning(found)}", [])
            files += [] if one.file in files else [Path(one.file).name]
    return [f"{sentence}{_of(files, len(figures))}" for sentence, files in givers.items()]


def _of(files: Sequence[str], traces: int) -> str:
    if traces == 1:
        return ""
    if len(files) == traces:
        return f" (all {traces} traces)"
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return f" ({', '.join(files[:MOST_NAMED])}{more})"


SMALL = 0.01
"""A loss under this share of the step is not called one."""
COMPUTE_BOUND = 0.9
"""If compute takes this share of the step, no loss is more than a detail."""
_LONG_STEP = 1.5
"""A step so many times as long as the median one is named."""
_STEPS_FOR_A_MEDIAN = 3


LONG_NS = 1_000_000
"""In longer gaps the host does something else than launch kernels one by one."""
BUSY_HOST = (
    "move what the host does meanwhile (data loading, preprocessing, logging) off the thread that launches kernels, or "
    "do it less often"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a reader should know of one job: the headline, and what else there is to it."""

    title: str
    lead: str
    more: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """One way to lose time: ``of`` gives a step's nanoseconds, None where the trace cannot tell; ``cause`` is that of
    idle time.
    """

    name: str
    remedy: str
    of: Callable[[StepFigures], int | None]
    cause: Cause | None = None


_EXPOSED = _Loss(
    name="exposed communication",
    remedy="gather earlier, move fewer bytes, or give each rank more to compute",
    of=lambda step: step.breakdown.exposed_ns,
)
_SHARDED = "start it earlier, move fewer bytes, or give each rank more to compute"
_REMEDIES = {
    "all_reduce": "larger buckets, gradients in bf16, overlap with backward, or gradient accumulation without "
    "reductions in between",
    "all_gather": "prefetch earlier, keep parameters gathered between forward and backward, or give each rank more to "
    "compute",
    "reduce_scatter": "reduce in bf16, overlap with backward, accumulate gradients without reductions in between, or "
    "give each rank more to compute",
    "all_to_all": "balance what ranks send each other (tokens of experts, rows of embedding tables), send fewer bytes, "
    "or compute something else meanwhile",
    "send": "more and smaller microbatches, or a schedule with a smaller pipeline bubble",
    "broadcast": "broadcast less often (buffers of DDP: broadcast_buffers=False), or beside compute",
}
"""What makes less of an operation exposed."""
_REMEDIES |= {"recv": _REMEDIES["send"], "send_recv": _REMEDIES["send"]}
_REMEDIES |= dict.fromkeys(("dispatch", "combine", "notify"), _REMEDIES["all_to_all"])  # of experts
_LAUNCH = _Loss(
    name="launch-bound idle time",
    remedy="fewer and larger kernels (torch.compile), CUDA graphs, no synchronisation with the host",
    of=lambda step: step.breakdown.idle_launch_ns,
    cause=Cause.LAUNCH,
)
_LAUNCH_OF_CPU = _Loss(
    name="idle time between operators",
    remedy="fewer and larger operators, torch.compile, data loading off the training thread",
    of=_LAUNCH.of,
)
_UNKNOWN = _Loss(
    name="idle time of unknown cause",
    remedy="look in the timeline (--html) at what comes next: it was queued, and the trace names nothing that it "
    "waited for",
    of=lambda step: step.breakdown.idle_unknown_ns,
    cause=Cause.UNKNOWN,
)
_UNKNOWN_WITHOUT_LAUNCHES = _Loss(
    name=_UNKNOWN.name,
    remedy="record CPU activities too: without launches the cause is unknown",
    of=_UNKNOWN.of,
)
_LONE_COPIES = _Loss(
    name="copies beside which nothing else runs",
    remedy="",
    of=lambda step: step.breakdown.lone_copy_ns,
)
"""Its remedy depends on the copies."""
_LOSSES = (
    _EXPOSED,
    _LAUNCH,
    _Loss(
        name="idle time in blocking calls",
        remedy="keep such calls out of the step: warm up what loads or allocates, read results later",
        of=lambda step: step.breakdown.idle_call_ns,
        cause=Cause.CALL,
    ),
    _Loss(
        name="gaps between queued kernels",
        remedy="fewer and larger kernels: fused ones, torch.compile",
        of=lambda step: step.breakdown.idle_back_to_back_ns,
        cause=Cause.BACK_TO_BACK,
    ),
    _Loss(
        name="idle time waiting for another stream",
        remedy="issue what is waited for earlier, or let the streams depend on less",
        of=lambda step: step.breakdown.idle_dependency_ns,
        cause=Cause.DEPENDENCY,
    ),
    _UNKNOWN,
    _Loss(
        name="exposed copies into and out of collective buffers",
        remedy="let collectives read and write parameters and gradients in place, or overlap the copies",
        of=lambda step: step.copies.exposed_ns,
    ),
    _Loss(
        name="reductions held up by slow preparatory kernels (give-way)",
        remedy="prepare the reduction with fewer kernels on side streams",
        of=lambda step: step.giveway.lost_ns,
    ),
    _LONE_COPIES,
)


def findings(figures: Sequence[TraceFigures]) -> tuple[Finding, ...]:
    """One finding per job."""
    names = job_names(figures)
    return tuple(_finding(f"{names[job]}: {ranks(members)}", members) for job, members in jobs(figures).items())


def _finding(title: str, members: Sequence[TraceFigures]) -> Finding:
    if without := [one for one in members if one.unavailable is not None]:
        reasons = tuple(dict.fromkeys(one.unavailable for one in without if one.unavailable is not None))
        rest = [one for one in members if one.unavailable is None]
        if not rest:
            return Finding(title=title, lead=reasons[0], more=reasons[1:])
        found = _finding(title, rest)
        left_out = f"Left out of this: {', '.join(who(one) for one in without)}."
        return Finding(title=title, lead=found.lead, more=(*found.more, left_out, *reasons))
    shares = _shares(members)
    share, worst = shares[0]
    length = format_ns(mean(members, lambda part: part.span_ns))
    span = f"{of_each(members[0])} ({length})" if is_alone(members[0]) else f"{of_each(members[0])} of {length}"
    others = [f"{loss.name} {format_percent(value)}" for value, loss in shares[1:] if value >= SMALL / 10]
    if share < SMALL:
        lead, more = f"No loss reaches {format_percent(SMALL, 0)} of {span}.", []
    else:
        spread = _spread(members, worst)
        lead = f"The largest loss is {worst.name}: {format_percent(share)} of {span}{spread}."
        more = _exposed(members) if worst is _EXPOSED else _remedy(members, worst)
    lead = f"{_compute_bound(members)}{lead}"
    if others:
        more.append(f"Also lost: {', '.join(others)}.")
    if worst is not _EXPOSED and (known := late(members)):
        more.append(known)
    # Figures that are of no device are no detail, as the other warnings are.
    devices = {warning.message for one in members for warning in one.warnings if warning.code == "several_devices"}
    together = [f"{message[:1].upper()}{message[1:]}." for message in sorted(devices)]
    return Finding(title=title, lead=lead, more=(*together, *_uneven(members), *more))


def _compute_bound(members: Sequence[TraceFigures]) -> str:
    """That compute takes most of a step, and at which part of the peak matrix products run; empty where it does not."""
    every = [part.breakdown for one in members for part in parts(one)]
    share = sum(part.compute_ns for part in every) / max(sum(part.span_ns for part in every), 1)
    if share < COMPUTE_BOUND:
        return ""
    lead = f"Compute-bound: compute takes {format_percent(share, 0)} of {of_each(members[0])}"
    totals = [total for one in members if one.operators is not None for total in one.operators.totals]
    known = [(total.of_peak, total.known_ns) for total in totals if total.kind == "GEMM" and total.of_peak is not None]
    if not known:
        return f"{lead}. "
    of_peak = sum(rate * ns for rate, ns in known) / sum(ns for _, ns in known)
    return f"{lead}, and matrix products run at {format_percent(of_peak, 0)} of the GPU's peak. "


def _shares(members: Sequence[TraceFigures]) -> list[tuple[float, _Loss]]:
    """Every loss with its share of the steps, the largest first."""
    instead = {_LAUNCH: _LAUNCH_OF_CPU} if members[0].device.lower() == "cpu" else {}
    if members[0].whole.idle_host_ns is None:
        instead |= {_UNKNOWN: _UNKNOWN_WITHOUT_LAUNCHES}
    losses = [instead.get(loss, loss) for loss in _LOSSES]
    return sorted(((_share(members, loss), loss) for loss in losses), key=lambda pair: -pair[0])


def _uneven(members: Sequence[TraceFigures]) -> list[str]:
    """Steps so long, on every rank, that means over all steps tell of none; and what holds without them."""
    if members[0].windows is not None or any(len(one.steps) < _STEPS_FOR_A_MEDIAN for one in members):
        return []
    usual_of = [median(step.breakdown.span_ns for step in one.steps) for one in members]
    long = set[int | None].intersection(*(
        {step.step for step in one.steps if step.breakdown.span_ns > _LONG_STEP * usual}
        for one, usual in zip(members, usual_of)
    ))  # fmt: skip
    rest = [
        msgspec.structs.replace(one, steps=tuple(step for step in one.steps if step.step not in long))
        for one in members
    ]
    if not long or not all(one.steps for one in rest):
        return []
    of_long = [msgspec.structs.replace(one, steps=tuple(s for s in one.steps if s.step in long)) for one in members]
    length, usual = (mean(which, lambda part: part.span_ns) for which in (of_long, rest))
    numbers = ", ".join(map(str, sorted(step for step in long if step is not None)))
    take, them = (f"Step {numbers} takes", "it") if len(long) == 1 else (f"Steps {numbers} take", "them")
    share, worst = _shares(rest)[0]
    loss = f"the largest loss is {worst.name}, {format_percent(share)}" if share >= SMALL else "no loss reaches 1 %"
    first = min(step.step for one in members for step in one.steps if step.step is not None)
    advice = " Record later, after the warm-up." if first in long else ""
    return [
        f"{take} {format_ns(length)}{'' if len(long) == 1 else ' on average'}, the others {format_ns(usual)}: the "
        f"means over all steps are of neither. Without {them} {loss} of a step of {format_ns(usual)}.{advice}"
    ]


def _remedy(members: Sequence[TraceFigures], loss: _Loss) -> list[str]:
    """What to do about a loss; of idle time also what most of it was waited for, on the rank that lost most by it."""
    one = max(members, key=lambda one: _share([one], loss))
    if loss is _LONE_COPIES:
        return lone_copy_sentences(one, parts(one), f" on {who(one)}" if len(members) > 1 else "")
    named = [idle for idle in one.idle if idle.cause == loss.cause and idle.what]
    if not named or one.device.lower() == "cpu":
        return [f"To reduce {loss.name}, try: {loss.remedy}."]
    most, number = named[0], len(parts(one))
    name = f"On {who(one)}, {loss.name}" if len(members) > 1 else loss.name[0].upper() + loss.name[1:]
    what = name_in_words(most.what or "")
    busy_host = loss is _LAUNCH and most.ns > LONG_NS * most.count
    of_cause = sum(idle.ns for idle in one.idle if idle.cause == loss.cause)
    longest = "" if most.count == 1 else f" in all, the longest {format_ns(most.longest_ns)}"
    return [
        f"{name} is longest {_PLACES[most.cause]} {what}: {format_ns(most.ns / number)} {in_each(one)}, "
        f"{format_percent(most.ns / of_cause, 0)} of it ({counted(most.count, 'gap')}{longest}).",
        f"Try: {BUSY_HOST if busy_host else loss.remedy}.",
    ]


_PLACES = {
    Cause.LAUNCH: "before",
    Cause.CALL: "in gaps spent mostly in",
    Cause.DEPENDENCY: "where",
    Cause.UNKNOWN: "before",
}
"""Where gaps of a cause lie, before the name of what they waited for."""


def _share(members: Sequence[TraceFigures], loss: _Loss) -> float:
    every = [part for one in members for part in parts(one)]
    length = sum(part.breakdown.span_ns for part in every)
    return sum(loss.of(part) or 0 for part in every) / length if length else 0.0


def _spread(members: Sequence[TraceFigures], loss: _Loss) -> str:
    """From the rank that loses least to the one that loses most, where there are several."""
    if len(members) < 2:
        return ""
    shares = [(_share([one], loss), one) for one in members]
    found = {format_percent(share) for share, _ in shares}
    if len(found) == 1:
        return " on every rank"
    (least, low), (most, high) = min(shares, key=lambda p: p[0]), max(shares, key=lambda p: p[0])
    return f" (from {format_percent(least)} on {who(low)} to {format_percent(most)} on {who(high)})"


def _exposed(members: Sequence[TraceFigures]) -> list[str]:
    """Where communication is exposed most, whether it is waiting for another rank, and what to do about it."""
    worst = max(members, key=lambda one: mean([one], lambda part: part.exposed_ns))
    exposed = mean([worst], lambda part: part.exposed_ns)
    waits = exposed_waits(worst)
    most = _most_exposed(worst)
    where = [] if most is None else [_where(worst, most)]
    if sum(waits.values()) > exposed * len(parts(worst)) / 2:
        return [*where, balance(members, worst, exposed, waits)]
    unknown, remedy = (
        unknown_waiting(worst),
        _EXPOSED.remedy if most is None else _REMEDIES.get(most.op, _EXPOSED.remedy),
    )
    if most is not None and most.op == "all_to_all" and most.unit is not None:
        remedy = _SHARDED  # with a unit, an all-to-all moves shards; else it is what experts exchange
    attempt = f"If the ranks hardly wait, try: {remedy}." if unknown else f"Try: {remedy}."
    named = attempt if where or unknown else f"To reduce exposed communication, try: {remedy}."
    return [*where, *(sentence for sentence in (answer(worst), unknown, named, late(members)) if sentence)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MostExposed:
    """The operation with most exposed time, and the one of its ``units`` with most; nanoseconds over all steps."""

    op: str
    ns: int
    unit: str | None
    unit_ns: int
    units: int


def _most_exposed(one: TraceFigures) -> _MostExposed | None:
    """By the collectives of the steps; None without exposed time.

    Times of operations add up to what is exposed where each nanosecond was given to one message.
    """
    of_unit: dict[str, Counter[str | None]] = defaultdict(Counter)
    for found in one.collectives:
        if found.step is not None or not has_steps(one):
            of_unit[found.op][found.unit] += found.exposed_ns
    of_op: Counter[str] = Counter()
    for message in () if one.communication is None else one.communication.messages:
        of_op[message.op] += message.exposed_ns
    if not of_op.total():
        of_op = Counter({op: units.total() for op, units in of_unit.items()})
    if not of_op.total():
        return None
    (op, ns) = of_op.most_common(1)[0]
    units = of_unit[op] or Counter({None: ns})
    unit, most = units.most_common(1)[0]
    return _MostExposed(op=op, ns=ns, unit=unit, unit_ns=most, units=len(units))


def _where(one: TraceFigures, most: _MostExposed) -> str:
    steps = len(parts(one))
    place = f" of {most.unit}" if most.unit and most.units == 1 else ""
    at_once = most.ns > sum(part.breakdown.exposed_ns for part in parts(one))
    more = " (sum over concurrent collectives)" if at_once else ""
    if most.unit and most.units > 1:
        more += f"; the unit with most of it is {most.unit} ({format_ns(most.unit_ns / steps)})"
    return f"Most exposed on {who(one)}: {short(most.op)}{place}, {format_ns(most.ns / steps)} {in_each(one)}{more}."
