"""Tables of a trace's figures: every step, gaps, units, collectives, waits and overheads."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from refshard.analysis.figures import Breakdown, CollectiveFigures, TraceFigures
from refshard.events.timeline import Timeline
from refshard.quantities import format_bytes, format_ns, format_percent
from refshard.report.blocks import Block, Cell, Quantity, Section, Table, table
from refshard.report.trace import wording
from refshard.report.trace.findings import exposed_waits
from refshard.report.trace.idle import names as idle_names
from refshard.report.trace.wording import count_per, each, has_steps

MOST_UNITS = 400
MOST_WAITS = 40
_Size = tuple[str, int | None, str | None, int | None]


def of_trace(one: TraceFigures, timeline: Timeline | None) -> Iterator[Block]:
    """The tables that only a page shows, each folded."""
    over = per_step(one)
    found = [
        ("Every step in numbers", steps(one),
            "Parts of every step; classes overlap, so they add up to more than the span"),
        ("Gaps in numbers", _gaps(one, timeline), "Gaps by length: number and total time, over the whole trace"),
        (
            "Collectives, the most exposed first", collectives(one),
            f"By operation, size of the unsharded tensor and group. Counts and sums {over}; concurrent collectives are "
            "added up",
        ),
        (
            f"{wording.counted(len(one.units), 'unit')}"
            f"{f', the first {MOST_UNITS}' if len(one.units) > MOST_UNITS else ''}", units(one),
            f"Each unit's own spans, {over}; concurrent communication counts for each unit",
        ),
        (f"Overheads, {over}", overheads(one), ""),
    ]  # fmt: skip
    for title, rows, caption in found:
        if rows:
            text = ("units", "group", "figure")
            yield Section(
                title=title, blocks=[table(rows, text=text, caption=caption or title)], folded=True, where="page"
            )


def _gaps(one: TraceFigures, timeline: Timeline | None) -> list[dict[str, Cell]]:
    if timeline is None:
        return []
    from refshard.report.trace.charts import gap_table, gaps_of  # plotly takes a second to import

    gaps = gaps_of(one, timeline)
    return gap_table(gaps) if gaps else []


def steps(one: TraceFigures) -> list[dict[str, Cell]]:
    """Where the time of every step, and of the whole trace, goes."""
    every = [step for step in one.steps if step.step is not None]
    names = [f"{step.step}" if step.name is None else f"{step.step}: {step.name}" for step in every]
    return [
        {each(one) if every else "step": name, **_parts_row(one, step.breakdown)}
        | {
            "late reductions (give-way)": Quantity(step.giveway.lost_ns, "ns"),
            "copy-in": Quantity(step.copies.copy_in_ns, "ns"),
            "copy-out": Quantity(step.copies.copy_out_ns, "ns"),
            "waits for a reduction": Quantity(step.reduce_wait.host_ns, "ns"),
        }
        for step, name in zip((*every, wording.whole(one)), (*names, "whole trace"))
    ]


def _parts_row(one: TraceFigures, part: Breakdown) -> dict[str, Cell]:
    if one.host_only:
        return {"span": Quantity(part.span_ns, "ns")}
    parts = {
        "span": part.span_ns, "compute": part.compute_ns, "communication": part.comm_ns, "exposed": part.exposed_ns,
        "exposed to all": part.exposed_any_ns, "preparation": part.prep_ns, "copy": part.copy_ns,
        "unclassified": part.unclassified_ns, "idle": part.idle_ns,
        **{name: getattr(part, f"idle_{cause}_ns") for cause, name in idle_names(one.device).items()},
    }  # fmt: skip
    return {name: Quantity(ns, "ns") for name, ns in parts.items()}


def per_step(one: TraceFigures) -> str:
    """What sums of units, collectives and waits are over."""
    if not has_steps(one):
        return "over the whole trace"
    what = each(one)
    return f"per {what}, mean of {len(one.steps)}" if len(one.steps) > 1 else f"of the only {what}"


def units(one: TraceFigures) -> list[dict[str, Cell]]:
    """One row per unit, per step."""
    steps = len(wording.parts(one))
    return [
        {
            "unit": unit.unit,
            "compute": Quantity(unit.compute_ns / steps, "ns"),
            "communication": Quantity(unit.comm_ns / steps, "ns"),
            "exposed": Quantity(unit.exposed_ns / steps, "ns"),
            "exposed share": Quantity(unit.exposed_ns / unit.comm_ns, "share") if unit.comm_ns else None,
            "preparation": Quantity(unit.prep_ns / steps, "ns"),
            "copy": Quantity(unit.copy_ns / steps, "ns"),
            "collectives": count_per(unit.collectives, steps),
        }
        for unit in one.units[:MOST_UNITS]
    ]


def collectives(one: TraceFigures) -> list[dict[str, Cell]]:
    """One row per operation, size and group, per step; the most exposed first."""
    groups: dict[_Size, list[CollectiveFigures]] = {}
    for found in one.collectives:
        groups.setdefault((found.op, found.bytes, found.group, found.group_size), []).append(found)
    ordered = sorted(groups.items(), key=lambda item: -sum(c.exposed_ns for c in item[1]))
    sizes = _told_apart(groups)
    steps = len(wording.parts(one))
    return [
        {
            "collective": key[0],
            "bytes": sizes[key],
            "units": _units(members),
            "group": f"{key[2] or 'unknown'} ({'?' if key[3] is None else key[3]} ranks)",
            "count": count_per(len(members), steps),
            "median duration": Quantity(median(c.duration_ns for c in members), "ns"),
            "algorithm bandwidth": Quantity(middle_of([c.algorithm_bandwidth for c in members]), "GB/s"),
            "bus bandwidth": Quantity(middle_of([c.bus_bandwidth for c in members]), "GB/s"),
            "exposed": Quantity(sum(c.exposed_ns for c in members) / steps, "ns"),
            "median queued": Quantity(middle_of([c.queued_ns for c in members]), "ns"),
            "blocking gaps": blocking(members, steps),
        }
        for key, members in ordered
    ]


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


def blocking(members: Sequence[CollectiveFigures], steps: int) -> str:
    """Gaps in which a collective was launched already while compute ran: their number and time per step."""
    gaps = [c.gap_ns for c in members if c.gap_blocking and c.gap_ns is not None]
    return f"{count_per(len(gaps), steps)} ({format_ns(sum(gaps) / steps)})" if gaps else "0"


def overheads(one: TraceFigures) -> list[dict[str, Cell]]:
    """Copies, waits for a reduction's buffer, give-way: per step, in words."""
    copies, wait, give, steps = one.copies, one.reduce_wait, one.giveway, len(wording.parts(one))

    def mean(ns: int | None) -> str:
        return format_ns(None if ns is None else ns / steps)

    device = "" if wait.device_ns is None else f"; compute stream idle for {mean(wait.device_ns)} of it"
    found = [
        ("copy-in and copy-out", f"{mean(copies.copy_in_ns)} in, {mean(copies.copy_out_ns)} out; "
         f"{mean(copies.exposed_ns)} exposed, {mean(copies.hidden_ns)} overlapped"),
        ("waits for an earlier reduction", f"{count_per(wait.count, steps)}, host waiting {mean(wait.host_ns)}"
         f"{device}" if wait.count else "none"),
    ]  # fmt: skip
    late = give.reason or "not known"
    if give.index is not None:
        stretch = "" if give.stretch is None else f"preparatory kernels take {give.stretch:.2f} times as long; "
        baseline = f"; baseline: {give.baseline}, {give.samples} samples" if give.baseline else ""
        late = f"{format_percent(give.index)} of the trace, {mean(give.lost_ns)}: {stretch}"
        late += f"{count_per(give.reduces, steps)} reductions{baseline}"
    return [{"overhead": name, "figure": text} for name, text in (*found, ("late reductions (give-way)", late))]


def waits(members: Sequence[TraceFigures]) -> Table:
    """Which rank of a job waits how long for which, per step; the longest waits first."""
    every = [(len(wording.parts(one)), one, wait) for one in members for wait in one.waits_for]
    every.sort(key=lambda row: -row[2].waited_ns / row[0])
    exposed = {id(one): exposed_waits(one) for one in members if one.communication is not None}
    span = {id(one): sum(part.breakdown.span_ns for part in wording.parts(one)) for one in members}
    rows: list[dict[str, Cell]] = [
        {
            "waiting": wording.who(one),
            "for": f"rank {wait.rank}",
            "waited": Quantity(wait.waited_ns / steps, "ns"),
            "share of the step": Quantity(wait.waited_ns / span[id(one)], "share") if span[id(one)] else None,
            "exposed": Quantity(exposed[id(one)].get(wait.rank, 0) / steps, "ns") if id(one) in exposed else None,
            "collectives": count_per(wait.collectives, steps),
        }
        for steps, one, wait in every[:MOST_WAITS]
    ]
    caption = f"Time waited in collectives for the last rank, {per_step(members[0])}; longest first"
    return table(rows, left=2, caption=caption)
