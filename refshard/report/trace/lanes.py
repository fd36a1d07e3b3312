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

from refshard.report.draw.palette import STYLES
from refshard.report.trace.details import Note, Notes, collectives_of, of_collective, of_exposed, of_gap, of_idle
from refshard.report.trace.hulls import Hull, Rows, busy_by_lane, hulls, within
from refshard.report.trace.pyramid import Level, levels
from refshard.timeline import KINDS, UNKNOWN, Intervals, Kind, Nanoseconds, Spans, Timeline
from refshard.tracing.figures import CollectiveFigures, StepFigures, TraceFigures
from refshard.tracing.idle import Gaps, idle_gaps, knows_launches
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
    """Where blocks are drawn, and in which of :data:`refshard.report.draw.palette.STYLES`."""

    lane: int
    row: int
    style: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """A step, ready to be drawn over ``[start, end)`` ns, its window being ``[begin, close)``.

    ``names``, ``units``, ``queued`` (nanoseconds from launch to start) and ``notes`` belong to the spans that
    ``firsts`` of the levels name; the tables say what the codes mean, :data:`UNKNOWN` is none.
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
    notes: _Codes
    name_table: tuple[str, ...]
    note_table: tuple[Note, ...]
    unit_table: tuple[str, ...]
    undrawn_lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is drawn: a step, or all of a trace without steps (``step`` None), ``label`` saying which and why."""

    step: int | None
    begin: int
    close: int
    label: str
    name: str


def drawn_windows(figures: TraceFigures, timeline: Timeline) -> tuple[Window, ...]:
    """The step of median length, the shorter one of two, then the slowest where it is another."""
    ordered = sorted((s for s in figures.steps if s.step is not None), key=lambda step: step.breakdown.span_ns)
    if not ordered:
        spans = timeline.spans
        begin, close = (int(spans.starts.min()), int(spans.ends.max())) if len(spans) else (0, 0)
        return (Window(step=None, begin=begin, close=close, label="the whole trace", name="whole trace"),)
    middle, slowest = ordered[(len(ordered) - 1) // 2], ordered[-1]
    if len(ordered) == 1:
        return (_window(middle, "the only one", "only"),)
    words = (("the faster of two", "faster"), ("the slower of two", "slower"))
    words = words if len(ordered) == 2 else (("of median length", "median"), ("the slowest", "slowest"))
    if middle.breakdown.span_ns == slowest.breakdown.span_ns:
        return (_window(middle, "of median length, which is the longest too", "median"),)
    return tuple(_window(step, *words) for step, words in zip((middle, slowest), words))


def _window(step: StepFigures, why: str, word: str) -> Window:
    return Window(
        step=step.step, begin=step.start_ns, close=step.start_ns + step.breakdown.span_ns,
        label=f"step {step.step}, {why}", name=f"{word} step {step.step}",
    )  # fmt: skip


def draw_step(timeline: Timeline, figures: TraceFigures, window: Window, most: int) -> Drawing:
    """A step at every level of detail, the finest of at most ``most`` blocks where merging can reach that."""
    begin, close = window.begin, window.close
    spans = timeline.spans
    seen = within(spans, begin, close)
    order = _lane_order(spans, seen)
    collected = _Collected(names=list(spans.name_table))
    parts = collectives_of(spans, figures.collectives)
    if (unit_hulls := hulls(timeline, begin, close)) and order:
        _add_units(collected, unit_hulls, spans)
    for lane in order[:MOST_LANES]:
        _add_lane(collected, timeline, seen & (spans.lanes == lane), _label(spans, seen, lane), figures, parts)
        _add_gaps(collected, figures.collectives, spans.lane_names[lane], begin, close)
    _add_strips(collected, timeline, figures.collectives, begin, close)
    return collected.drawing(window.step, begin, close, spans.unit_names, max(0, len(order) - MOST_LANES), most)


@dataclass(slots=True, kw_only=True)
class _Collected:
    """Lanes and groups so far, and for every group the columns of its spans."""

    names: list[str]
    lanes: list[Lane] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    columns: list[tuple[npt.NDArray[np.int64], ...]] = field(default_factory=list)
    notes: Notes = field(default_factory=lambda: Notes(codes={}))

    def add(
        self, row: int, style: str, starts: Nanoseconds, ends: Nanoseconds, names: _Codes | int,
        units: _Codes | None = None, queued: Nanoseconds | None = None, notes: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """One group of the last lane; nothing where it has no span."""
        if not len(starts):
            return
        unknown = np.full(len(starts), UNKNOWN, np.int64)
        group = np.full(len(starts), len(self.groups), np.int64)
        named = np.full(len(starts), names, np.int64) if isinstance(names, int) else names.astype(np.int64)
        known = [unknown if one is None else one.astype(np.int64) for one in (units, queued, notes)]
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
        empty = [np.empty(0, np.int64)] * 7
        groups, starts, ends, names, units, queued, notes = (
            [np.concatenate(parts) for parts in zip(*self.columns)] if self.columns else empty
        )
        start, end = int(min(starts.min(initial=begin), begin)), int(max(ends.max(initial=close), close))
        made = levels(groups.astype(np.int32), starts, ends, length=end - start, most=most)
        used, codes = np.unique(names, return_inverse=True)
        return Drawing(
            step=step, start=start, end=end, begin=begin, close=close, lanes=tuple(self.lanes),
            groups=tuple(self.groups), levels=made, names=codes.astype(np.int32), units=units.astype(np.int32),
            queued=queued, notes=notes.astype(np.int32), name_table=tuple(self.names[code] for code in used),
            note_table=tuple(self.notes.codes), unit_table=unit_table, undrawn_lanes=undrawn,
        )  # fmt: skip


def _lane_order(spans: Spans, seen: Rows) -> list[int]:
    """Lanes with anything in view: the main one, those that communicate, the others; the busier first."""
    communicating = busy_by_lane(spans, seen & spans.of_kind(Kind.COMM))
    busy = busy_by_lane(spans, seen)
    main = spans.main_lane()
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


def _add_lane(
    collected: _Collected, timeline: Timeline, mine: Rows, label: str, figures: TraceFigures,
    parts: npt.NDArray[np.int64],
) -> None:  # fmt: skip
    spans = timeline.spans
    rows = np.flatnonzero(mine)
    rows = rows[np.lexsort((-spans.ends[rows], spans.starts[rows]))]
    depths = _depths(spans.starts[rows], spans.ends[rows])
    collected.lanes.append(Lane(label=label, role="spans", rows=int(depths.max(initial=0)) + 1))
    for depth in range(int(depths.max(initial=0)) + 1):
        for code, kind in enumerate(KINDS):
            group = rows[(depths == depth) & (spans.kinds[rows] == code)]
            launches = spans.launches[group]
            # An operator of the host is not launched, it runs; and a collective's note tells of its wait.
            known = (launches != UNKNOWN) & (parts[group] == UNKNOWN) & timeline.on_device
            notes = (
                [
                    UNKNOWN if part == UNKNOWN else collected.notes.code(of_collective(figures.collectives[part]))
                    for part in parts[group].tolist()
                ]
                if kind is Kind.COMM
                else [UNKNOWN] * len(group)
            )
            collected.add(
                depth, kind.value, spans.starts[group], spans.ends[group], spans.names[group], spans.units[group],
                np.where(known, np.maximum(0, spans.starts[group] - launches), UNKNOWN), np.array(notes, np.int64),
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
    mine = [c for c in collectives if c.lane == lane and c.gap_ns is not None and c.gap_ns > 0]
    for style, blocking in (("gap", False), ("gap-blocking", True)):
        gaps = sorted(
            (c.start_ns - (c.gap_ns or 0), c.start_ns, collected.notes.code(of_gap(c)))
            for c in mine
            if bool(c.gap_blocking) is blocking and c.start_ns - (c.gap_ns or 0) < close and c.start_ns > begin
        )
        if gaps:
            columns = np.array(gaps, np.int64)
            starts, ends = columns[:, 0].clip(begin, close), columns[:, 1].clip(begin, close)
            collected.add(0, style, starts, ends, collected.named(STYLES[style].label), notes=columns[:, 2])


def _add_strips(
    collected: _Collected, timeline: Timeline, collectives: Sequence[CollectiveFigures], begin: int, close: int
) -> None:
    collected.lanes.append(Lane(label="exposed communication", role="strip"))
    exposed = exposed_communication(timeline) & Intervals.of([(begin, close)])
    near = [c for c in collectives if c.start_ns < close and c.start_ns + c.duration_ns > begin]
    whose = of_exposed(near, exposed.starts, exposed.ends, collected.notes)
    collected.add(0, "exposed", exposed.starts, exposed.ends, collected.named("exposed communication"), notes=whose)
    collected.lanes.append(Lane(label="idle", role="strip"))
    for style, gaps in idle_styles(timeline, begin, close):
        ended = of_idle(timeline.spans, gaps, collected.notes, on_device=timeline.on_device)
        collected.add(0, style, gaps.starts, gaps.ends, collected.named(STYLES[style].label), notes=ended)


def idle_styles(timeline: Timeline, begin: int, close: int) -> Iterator[tuple[str, Gaps]]:
    """The gaps of a window in which nothing runs, by style: host-bound, dependency-bound, or unknown."""
    gaps = idle_gaps(timeline.spans, timeline.busy(*Kind), begin, close)
    gaps = gaps.split(np.array([begin], np.int64), np.array([close], np.int64))
    if not knows_launches(timeline.spans):
        yield "idle", gaps
        return
    for style, rows in (("idle-host", gaps.host_bound), ("idle-dependency", ~gaps.host_bound)):
        yield style, gaps.of(rows)
