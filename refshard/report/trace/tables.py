"""Figures of traces as tables of text, ready for a page."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import pandas as pd

from refshard.quantities import format_bytes, format_ns, format_percent, format_rate
from refshard.report.trace import jobs as trace_jobs
from refshard.report.trace import waiting
from refshard.report.trace.idle import NAMES as IDLE
from refshard.report.trace.per_step import each, has_steps
from refshard.tracing.figures import Breakdown, CollectiveFigures, StepFigures, TraceFigures
from refshard.tracing.overlap import mean_ratio

MOST_UNITS = 400
MOST_WAITS = 40
_Size = tuple[str, int | None, str | None, int | None]


def summary(figures: Sequence[TraceFigures]) -> pd.DataFrame:
    """One row per trace; times are means over its steps. Columns that would say nothing here are left out."""
    names = trace_jobs.job_names(figures)
    rows = [{"trace": one.file, "job": names[one.job], **_summary_row(one)} for one in figures]
    every = [part.breakdown for one in figures for part in trace_jobs.parts(one)]
    told = {
        "job": len(names) > 1,
        "device": len({one.device for one in figures}) > 1,
        "idle, host late": any(one.device != "cpu" for one in figures),
        "exposed to all": any(part.exposed_ns != part.exposed_any_ns for part in every),
        "late reductions (give-way)": any(one.giveway.index is not None for one in figures),
    }
    return _frame(rows).drop(columns=[column for column, is_told in told.items() if not is_told])


def _summary_row(one: TraceFigures) -> dict[str, str]:
    every = [part.breakdown for part in trace_jobs.parts(one)]

    def mean(of: Callable[[Breakdown], int | None], *, of_host: bool = False) -> str:
        known = every if of_host or not one.host_only else []
        values = [value for part in known if (value := of(part)) is not None]
        return format_ns(sum(values) / len(values)) if values else "-"

    return {
        "rank": f"{'-' if one.rank is None else one.rank} of {'?' if one.world_size is None else one.world_size}",
        "device": one.device,
        "steps": str(len(one.steps)) if has_steps(one) else "-",
        "span": mean(lambda part: part.span_ns, of_host=True),
        "compute": mean(lambda part: part.compute_ns),
        "communication": mean(lambda part: part.comm_ns),
        "exposed": mean(lambda part: part.exposed_ns),
        "exposed to all": mean(lambda part: part.exposed_any_ns),
        "overlap ratio": "-" if one.host_only else format_percent(mean_ratio(every)),
        "idle": mean(lambda part: part.idle_ns),
        "idle, host late": "-" if one.device == "cpu" else mean(lambda part: part.idle_host_ns),
        "late reductions (give-way)": format_percent(one.giveway.index, 2),
    }


def steps(one: TraceFigures) -> pd.DataFrame:
    """Where the time of every step, and of the whole trace, goes."""
    every = [step for step in one.steps if step.step is not None]
    return _frame(
        [
            {each(one) if every else "step": _step_name(step), **_parts_row(one, step.breakdown)}
            | {
                "late reductions (give-way)": format_ns(step.giveway.lost_ns),
                "copy-in": format_ns(step.copies.copy_in_ns),
                "copy-out": format_ns(step.copies.copy_out_ns),
                "waits for a reduction": format_ns(step.reduce_wait.host_ns),
            }
            for step in (*every, trace_jobs.whole(one))
        ]
    )


def _step_name(step: StepFigures) -> str:
    """Its number, and the name of a window that a user chose."""
    if step.step is None:
        return "whole trace"
    return str(step.step) if step.name is None else f"{step.step}: {step.name}"


def _parts_row(one: TraceFigures, part: Breakdown) -> dict[str, str]:
    if one.host_only:
        return {"span": format_ns(part.span_ns)}
    return {
        "span": format_ns(part.span_ns),
        "compute": format_ns(part.compute_ns),
        "communication": format_ns(part.comm_ns),
        "exposed": format_ns(part.exposed_ns),
        "preparation": format_ns(part.prep_ns),
        "copy": format_ns(part.copy_ns),
        "unclassified": format_ns(part.unclassified_ns),
        "idle": format_ns(part.idle_ns),
        **{name: format_ns(getattr(part, f"idle_{cause}_ns")) for cause, name in IDLE.items()},
    }


def per_step(one: TraceFigures) -> str:
    """What sums of units, collectives and waits are over."""
    if not has_steps(one):
        return "over the whole trace"
    what = each(one)
    return f"per {what}, mean of {len(one.steps)}" if len(one.steps) > 1 else f"of the only {what}"


def units(one: TraceFigures) -> pd.DataFrame:
    """One row per unit, per step."""
    steps = len(trace_jobs.parts(one))
    return _frame(
        [
            {
                "unit": unit.unit,
                "compute": format_ns(unit.compute_ns / steps),
                "communication": format_ns(unit.comm_ns / steps),
                "exposed": format_ns(unit.exposed_ns / steps),
                "exposed share": format_percent(unit.exposed_ns / unit.comm_ns) if unit.comm_ns else "-",
                "preparation": format_ns(unit.prep_ns / steps),
                "copy": format_ns(unit.copy_ns / steps),
                "collectives": _number(unit.collectives, steps),
            }
            for unit in one.units[:MOST_UNITS]
        ]
    )


def _number(n: int, steps: int) -> str:
    return f"{n // steps:,}" if n % steps == 0 else f"{n / steps:,.1f}"


def collectives(one: TraceFigures) -> pd.DataFrame:
    """One row per operation, size and group, per step; the most exposed first."""
    groups: dict[_Size, list[CollectiveFigures]] = {}
    for found in one.collectives:
        groups.setdefault((found.op, found.bytes, found.group, found.group_size), []).append(found)
    ordered = sorted(groups.items(), key=lambda item: -sum(c.exposed_ns for c in item[1]))
    sizes = _told_apart(groups)
    steps = len(trace_jobs.parts(one))
    return _frame(
        [
            {
                "collective": key[0],
                "bytes": sizes[key],
                "units": _units(members),
                "group": f"{key[2] or 'unknown'} ({'?' if key[3] is None else key[3]} ranks)",
                "count": _number(len(members), steps),
                "median duration": format_ns(median(c.duration_ns for c in members)),
                "algorithm bandwidth": _rate([c.algorithm_bandwidth for c in members]),
                "bus bandwidth": _rate([c.bus_bandwidth for c in members]),
                "exposed": format_ns(sum(c.exposed_ns for c in members) / steps),
                "median queued": format_ns(middle_of([c.queued_ns for c in members])),
                "blocking gaps": blocking(members, steps),
            }
            for key, members in ordered
        ]
    )


def _told_apart(groups: Iterable[_Size]) -> dict[_Size, str]:
    """Sizes in words: exact ones where two rows would look alike."""
    rounded = {key: format_bytes(key[1]) for key in groups}
    alike = Counter((key[0], size, *key[2:]) for key, size in rounded.items())
    return {
        key: f"{key[1]:,} B" if key[1] is not None and alike[key[0], size, *key[2:]] > 1 else size
        for key, size in rounded.items()
    }


def _units(members: Sequence[CollectiveFigures]) -> str:
    names = [name for name in dict.fromkeys(found.unit for found in members) if name is not None]
    return "-" if not names else names[0] if len(names) == 1 else f"{len(names)} units"


def middle_of(values: Sequence[float | None]) -> float | None:
    """The median of those that are known; None of none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rate(values: Sequence[float | None]) -> str:
    middle = middle_of(values)
    return "-" if middle is None else f"{format_rate(middle / 1e9)} GB/s"


def blocking(members: Sequence[CollectiveFigures], steps: int) -> str:
    """Gaps in which a collective was launched already while compute ran: their number and time per step."""
    gaps = [c.gap_ns for c in members if c.gap_blocking and c.gap_ns is not None]
    return f"{_number(len(gaps), steps)} ({format_ns(sum(gaps) / steps)})" if gaps else "0"


def overheads(one: TraceFigures) -> list[tuple[str, str]]:
    """Copies, waits for a reduction's buffer, give-way: per step, in words."""
    copies, wait, give, steps = one.copies, one.reduce_wait, one.giveway, len(trace_jobs.parts(one))

    def mean(ns: int | None) -> str:
        return format_ns(None if ns is None else ns / steps)

    device = "" if wait.device_ns is None else f"; compute stream idle for {mean(wait.device_ns)} of it"
    found = [
        ("copy-in and copy-out", f"{mean(copies.copy_in_ns)} in, {mean(copies.copy_out_ns)} out; "
         f"{mean(copies.exposed_ns)} exposed, {mean(copies.hidden_ns)} overlapped"),
        ("waits for an earlier reduction", f"{_number(wait.count, steps)}, host waiting {mean(wait.host_ns)}"
         f"{device}" if wait.count else "none"),
    ]  # fmt: skip
    if give.index is None:
        return [*found, ("late reductions (give-way)", give.reason or "not known")]
    stretch = "" if give.stretch is None else f"preparatory kernels take {give.stretch:.2f} times as long; "
    baseline = f"; baseline: {give.baseline}, {give.samples} samples" if give.baseline else ""
    return [
        *found,
        ("late reductions (give-way)", f"{format_percent(give.index)} of the trace, {mean(give.lost_ns)}: {stretch}"
         f"{_number(give.reduces, steps)} reductions{baseline}"),
    ]  # fmt: skip


def waits(members: Sequence[TraceFigures]) -> pd.DataFrame:
    """Which rank of a job waits how long for which, per step; the longest waits first."""
    every = [(len(trace_jobs.parts(one)), one, wait) for one in members for wait in one.waits_for]
    every.sort(key=lambda row: -row[2].waited_ns / row[0])
    exposed = {id(one): waiting.exposed_waits(one) for one in members if one.communication is not None}
    span = {id(one): sum(part.breakdown.span_ns for part in trace_jobs.parts(one)) for one in members}
    return _frame(
        [
            {
                "waiting": trace_jobs.who(one),
                "for": f"rank {wait.rank}",
                "waited": format_ns(wait.waited_ns / steps),
                "share of the step": format_percent(wait.waited_ns / span[id(one)]) if span[id(one)] else "-",
                "exposed": format_ns(exposed[id(one)].get(wait.rank, 0) / steps) if id(one) in exposed else "-",
                "collectives": _number(wait.collectives, steps),
            }
            for steps, one, wait in every[:MOST_WAITS]
        ]
    )


def _frame(rows: list[dict[str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows)
