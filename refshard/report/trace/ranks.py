"""The ranks of a job as one answer: which rank is late, what that costs the others, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refshard.analysis.figures import HostTime, LateCause, Lateness, TraceFigures
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Row, Table, table, without_empty
from refshard.report.trace.text import HOST_WORK, in_each, ns, parts, per, share, who

SMALL = 0.01
"""A rank that costs the others less than this share of the step holds nobody up."""
_ALSO = 0.25
"""A second cause with this share of the delay is named too."""
_LARGER, _CLOCK = 1.05, 0.3
"""A ratio from here on is a difference; other kernels that slow down by less than this part of what matrix products do
hint at the clock."""
_STEPS_FOR_TURNS = 3
_CAUSES: dict[LateCause, str] = {
    "slower": "slower kernels", "work": "more work", "compute": "compute", "copies": "copies", "input": "data loading",
    "allocator": "allocator", "host": "host", "communication": "held up itself", "idle": "other idle time",
}  # fmt: skip


def lateness_of(members: Sequence[TraceFigures]) -> list[tuple[TraceFigures, Lateness]]:
    """The ranks of which it is known how late they come, the most costly first."""
    known = [(one, one.lateness) for one in members if one.lateness is not None]
    return sorted(known, key=lambda pair: (-pair[1].cost_ns, pair[0].rank or 0))


def _span_ns(members: Sequence[TraceFigures]) -> float:
    """Of a step, the mean over these ranks."""
    every = [part.breakdown.span_ns for one in members for part in parts(one)]
    return sum(every) / max(1, len(every))


def is_held_up(members: Sequence[TraceFigures]) -> bool:
    """Whether waiting for late ranks costs a part of the step that matters."""
    cost = sum(late.cost_ns / max(1, len(late.steps)) for _, late in lateness_of(members))
    return cost > 0 and cost >= SMALL * _span_ns(members)


def late(members: Sequence[TraceFigures]) -> str:
    """Who comes last to how many collectives, what the others wait, and why; empty if the traces cannot tell.

    What the others wait is a mean over them and their steps, so that it never exceeds a step.
    """
    known = lateness_of(members)
    if len(known) < 2:
        return ""
    (one, worst), span, a = known[0], _span_ns(members), in_each(members[0])
    steps, each = max(1, len(worst.steps)), [late.cost_ns for _, late in known]
    cost = worst.cost_ns / steps
    if not is_held_up(members):
        most = f": the most is {format_ns(cost)} {a}, for {who(one)}" if cost else ""
        return f"No rank here holds the others up{most}."
    if steps >= _STEPS_FOR_TURNS and worst.leads <= steps / 2 and worst.cost_ns < sum(each) / 2:
        total = sum(each) / steps
        text = (
            f"The {len(known)} ranks here hold each other up by turns, {format_ns(total)} {a} "
            f"({format_percent(total / span)}): none costs the others most in over half of the steps. Most is for "
            f"{who(one)}, {format_ns(cost)}, in {worst.leads} of {steps} steps."
        )
        return f"{text} {_why(members, one, worst)}"
    others = len(known) - 1
    waits = f"{who(known[1][0])} waits" if others == 1 else f"the {others} others wait"
    growth = (
        f", more from step to step ({format_ns(worst.steps[0])} in the first, {format_ns(worst.steps[-1])} in the last)"
        if worst.grows
        else ""
    )
    which = (
        "the only collective"
        if worst.collectives == 1
        else f"{format_percent(worst.last / worst.collectives, 0)} of {worst.collectives:,} collectives"
    )
    text = (
        f"{who(one).capitalize()} comes last to {which}, and {waits} {format_ns(cost)} {a} for it "
        f"({format_percent(cost / span)}){growth}."
    )
    if steps >= _STEPS_FOR_TURNS:
        text += f" It costs them most in {worst.leads} of {steps} steps."
    other, second = known[1]
    if second.cost_ns >= worst.cost_ns / 2:
        text += f" For {who(other)} they wait {format_ns(second.cost_ns / steps)}."
    return f"{text} {_why(members, one, worst)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delay:
    """What delays one rank: ``longer`` and ``percent`` are by how much, and which part of it is for one cause."""

    members: Sequence[TraceFigures]
    one: TraceFigures
    its: Lateness
    longer: str
    percent: str


def _why(members: Sequence[TraceFigures], one: TraceFigures, its: Lateness) -> str:
    """What the rank does longer than the others, and what to try."""
    if not its.parts:
        return "Its trace does not say why."
    total, steps = sum(part.ns for part in its.parts), len(parts(one))
    most, *rest = its.parts
    also = [f"{_CAUSES[part.cause]} {format_percent(part.ns / total, 0)}" for part in rest if part.ns >= _ALSO * total]
    delay = _Delay(
        members=members, one=one, its=its,
        longer=f"{format_ns(most.ns / steps)} {in_each(one)} longer than the others",
        percent=f"{format_percent(most.ns / total, 0)} of its delay",
    )  # fmt: skip
    explain = _EXPLAIN[most.cause]
    text = explain.format(delay=delay) if isinstance(explain, str) else explain(delay)
    return f"{text} Also: {', '.join(also)}." if also else text


def _slower(delay: _Delay) -> str:
    its, operators = delay.its, delay.one.operators
    if its.same_work is None:
        return _computes(delay)
    if delay.one.device == "cpu":
        return (
            f"Its operators take {its.same_work:.2f} times as long as the others' for the same work ({delay.percent}): "
            "fewer or slower cores, or other processes on them."
        )
    times = f"Its kernels take {its.same_work:.2f} times as long as the others' for the same work ({delay.percent})"
    if operators is not None and not operators.has_shapes:
        times += ", as far as kernels and grids tell (record_shapes=True tells more)"
    look = "Look at that GPU: nvidia-smi -q -d PERFORMANCE, and its processes."
    if its.products is not None and its.rest is not None and its.rest - 1 < _CLOCK * (its.products - 1):
        return (
            f"{times}, matrix products {its.products:.2f} times, the rest {its.rest:.2f} times, as with a lower clock. "
            f"{look}"
        )
    return f"{times}: slower hardware, a lower clock or another process on it. {look}"


def _more_work(delay: _Delay) -> str:
    its = delay.its
    more = "it runs other or larger kernels than they do"
    if its.flops is not None and its.flops >= _LARGER:
        more = f"its operators have {its.flops:.2f} times the FLOPs of the others'"
    if its.same_work is not None:
        more += f", and the same work takes {its.same_work:.2f} times as long"
        more += ", so its hardware is not slower" if its.same_work < _LARGER else ""
    return (
        f"It has more work ({delay.percent}): {more}. Balance what the ranks are given: tokens, sequence lengths, "
        "experts, layers."
    )


def _computes(delay: _Delay) -> str:
    shapeless = delay.one.operators is not None and not delay.one.operators.has_shapes
    why = (
        "more work and slower hardware cannot be told apart without shapes (record_shapes=True)"
        if shapeless
        else "it has little work in common with the others, so it may have more, or slower hardware"
    )
    return f"It computes {delay.longer} ({delay.percent}); {why}."


def _host(delay: _Delay) -> str:
    one = delay.one
    if one.device == "cpu":
        return f"Its thread does something else than operators, {delay.longer} ({delay.percent}): look at that host."
    text = f"Its host launches too late, {delay.longer} ({delay.percent})"
    of_others = [_host_ns(other.host_time) for other in delay.members if other is not one and other.host_time]
    if one.host_time is None or not of_others:
        return f"{text}: look at that host."
    mine = _host_ns(one.host_time)
    usual = {kind: sum(other.get(kind, 0) for other in of_others) / len(of_others) for kind in mine}
    kind = max(mine, key=lambda kind: mine[kind] - usual[kind])
    if mine[kind] <= _LARGER * usual[kind]:
        return f"{text}: look at that host."
    most = next(part.most for part in one.host_time.parts if part.kind == kind)
    name = f", most in {most[0][0]}" if most and most[0][0] else ""
    return (
        f"{text}: {HOST_WORK[kind]} {format_ns(mine[kind])} {in_each(one)} against {format_ns(usual[kind])}{name}. "
        "Look at that host: its cores, other processes on it, garbage collection."
    )


def _host_ns(found: HostTime) -> dict[str, float]:
    return {part.kind: part.ns / found.steps for part in found.parts if part.kind != "waits"}


def _held_up(delay: _Delay) -> str:
    whom = f", most for rank {delay.one.waits_for[0].rank}" if delay.one.waits_for else ""
    return f"It stands in other collectives {delay.longer} ({delay.percent}){whom}: look there first."


_EXPLAIN: dict[LateCause, str | Callable[[_Delay], str]] = {
    "slower": _slower, "work": _more_work, "compute": _computes, "host": _host, "communication": _held_up,
    "input": "It waits for data loading {delay.longer} ({delay.percent}). Try: more workers, prefetching; look at the "
    "storage of that node.",
    "allocator": "Its host stands in the allocator's calls {delay.longer} ({delay.percent}): its memory is nearly "
    f"full or fragmented. Try: {EXPANDABLE_SEGMENTS}, or a smaller batch there.",
    "copies": "It copies between host and device {delay.longer} ({delay.percent}): look at what it copies, and "
    "at its PCIe link.",
    "idle": "Its device idles {delay.longer} ({delay.percent}), waiting for another stream or for a reason that its "
    "trace does not say.",
}  # fmt: skip
"""What a cause means and what to try: a text to fill, or what makes one."""


def lateness_table(members: Sequence[TraceFigures]) -> Table | None:
    """A row per rank: how often it comes last, what the others wait for it, and what it does longer than they."""
    known = lateness_of(members)
    if not known:
        return None
    span, rows = _span_ns(members), list[Row]()
    for one, its in known:
        steps = max(1, len(its.steps))
        of_part = {part.cause: part.ns for part in its.parts}
        rows.append(
            {
                "rank": who(one).removeprefix("rank "), "comes last": share(its.last / its.collectives, 0),
                "others wait": ns(its.cost_ns, steps), "share of the step": share(its.cost_ns / steps / max(span, 1)),
                "steps led": its.leads, "same work": None if its.same_work is None else f"{its.same_work:.2f}x",
                "FLOPs": None if its.flops is None else f"{its.flops:.2f}x",
                **{text: ns(of_part.get(cause), len(parts(one))) for cause, text in _CAUSES.items()},
            }
        )  # fmt: skip
    rows = without_empty(rows, ("same work", "FLOPs", *_CAUSES.values()))
    caption = (
        f"Who comes last, and why. Times {per(members[0])}: what the others wait for a rank while nothing computes, "
        "and which part of that is for what. Ratios are to the mean of the others"
    )
    return table(rows, left=0, caption=caption, shown=16)
