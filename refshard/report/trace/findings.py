"""Findings: the largest loss of each job with its remedy, the rank that others wait for, and warnings.

A kind of loss is a row of :data:`LOSSES`: what counts as it, the sentences that explain it, and what to try.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from refshard.analysis.figures import (
    FAST_HOST,
    LAUNCHES,
    NO_MODES,
    NO_SYNC,
    TOLERATED_ERROR,
    Cause,
    CommunicationFigures,
    HostTime,
    MessageFigures,
    StepFigures,
    TraceFigures,
    TraceWarning,
)
from refshard.analysis.names import name_in_words
from refshard.quantities import format_bytes, format_ns, format_percent, format_rate
from refshard.report.trace.ranks import is_held_up, late
from refshard.report.trace.text import (
    HOST_WORK,
    counted,
    has_steps,
    in_each,
    is_alone,
    job_names,
    jobs,
    mean,
    of_each,
    parts,
    per,
    who,
)

SMALL = 0.01
"""Below this share of the step, a loss is not called the largest one."""
COMPUTE_BOUND = 0.9
"""If compute takes this share of the step, losses are a detail."""
_HOST_BOUND = 0.1
"""If a host that takes no time would save this share of the step, the host bounds it."""
_MOSTLY = 0.75
"""If compute takes this share of a host-bound step, the host bounds only the rest."""
_INPUT_BOUND = 0.5
"""If the GPU waits for data for this share of what a host that takes no time would save, data bounds the step."""
WORK: dict[str, str] = {
    "GEMM": "matrix products", "attention": "attention", "convolution": "convolutions", "normalisation": "norms",
    "elementwise": "elementwise kernels", "optimizer": "optimizer", "copies": "copies", "others": "other kernels",
}  # fmt: skip
"""Classes of work, in sentences."""
_HOST_GAINS = {
    LAUNCHES: "CUDA graphs at most",
    FAST_HOST: "half the host's time (torch.compile, or half as many launches)",
    NO_MODES: "no dispatch modes in Python (checkpoint whole layers instead, or compile)",
    NO_SYNC: "no waits for the GPU",
}
_LONG_STEP, _STEPS_FOR_A_MEDIAN = 1.5, 3
"""A step is long at this many times the median, if there are at least this many steps."""
_LONG_GAP_NS = 1_000_000
"""In longer gaps the host does something else than launch kernels one by one."""
_MOST_NAMED = 6
_BUSY_HOST = (
    "move what the host does meanwhile (data loading, preprocessing, logging) off the thread that launches kernels, or "
    "do it less often"
)
_SHARDED = "start it earlier, move fewer bytes, or give each rank more to compute"
_OPERATIONS = {
    "all_reduce": "larger buckets, gradients in bf16, overlap with backward, or gradient accumulation without "
    "reductions in between",
    "all_gather": "prefetch earlier, keep parameters gathered between forward and backward, or give each rank more to "
    "compute",
    "reduce_scatter": "reduce in bf16, overlap with backward, accumulate gradients without reductions in between, or "
    "give each rank more to compute",
    "all_to_all": "balance what ranks send each other (tokens of experts, rows of embedding tables), send fewer bytes, "
    "or compute something else meanwhile",
    "send": "more and smaller microbatches, or a schedule with a smaller pipeline bubble",
    "broadcast": "broadcast less often (buffers of DDP: broadcast_buffers=False), or during compute",
}
"""Remedies for exposed communication, by operation."""
_OPERATIONS |= dict.fromkeys(("recv", "send_recv"), _OPERATIONS["send"])
_OPERATIONS |= dict.fromkeys(("dispatch", "combine", "notify"), _OPERATIONS["all_to_all"])  # of experts
_COPIES = {
    ("HtoD", "HostToDevice"): "copy from pinned memory (pin_memory=True) with non_blocking=True, on a separate stream "
    "and a step ahead, or keep the data on the device",
    ("DtoH", "DeviceToHost"): "copy to pinned memory with non_blocking=True on a separate stream, copy less often, or "
    "compute on the device what the host needs it for",
    ("Memset",): "fill less: zero_grad(set_to_none=True), and torch.empty where everything is overwritten",
}
"""Remedies for copies, by a part of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a reader should know about one job: the headline, and the rest."""

    title: str
    lead: str
    more: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """One way to lose time.

    ``of`` gives a step's nanoseconds, None if the trace cannot tell. ``explain`` gives the sentences for a job that
    loses most by it, :func:`_idle` by default. Idle time has a ``cause``, and ``place`` leads to the name of what it
    was waiting for.
    """

    name: str
    of: Callable[[StepFigures], int | None]
    remedy: str
    explain: "Callable[[Sequence[TraceFigures], Loss], list[str]] | None" = None
    cause: Cause | None = None
    place: str = ""

    def share(self, members: Sequence[TraceFigures]) -> float:
        """Its share of the time of all steps of these traces."""
        every = [part for one in members for part in parts(one)]
        length = sum(part.breakdown.span_ns for part in every)
        return sum(self.of(part) or 0 for part in every) / length if length else 0.0


def findings(figures: Sequence[TraceFigures]) -> tuple[Finding, ...]:
    """One finding per job."""
    names, found = job_names(figures), []
    for job, members in jobs(figures).items():
        first, size = members[0], members[0].world_size
        ranks = f"{len(members)} of {size} ranks" if size is not None else counted(len(members), "trace")
        about = ["1 rank" if size == 1 else ranks, *([first.backend] if first.backend else []), first.device]
        found.append(_finding(f"{names[job]}: {', '.join(about)}", members))
    return tuple(found)


def _finding(title: str, members: Sequence[TraceFigures]) -> Finding:
    if without := [one for one in members if one.unavailable is not None]:
        reasons = tuple(dict.fromkeys(one.unavailable for one in without if one.unavailable is not None))
        rest = [one for one in members if one.unavailable is None]
        if not rest:
            return Finding(title=title, lead=reasons[0], more=reasons[1:])
        found = _finding(title, rest)
        left_out = f"Left out of this: {', '.join(who(one) for one in without)}."
        return replace(found, more=(*found.more, left_out, *reasons))
    (share, worst), *others = _losses(members)
    is_compute, story = _compute_bound(members)
    length = format_ns(mean(members, lambda part: part.span_ns))
    span = f"{of_each(members[0])} ({length})" if is_alone(members[0]) else f"{of_each(members[0])} of {length}"
    if share < SMALL:
        lead, more = f"No loss reaches {format_percent(SMALL, 0)} of {span}.", []
    else:
        beside = " outside of compute" if is_compute else ""
        lead = f"The largest loss{beside} is {worst.name}: {format_percent(share)} of {span}{_spread(members, worst)}."
        more = (worst.explain or _idle)(members, worst)
    if named := [f"{loss.name} {format_percent(value)}" for value, loss in others if value >= SMALL / 10]:
        more.append(f"Also lost: {', '.join(named)}.")
    known = late(members)
    if is_held_up(members):
        lead, known = f"{lead} {known}", ""
    more += [known] if known else []
    # A warning that changes what every figure means comes first.
    devices = {warning.message for one in members for warning in one.warnings if warning.code == "several_devices"}
    together = [f"{message[:1].upper()}{message[1:]}." for message in sorted(devices)]
    lead = f"{is_compute or _host_bound(members, worst)}{lead}"
    return Finding(title=title, lead=lead, more=(*together, *_uneven(members), *story, *more))


def _losses(members: Sequence[TraceFigures]) -> list[tuple[float, Loss]]:
    """Every loss with its share of the steps, the largest first."""
    instead: dict[Cause | None, tuple[str, str]] = {}
    if members[0].device.lower() == "cpu":
        instead[Cause.LAUNCH] = (
            "idle time between operators",
            "fewer and larger operators, torch.compile, data loading off the training thread",
        )
    if members[0].whole.idle_host_ns is None:
        instead[Cause.UNKNOWN] = (
            "idle time of unknown cause",
            "record CPU activities too: without launches the cause is unknown",
        )
    losses = [
        replace(loss, name=instead[loss.cause][0], remedy=instead[loss.cause][1]) if loss.cause in instead else loss
        for loss in LOSSES
    ]
    return sorted(((loss.share(members), loss) for loss in losses), key=lambda pair: -pair[0])


def _spread(members: Sequence[TraceFigures], loss: Loss) -> str:
    """From the rank that loses least to the one that loses most, if there are several."""
    if len(members) < 2:
        return ""
    (least, low), *_, (most, high) = sorted(((loss.share([one]), one) for one in members), key=lambda pair: pair[0])
    if format_percent(least) == format_percent(most):
        return " on every rank"
    return f" (from {format_percent(least)} on {who(low)} to {format_percent(most)} on {who(high)})"


def _compute_bound(members: Sequence[TraceFigures]) -> tuple[str, list[str]]:
    """Whether compute takes most of a step, how close its kernels come to the roofline, and what that could gain."""
    every = [part.breakdown for one in members for part in parts(one)]
    span = sum(part.span_ns for part in every)
    share = sum(part.compute_ns for part in every) / max(span, 1)
    if share < COMPUTE_BOUND:
        return "", []
    lead = f"Compute-bound: compute takes {format_percent(share, 0)} of {of_each(members[0])}"
    reports = [one.operators for one in members if one.operators is not None and one.operators.hardware is not None]
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for one in (one for report in reports for one in report.classes if one.known_ns >= SMALL * report.work_ns):
        sums[one.name].update(known=one.known_ns, gain=one.gain_ns, good=one.good_gain_ns)
    if not sums:
        return f"{lead}. ", []
    longest = sorted(sums.items(), key=lambda item: -item[1]["known"])
    rates = ", ".join(f"{WORK[kind]} {format_percent(1 - of['gain'] / of['known'], 0)}" for kind, of in longest[:3])
    steps, gains = sum(report.steps for report in reports), list[str]()
    at = f"at rates that good kernels reach (profile {reports[0].hardware})"
    for key, where in (("good", at), ("gain", "at the roofline")):
        most = sorted(longest, key=lambda item: -item[1][key])[:2]
        each = [f"{WORK[kind]} {format_ns(of[key] / steps)} ({format_percent(of[key] / span)})"
                for kind, of in most if of[key] >= SMALL / 2 * span]  # fmt: skip
        gains += [f"{where}, {' and '.join(each)}"] if each else []
    story = [f"What faster kernels would gain {per(members[0])}: {'; '.join(gains)}."] if gains else []
    return f"{lead}; its kernels reach these shares of the roofline: {rates}. ", story


def _host_bound(members: Sequence[TraceFigures], loss: "Loss") -> str:
    """Whether launches that come too late, or data, bound a step, and what it would take without the host's time."""
    worst = max(members, key=lambda one: loss.share([one]))
    replay = worst.what_if if loss.cause is Cause.LAUNCH else None
    if replay is None or replay.replay_error > TOLERATED_ERROR:
        return ""
    gain = next((one.gain_ns for one in replay.what_ifs if one.what == LAUNCHES), 0)
    if gain < _HOST_BOUND * replay.step_ns:
        return ""
    without = format_ns(replay.step_ns - gain)
    would = f"{of_each(members[0])} would take {without} if the host and its launches took no time. "
    found = worst.host_time
    if found is not None and found.input_ns >= _INPUT_BOUND * gain * found.steps:
        waits = f"{format_ns(found.input_ns / found.steps)} {in_each(worst)}"
        return f"Input-bound: the GPU waits {waits} while the host loads data. "
    share = mean([worst], lambda part: part.compute_ns) / mean([worst], lambda part: part.span_ns)
    if share >= _MOSTLY:
        return f"Mostly compute-bound ({format_percent(share, 0)}), in part host-bound: {would}"
    return f"Host-bound: {would}"


def _launch_bound(members: Sequence[TraceFigures], loss: "Loss") -> list[str]:
    """What the GPU waits for, what the host does meanwhile, and what less of that would gain."""
    where, *attempt = _idle(members, loss)
    one = max(members, key=lambda one: loss.share([one]))
    if one.host_time is None or one.what_if is None or not _host_bound(members, loss):
        return [where, *attempt]
    text = host_time_text(one, one.host_time, "Its" if len(members) > 1 else "The")
    if _BUSY_HOST in "".join(attempt):  # it does something else than launching, which costs what it costs
        return [where, text, *attempt]
    gains = [
        f"{_HOST_GAINS[what.what]} {format_ns(what.gain_ns)}"
        for what in one.what_if.what_ifs
        if what.what in _HOST_GAINS and what.gain_ns >= SMALL * one.what_if.step_ns
    ]
    return [
        where,
        text,
        f"What less of that would gain {per(one)}: {'; '.join(gains)}.",
    ]


def host_time_text(one: TraceFigures, found: HostTime, whose: str) -> str:
    """What the threads that launch spend their time on."""
    working = [part for part in found.parts if part.kind != "waits"]
    busy, kinds = sum(part.ns for part in working), list[str]()
    for part in working:
        most = [f"{name} {format_ns(ns / found.steps)}" for name, ns in part.most[:2] if name and ns >= 0.02 * busy]
        most = most if part.kind in ("operators", "annotations", "python") else []
        if part.ns >= 0.02 * busy:
            named = f" ({', '.join(most)})" if most else ""
            kinds.append(f"{HOST_WORK[part.kind]} {format_ns(part.ns / found.steps)}{named}")
    each = f"{found.launches // found.steps:,} launches, one every {format_ns(busy / max(1, found.launches))}"
    return f"{whose} host works {format_ns(busy / found.steps)} {in_each(one)} for {each}: {'; '.join(kinds)}."


def _uneven(members: Sequence[TraceFigures]) -> list[str]:
    """Steps that are long on every rank, so that means over all steps mislead, and the largest loss of the others."""
    if members[0].windows is not None or any(len(one.steps) < _STEPS_FOR_A_MEDIAN for one in members):
        return []
    usual_of = [median(step.breakdown.span_ns for step in one.steps) for one in members]
    long = set[int | None].intersection(*(
        {step.step for step in one.steps if step.breakdown.span_ns > _LONG_STEP * usual}
        for one, usual in zip(members, usual_of)
    ))  # fmt: skip
    of_long, rest = (
        [
            msgspec.structs.replace(one, steps=tuple(step for step in one.steps if (step.step in long) is is_long))
            for one in members
        ]
        for is_long in (True, False)
    )
    if not long or not all(one.steps for one in rest):
        return []
    length, usual = (format_ns(mean(which, lambda part: part.span_ns)) for which in (of_long, rest))
    numbers = ", ".join(map(str, sorted(step for step in long if step is not None)))
    take, average, them = (
        (f"Step {numbers} takes", "", "it") if len(long) == 1 else (f"Steps {numbers} take", " on average", "them")
    )
    share, worst = _losses(rest)[0]
    loss = f"the largest loss is {worst.name}, {format_percent(share)}" if share >= SMALL else "no loss reaches 1 %"
    first = min(step.step for one in members for step in one.steps if step.step is not None)
    advice = " Record later, after the warm-up." if first in long else ""
    return [
        f"{take} {length}{average}, the others {usual}: the means over all steps describe neither. Without {them} "
        f"{loss} of a step of {usual}.{advice}"
    ]


def _idle(members: Sequence[TraceFigures], loss: Loss) -> list[str]:
    """What most of the idle time was waiting for, on the rank that lost most by it, and what to try."""
    one = max(members, key=lambda one: loss.share([one]))
    named = [idle for idle in one.idle if idle.cause == loss.cause and idle.what]
    if not loss.place or not named or one.device.lower() == "cpu":
        return [f"To reduce {loss.name}, try: {loss.remedy}."]
    most = named[0]
    name = f"On {who(one)}, {loss.name}" if len(members) > 1 else loss.name[0].upper() + loss.name[1:]
    busy_host = loss.cause is Cause.LAUNCH and most.ns > _LONG_GAP_NS * most.count
    share = format_percent(most.ns / sum(idle.ns for idle in one.idle if idle.cause == loss.cause), 0)
    longest = "" if most.count == 1 else f" in all, the longest {format_ns(most.longest_ns)}"
    return [
        f"{name} is longest {loss.place} {name_in_words(most.what)}: {format_ns(most.ns / len(parts(one)))} "
        f"{in_each(one)}, {share} of it ({counted(most.count, 'gap')}{longest}).",
        f"Try: {_BUSY_HOST if busy_host else loss.remedy}.",
    ]


def _lone_copies(members: Sequence[TraceFigures], loss: Loss) -> list[str]:
    """The kind of copies that takes most time, on the rank that lost most by it, and what to try."""
    one = max(members, key=lambda one: loss.share([one]))
    most = one.lone_copies[0] if one.lone_copies else None
    remedies = [] if most is None else [text for keys, text in _COPIES.items() if any(key in most.name for key in keys)]
    attempt = f"To reduce them, try: {(*remedies, loss.remedy)[0]}."
    if most is None:
        return [attempt]
    # Concurrent copies, in both directions or of several devices, count each.
    total = sum(step.breakdown.lone_copy_ns for step in parts(one))
    at_once = sum(copy.ns for copy in one.lone_copies) > total
    share = "sum over concurrent copies" if at_once else f"{format_percent(most.ns / total, 0)} of them"
    on = f" on {who(one)}" if len(members) > 1 else ""
    return [
        f"Most of these copies{on}: {most.name}, {format_ns(most.ns / len(parts(one)))} {in_each(one)}, {share} "
        f"({most.count:,} in all).",
        attempt,
    ]


def _exposed(members: Sequence[TraceFigures], loss: Loss) -> list[str]:
    """Where communication is exposed most, whether it waits for another rank, and what to try."""
    worst = max(members, key=lambda one: mean([one], lambda part: part.exposed_ns))
    exposed = sum(part.breakdown.exposed_ns for part in parts(worst))
    op, unit, where = _most_exposed(worst, exposed)
    # With a unit, an all-to-all moves shards; otherwise it is the exchange of experts.
    remedy = _SHARDED if op == "all_to_all" and unit is not None else _OPERATIONS.get(op, loss.remedy)
    waits = exposed_waits(worst)
    if sum(waits.values()) > exposed / 2:
        return [*where, *filter(None, [bound_of(worst)])]
    unknown = unknown_waiting(worst, mostly=True)
    attempt = f"If the ranks hardly wait, try: {remedy}." if unknown else f"Try: {remedy}."
    named = attempt if where or unknown else f"To reduce exposed communication, try: {remedy}."
    return [*where, *filter(None, (bound_of(worst), unknown, named))]


def _most_exposed(one: TraceFigures, exposed_ns: int) -> tuple[str, str | None, list[str]]:
    """The operation and the unit with most exposed time, and a sentence; empty without exposed time."""
    of_unit: dict[str, Counter[str | None]] = defaultdict(Counter)
    for found in one.collectives:
        if found.step is not None or not has_steps(one):
            of_unit[found.op][found.unit] += found.exposed_ns
    of_op: Counter[str] = Counter()
    # Concurrent collectives are each exposed; a message counts each nanosecond once.
    for message in () if one.communication is None else one.communication.messages:
        of_op[message.op] += message.exposed_ns
    if not of_op.total():
        of_op = Counter({op: units.total() for op, units in of_unit.items()})
    if not of_op.total():
        return "", None, []
    ((op, ns),), steps = of_op.most_common(1), len(parts(one))
    ((unit, most),) = (of_unit[op] or Counter({None: ns})).most_common(1)
    several = len(of_unit[op]) > 1
    place = f" of {unit}" if unit and not several else ""
    more = " (sum over concurrent collectives)" if ns > exposed_ns else ""
    more += f"; the unit with most of it is {unit} ({format_ns(most / steps)})" if unit and several else ""
    text = f"Most exposed on {who(one)}: {short(op)}{place}, {format_ns(ns / steps)} {in_each(one)}{more}."
    return op, unit, [text]


def exposed_waits(one: TraceFigures) -> dict[int, int]:
    """Exposed nanoseconds in which a rank waited for others, by rank, the longest first; over its steps."""
    sums: Counter[int] = Counter()
    for part in () if one.communication is None else one.communication.steps or (one.communication.whole,):
        for peer in part.waits_for:
            sums[peer.rank] += peer.waited_ns
    return dict(sums.most_common())


def bound_of(figures: TraceFigures) -> str:
    """What bounds communication: bandwidth, latency or skew? Empty if nothing can be said."""
    found = figures.communication
    if found is None or found.bound is None or not found.messages:
        return ""
    exposed = sum(part.exposed_ns for part in found.steps or (found.whole,))
    if found.bound == "skew":
        waits = exposed_waits(figures)
        last, waited = next(iter(waits)), sum(waits.values())
        return (
            f"Skew: {format_percent(waited / exposed, 0)} of exposed communication is waiting for ranks that enter "
            f"late, {format_percent(waits[last] / waited, 0)} of that for rank {last}."
        )
    if found.bound == "latency":
        bound = [one for one in found.messages if one.is_latency_bound]
        return (
            f"Latency-bound: {format_percent(sum(one.exposed_ns for one in bound) / exposed, 0)} of exposed "
            f"communication is in messages whose time hardly depends on their size; most in {_named(bound[0])}."
        )
    return "" if found.bound == "unknown" and figures.device == "cpu" else _rate_of(found, figures.device)


def _rate_of(found: CommunicationFigures, device: str) -> str:
    """How much of their link's rate the messages with most exposed time reach."""
    most = found.messages[0]
    alone = most.transfer_bandwidth is not None
    reached = most.transfer_bandwidth if alone else most.bus_bandwidth
    if reached is None:
        lacks = "its size" if most.most_bytes is None else "how many ranks its group has"
        return (
            f"Most exposed communication is {_named(most)}; its bandwidth is unknown: the trace does not say {lacks}."
        )
    rate, waiting = format_rate(reached / 1e9), "without waiting" if alone else "waiting for other ranks included"
    if found.bound == "unknown" or most.link_bandwidth is None:
        why = f"no cluster profile names {device}" if found.profile is None else "its group's ranks are not known"
        return f"{_named(most)} reaches {rate} GB/s, {waiting}; the link's rate is unknown: {why}."
    return (
        f"{'Bandwidth-bound' if found.bound == 'bandwidth' else 'Below the link'}: {_named(most)} reaches {rate} of "
        f"{format_rate(most.link_bandwidth / 1e9)} GB/s (profile {found.profile}), {waiting}."
    )


def unknown_waiting(figures: TraceFigures, *, mostly: bool = False) -> str:
    """How much exposed communication may be transfer or waiting, why, and how to tell them apart; else empty.

    With ``mostly``, empty unless it is at least half and there is room for waiting: not if a link runs near its peak,
    and not if messages are all latency.
    """
    found = figures.communication
    if found is None or (mostly and found.bound not in ("below", "unknown")) or figures.backend == "emulated":
        return ""  # an emulated rank waits for nobody
    every = found.steps or (found.whole,)
    exposed, unknown = sum(one.exposed_ns for one in every), sum(one.undivided_ns for one in every)
    if not found.missing or not unknown or (mostly and 2 * unknown < exposed):
        return ""
    size = figures.world_size
    ranks = "both ranks" if size == 2 else "all ranks" if size is None else f"all {size} ranks"
    some = "T" if unknown == exposed else f"In {format_ns(unknown)} of {format_ns(exposed)}, t"
    return (
        f"{some}ransfer and waiting for other ranks cannot be told apart: {found.missing}. Record the same steps on "
        f"{ranks}, a file each, and run refshard trace on their folder."
    )


def short(op: str) -> str:
    """An operation; a kernel's name without its arguments."""
    return op.partition("(")[0].partition("<")[0]


def size_of(one: MessageFigures) -> str:
    """From the smallest message to the largest."""
    least, most = format_bytes(one.least_bytes), format_bytes(one.most_bytes)
    return least if least == most else f"{least} to {most}"


def group_of(one: MessageFigures) -> str:
    """The program's name for a group, or its id, with its ranks."""
    if one.group is None:
        return "" if one.group_size is None else f"{one.group_size} ranks"
    identity, bracket, ranks = one.group.partition(" [")
    return f"{one.description or identity}{bracket}{ranks}"


def reach_of(one: MessageFigures) -> str:
    """Whether the group lies inside a node."""
    return "" if one.nodes is None else "inside a node" if one.nodes == 1 else f"{one.nodes} nodes"


def _named(one: MessageFigures) -> str:
    where = ", ".join(part for part in (group_of(one), reach_of(one)) if part)
    size = "" if one.least_bytes is None else f" of {size_of(one)}"
    return f"{short(one.op)}{size}{f' ({where})' if where else ''}"


def warnings_text(figures: Sequence[TraceFigures]) -> list[str]:
    """Every warning once, with the traces that give it if there are several traces."""
    givers: dict[str, list[str]] = {}
    for one in figures:
        for found in one.warnings:
            files = givers.setdefault(f"[{found.code}] {warning(found)}", [])
            files += [] if one.file in files else [Path(one.file).name]
    sentences = []
    for sentence, files in givers.items():
        more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
        of = f"all {len(figures)} traces" if len(files) == len(figures) else f"{', '.join(files[:_MOST_NAMED])}{more}"
        sentences.append(sentence if len(figures) == 1 else f"{sentence} ({of})")
    return sentences


def warning(found: TraceWarning) -> str:
    """A warning, with the events or the time that it concerns unless its message has them."""
    says = rf"(?<![\d.,])(?:{found.count:,}|{found.count})(?![\d,]|\.\d)" if found.count is not None else ""
    concerned = [] if found.count is None or re.search(says, found.message) else [counted(found.count, "event")]
    concerned += [] if found.ns is None or format_ns(found.ns) in found.message else [format_ns(found.ns)]
    return f"{found.message} ({', '.join(concerned)})" if concerned else found.message


EXPOSED = Loss(
    "exposed communication", lambda step: step.breakdown.exposed_ns,
    "gather earlier, move fewer bytes, or give each rank more to compute", _exposed,
)  # fmt: skip
LOSSES = (
    EXPOSED,
    Loss(
        "launch-bound idle time", lambda step: step.breakdown.idle_launch_ns,
        "fewer and larger kernels (torch.compile), CUDA graphs, no synchronisation with the host", _launch_bound,
        cause=Cause.LAUNCH, place="before",
    ),
    Loss(
        "idle time in blocking calls", lambda step: step.breakdown.idle_call_ns,
        "keep such calls out of the step: warm up what loads or allocates, read results later",
        cause=Cause.CALL, place="in gaps spent mostly in",
    ),
    Loss(
        "gaps between queued kernels", lambda step: step.breakdown.idle_back_to_back_ns,
        "fewer and larger kernels: fused ones, torch.compile", cause=Cause.BACK_TO_BACK,
    ),
    Loss(
        "idle time waiting for another stream", lambda step: step.breakdown.idle_dependency_ns,
        "issue what is waited for earlier, or let the streams depend on less", cause=Cause.DEPENDENCY, place="where",
    ),
    Loss(
        "idle time of unknown cause", lambda step: step.breakdown.idle_unknown_ns,
        "look in the timeline (--html) at what comes next: it was queued, and the trace does not say what it waited "
        "for (work before the recording, or work that the profiler does not record)",
        cause=Cause.UNKNOWN, place="before",
    ),
    Loss(
        "exposed copies into and out of collective buffers", lambda step: step.copies.exposed_ns,
        "let collectives read and write parameters and gradients in place, or overlap the copies",
    ),
    Loss(
        "reductions held up by slow preparatory kernels (give-way)", lambda step: step.giveway.lost_ns,
        "prepare the reduction with fewer kernels on side streams",
    ),
    Loss(
        "copies that overlap no other work", lambda step: step.breakdown.lone_copy_ns,
        "copy less: write results where they are needed, or copy on a separate stream", _lone_copies,
    ),
)  # fmt: skip
