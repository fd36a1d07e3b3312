"""Figures of traces as tables of text, ready for a page."""

from collections.abc import Callable, Sequence
from statistics import median

import pandas as pd

from refshard.quantities import format_bytes, format_ns, format_percent, format_rate
from refshard.report import trace_words
from refshard.tracing.figures import Breakdown, CollectiveFigures, TraceFigures

MOST_UNITS = 400
MOST_WAITS = 40


def summary(figures: Sequence[TraceFigures]) -> pd.DataFrame:
    """One row per trace; times are means over its steps."""
    return _frame([_summary_row(one) for one in figures])


def _summary_row(one: TraceFigures) -> dict[str, str]:
    every = [part for part, _ in trace_words.parts(one)]

    def mean(of: Callable[[Breakdown], int | None]) -> str:
        values = [value for part in every if (value := of(part)) is not None]
        return format_ns(sum(values) / len(values)) if values else "-"

    comm, exposed = sum(part.comm_ns for part in every), sum(part.exposed_ns for part in every)
    host, dependency = mean(lambda part: part.idle_host_ns), mean(lambda part: part.idle_dependency_ns)
    return {
        "trace": one.file,
        "job": str(one.job),
        "rank": f"{'-' if one.rank is None else one.rank} of {'?' if one.world_size is None else one.world_size}",
        "device": one.device,
        "steps": str(len(one.steps)),
        "step span": mean(lambda part: part.span_ns),
        "compute": mean(lambda part: part.compute_ns),
        "communication": mean(lambda part: part.comm_ns),
        "exposed": mean(lambda part: part.exposed_ns),
        "exposed to all": mean(lambda part: part.exposed_any_ns),
        "overlap ratio": format_percent(1 - exposed / comm) if comm else "-",
        "idle": mean(lambda part: part.idle_ns),
        "of it host / dependency": "-" if host == "-" else f"{host} / {dependency}",
        "give-way index": format_percent(one.giveway.index, 2),
        "warnings": str(len(one.warnings)),
    }


def steps(one: TraceFigures) -> pd.DataFrame:
    """Where the time of every step goes."""
    return _frame(
        [
            {"step": "-" if step.step is None else str(step.step), **_parts_row(step.breakdown)}
            | {
                "give-way": format_ns(step.giveway.lost_ns),
                "copy-in": format_ns(step.copies.copy_in_ns),
                "copy-out": format_ns(step.copies.copy_out_ns),
                "waits for a reduction": format_ns(step.reduce_wait.host_ns),
            }
            for step in one.steps
        ]
        + [{"step": "whole trace", **_parts_row(one.whole)}]
    )


def _parts_row(part: Breakdown) -> dict[str, str]:
    return {
        "span": format_ns(part.span_ns),
        "compute": format_ns(part.compute_ns),
        "communication": format_ns(part.comm_ns),
        "exposed": format_ns(part.exposed_ns),
        "preparation": format_ns(part.prep_ns),
        "copy": format_ns(part.copy_ns),
        "unclassified": format_ns(part.unclassified_ns),
        "idle": format_ns(part.idle_ns),
        "idle, host": format_ns(part.idle_host_ns),
        "idle, dependency": format_ns(part.idle_dependency_ns),
    }


def units(one: TraceFigures) -> pd.DataFrame:
    """One row per unit, over all steps."""
    return _frame(
        [
            {
                "unit": unit.unit,
                "compute": format_ns(unit.compute_ns),
                "communication": format_ns(unit.comm_ns),
                "exposed": format_ns(unit.exposed_ns),
                "exposed share": format_percent(unit.exposed_ns / unit.comm_ns) if unit.comm_ns else "-",
                "preparation": format_ns(unit.prep_ns),
                "copy": format_ns(unit.copy_ns),
                "collectives": str(unit.collectives),
            }
            for unit in one.units[:MOST_UNITS]
        ]
    )


def collectives(one: TraceFigures) -> pd.DataFrame:
    """One row per operation, size and group; the most exposed first."""
    groups: dict[tuple[str, int | None, str | None, int | None], list[CollectiveFigures]] = {}
    for found in one.collectives:
        groups.setdefault((found.op, found.bytes, found.group, found.group_size), []).append(found)
    ordered = sorted(groups.items(), key=lambda item: -sum(c.exposed_ns for c in item[1]))
    return _frame(
        [
            {
                "collective": op,
                "bytes": format_bytes(size),
                "group": f"{group or '-'} ({'?' if ranks is None else ranks} ranks)",
                "count": str(len(members)),
                "median duration": format_ns(median(c.duration_ns for c in members)),
                "algorithm bandwidth": _rate([c.algorithm_bandwidth for c in members]),
                "bus bandwidth": _rate([c.bus_bandwidth for c in members]),
                "exposed, total": format_ns(sum(c.exposed_ns for c in members)),
                "median queued": format_ns(_median([c.queued_ns for c in members])),
                "blocking gaps": _blocking(members),
            }
            for (op, size, group, ranks), members in ordered
        ]
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rate(values: Sequence[float | None]) -> str:
    middle = _median(values)
    return "-" if middle is None else f"{format_rate(middle / 2**30)} GiB/s"


def _blocking(members: Sequence[CollectiveFigures]) -> str:
    gaps = [c.gap_ns for c in members if c.gap_blocking and c.gap_ns is not None]
    return f"{len(gaps)} ({format_ns(sum(gaps))})" if gaps else "0"


def overheads(one: TraceFigures) -> list[tuple[str, str]]:
    """Copies, waits for a reduction's buffer, give-way: over the whole trace, in words."""
    copies, wait, give = one.copies, one.reduce_wait, one.giveway
    device = "" if wait.device_ns is None else f", the compute stream stood still for {format_ns(wait.device_ns)} of it"
    found = [
        ("copy-in and copy-out", f"{format_ns(copies.copy_in_ns)} in, {format_ns(copies.copy_out_ns)} out; "
         f"{format_ns(copies.exposed_ns)} exposed, {format_ns(copies.hidden_ns)} beside compute"),
        ("waits for an earlier reduction", f"{wait.count}, in which the host stood {format_ns(wait.host_ns)}{device}"
         if wait.count else "none"),
    ]  # fmt: skip
    if give.index is None:
        return [*found, ("give-way", give.reason or "not known")]
    stretch = "" if give.stretch is None else f"preparatory kernels take {give.stretch:.2f} times as long; "
    baseline = f"; baseline: {give.baseline}, {give.samples} samples" if give.baseline else ""
    return [
        *found,
        ("give-way", f"{format_percent(give.index)} of the trace, {format_ns(give.lost_ns)}: {stretch}"
         f"{give.reduces} reductions{baseline}"),
    ]  # fmt: skip


def waits(members: Sequence[TraceFigures]) -> pd.DataFrame:
    """Which rank of a job waits how long for which; the longest waits first."""
    every = [(one, wait) for one in members for wait in one.waits_for]
    every.sort(key=lambda pair: -pair[1].waited_ns)
    return _frame(
        [
            {
                "waiting": trace_words.who(one),
                "for": f"rank {wait.rank}",
                "waited": format_ns(wait.waited_ns),
                "collectives": str(wait.collectives),
            }
            for one, wait in every[:MOST_WAITS]
        ]
    )


def _frame(rows: list[dict[str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows)
