"""One step of a timeline as what a screen can draw: lanes, rows in them, and groups of alike spans at every scale.

A lane is a stream or a thread; where spans of one lane enclose each other (operators that call operators) they stand in
rows below each other. A group is what is drawn in one row in one style, so its blocks are disjoint and sorted, and a
reader finds those in view by binary search. Above the lanes stand the units, below them two strips say when
communication is exposed and why the device idles, and the collectives' own lanes carry the gaps between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from refshard.report.hulls import Hull, Rows, busy_by_lane, hulls, main_lane, within
from refshard.report.pyramid import Level, levels
from refshard.timeline import KINDS, UNKNOWN, Intervals, Kind, Nanoseconds, Spans, Timeline
from refshard.tracing.figures import CollectiveFigures, StepFigures, TraceFigures
from refshard.tracing.idle import idle_gaps, knows_launches
from refshard.tracing.overlap import exposed_communication

MOST_ROWS = 6
MOST_LANES = 24
_KIND_WORDS = {
    Kind.COMPUTE: "compute", Kind.COMM: "communication", Kind.PREP: "preparation", Kind.COPY: "copies",
    Kind.UNCLASSIFIED: "unclassified",
}  # fmt: skip
_Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A band of the drawing: ``role`` is ``units``, ``spans`` or ``strip``."""

    label: str
    role: str
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where blocks are drawn, and in which of :data:`refshard.report.palette.STYLES`."""

    lane: int
    row: int
    style: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """A step, ready to be drawn over ``[start, end)`` ns, its window being ``[begin, close)``.

    ``names``, ``units`` and ``queued`` (nanoseconds from launch to start) belong to the spans that ``firsts`` of the
    levels name; the tables say what the codes mean, :data:`UNKNOWN` is none.
    """

    step: int | None
    start: int
    end: int
    begin: int
    close: int
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...]
    levels: tuple[Level, ...]
    names: _Codes
    units: _Codes
    queued: Nanoseconds
    name_table: tuple[str, ...]
    unit_table: tuple[str, ...]
    undrawn_lanes: int


def middle_step(figures: TraceFigures) -> StepFigures | None:
    """The step of median length, the shorter one of two; None for a trace without steps."""
    ordered = sorted(figures.steps, key=lambda step: step.breakdown.span_ns)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def drawn_window(figures: TraceFigures, timeline: Timeline) -> tuple[int | None, int, int]:
    """Number, start and end of the step that is drawn: the median one, or all of a trace without steps."""
    step = middle_step(figures)
    if step is not None:
        return step.step, step.start_ns, step.start_ns + step.breakdown.span_ns
    spans = timeline.spans
    return (None, int(spans.starts.min()), int(spans.ends.max())) if len(spans) else (None, 0, 0)


def draw_step(timeline: Timeline, figures: TraceFigures, most: int) -> Drawing:
    """The median step at every level of detail, the finest of at most ``most`` blocks where merging can reach that."""
    step, begin, close = drawn_window(figures, timeline)
    spans = timeline.spans
    seen = within(spans, begin, close)
    order = _lane_order(spans, seen)
    collected = _Collected(names=list(spans.name_table))
    if (unit_hulls := hulls(timeline, begin, close)) and order:
        _add_units(collected, unit_hulls, spans)
    for lane in order[:MOST_LANES]:
        _add_lane(collected, spans, seen & (spans.lanes == lane), _label(spans, seen, lane))
        _add_gaps(collected, figures.collectives, spans.lane_names[lane], begin, close)
    _add_strips(collected, timeline, begin, close)
    return collected.drawing(step, begin, close, spans.unit_names, max(0, len(order) - MOST_LANES), most)


@dataclass(slots=True, kw_only=True)
class _Collected:
    """Lanes and groups so far, and for every group the columns of its spans."""

    names: list[str]
    lanes: list[Lane] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    columns: list[tuple[npt.NDArray[np.int64], ...]] = field(default_factory=list)

    def add(
        self, row: int, style: str, starts: Nanoseconds, ends: Nanoseconds, names: _Codes | int,
        units: _Codes | None = None, queued: Nanoseconds | None = None,
    ) -> None:  # fmt: skip
        """One group of the last lane; nothing where it has no span."""
        if not len(starts):
            return
        unknown = np.full(len(starts), UNKNOWN, np.int64)
        group = np.full(len(starts), len(self.groups), np.int64)
        named = np.full(len(starts), names, np.int64) if isinstance(names, int) else names.astype(np.int64)
        known = unknown if units is None else units.astype(np.int64), unknown if queued is None else queued
        self.groups.append(Group(lane=len(self.lanes) - 1, row=row, style=style))
        self.columns.append((group, starts, ends, named, *known))

    def named(self, name: str) -> int:
        """The code of a name of the page's own."""
        self.names.append(name)
        return len(self.names) - 1

    def drawing(
        self, step: int | None, begin: int, close: int, unit_table: tuple[str, ...], undrawn: int, most: int
    ) -> Drawing:
        """All of it, over the window and whatever reaches out of it."""
        empty = [np.empty(0, np.int64)] * 6
        groups, starts, ends, names, units, queued = (
            [np.concatenate(parts) for parts in zip(*self.columns)] if self.columns else empty
        )
        start, end = int(min(starts.min(initial=begin), begin)), int(max(ends.max(initial=close), close))
        made = levels(groups.astype(np.int32), starts, ends, length=end - start, most=most)
        used, codes = np.unique(names, return_inverse=True)
        return Drawing(
            step=step, start=start, end=end, begin=begin, close=close, lanes=tuple(self.lanes),
            groups=tuple(self.groups), levels=made, names=codes.astype(np.int32), units=units.astype(np.int32),
            queued=queued, name_table=tuple(self.names[code] for code in used), unit_table=unit_table,
            undrawn_lanes=undrawn,
        )  # fmt: skip


def _lane_order(spans: Spans, seen: Rows) -> list[int]:
    """Lanes with anything in view: the main one, those that communicate, the others; the busier first."""
    communicating = busy_by_lane(spans, seen & spans.of_kind(Kind.COMM))
    busy = busy_by_lane(spans, seen)
    main = main_lane(spans, seen)
    present = np.unique(spans.lanes[seen]).tolist()
    return sorted(present, key=lambda lane: (lane != main, -communicating[lane], -busy[lane]))


def _label(spans: Spans, seen: Rows, lane: int) -> str:
    """The lane's name, and what runs most on it."""
    mine = seen & (spans.lanes == lane)
    busy = np.bincount(spans.kinds[mine], weights=(spans.ends - spans.starts)[mine], minlength=len(KINDS))
    return f"{spans.lane_names[lane]}: {_KIND_WORDS[KINDS[int(np.argmax(busy))]]}"


def _add_units(collected: _Collected, found: Sequence[Hull], spans: Spans) -> None:
    """Two groups in turn, so that neighbours differ where they touch."""
    collected.lanes.append(Lane(label="units", role="units"))
    codes: dict[str, int] = {}
    for hull in found:
        name = f"{spans.unit_names[hull.unit]} {hull.phase}".strip()
        if name not in codes:
            codes[name] = collected.named(name)
    for first, style in ((0, "unit"), (1, "unit-odd")):
        chosen = found[first::2]
        collected.add(
            0, style, np.array([h.start for h in chosen], np.int64), np.array([h.end for h in chosen], np.int64),
            np.array([codes[f"{spans.unit_names[h.unit]} {h.phase}".strip()] for h in chosen], np.int32),
            np.array([h.unit for h in chosen], np.int32),
        )  # fmt: skip


def _add_lane(collected: _Collected, spans: Spans, mine: Rows, label: str) -> None:
    rows = np.flatnonzero(mine)
    rows = rows[np.lexsort((-spans.ends[rows], spans.starts[rows]))]
    depths = _depths(spans.starts[rows], spans.ends[rows])
    collected.lanes.append(Lane(label=label, role="spans", rows=int(depths.max(initial=0)) + 1))
    for depth in range(int(depths.max(initial=0)) + 1):
        for code, kind in enumerate(KINDS):
            group = rows[(depths == depth) & (spans.kinds[rows] == code)]
            launches = spans.launches[group]
            queued = np.where(launches == UNKNOWN, UNKNOWN, np.maximum(0, spans.starts[group] - launches))
            collected.add(
                depth, kind.value, spans.starts[group], spans.ends[group],
                spans.names[group], spans.units[group], queued,
            )  # fmt: skip


def _depths(starts: Nanoseconds, ends: Nanoseconds) -> npt.NDArray[np.int64]:
    """For each span, ordered by start and the longer first, the first row that is free; the last takes the rest."""
    if not len(starts) or np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1]):
        return np.zeros(len(starts), np.int64)
    free: list[int] = []
    depths = np.empty(len(starts), np.int64)
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        depth = next((row for row, until in enumerate(free) if until <= start), len(free))
        depth = min(depth, MOST_ROWS - 1)
        depths[place] = depth
        free[depth : depth + 1] = [max(end, free[depth]) if depth < len(free) else end]
    return depths


def _add_gaps(
    collected: _Collected, collectives: Sequence[CollectiveFigures], lane: str, begin: int, close: int
) -> None:
    """The gaps between collectives on this lane, by whether they block."""
    for style, name, blocking in (
        ("gap", "gap before the next collective", False),
        ("gap-blocking", "blocking gap: the next collective was launched and compute ran", True),
    ):
        gaps = sorted(
            (c.start_ns - c.gap_ns, c.start_ns)
            for c in collectives
            if c.lane == lane and c.gap_ns is not None and c.gap_ns > 0 and bool(c.gap_blocking) is blocking
        )
        kept = [(start, end) for start, end in gaps if start < close and end > begin]
        if kept:
            pairs = np.array(kept, np.int64).clip(begin, close)
            collected.add(0, style, pairs[:, 0], pairs[:, 1], collected.named(name))


def _add_strips(collected: _Collected, timeline: Timeline, begin: int, close: int) -> None:
    collected.lanes.append(Lane(label="exposed communication", role="strip"))
    exposed = exposed_communication(timeline) & Intervals.of([(begin, close)])
    collected.add(0, "exposed", exposed.starts, exposed.ends, collected.named("exposed communication"))
    collected.lanes.append(Lane(label="idle", role="strip"))
    for style, gaps in idle_styles(timeline, begin, close):
        name = {"idle-host": "idle: the next span was launched after the gap began",
                "idle-dependency": "idle: the next span was launched already, and waited"}  # fmt: skip
        collected.add(0, style, gaps.starts, gaps.ends, collected.named(name.get(style, "idle")))


def idle_styles(timeline: Timeline, begin: int, close: int) -> Iterator[tuple[str, Intervals]]:
    """The gaps of a window in which nothing runs, by style: host-bound, dependency-bound, or unknown."""
    gaps = idle_gaps(timeline.spans, timeline.busy(*Kind), begin, close)
    gaps = gaps.split(np.array([begin], np.int64), np.array([close], np.int64))
    if not knows_launches(timeline.spans):
        yield "idle", Intervals(gaps.starts, gaps.ends)
        return
    for style, rows in (("idle-host", gaps.host_bound), ("idle-dependency", ~gaps.host_bound)):
        yield style, Intervals(gaps.starts[rows], gaps.ends[rows])
