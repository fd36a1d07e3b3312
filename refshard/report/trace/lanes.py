"""What a timeline shows of a step: rows of blocks, lane by lane.

A lane is a stream or a thread; where spans of one lane enclose each other (operators that call operators) they stand in
rows below each other. Above the lanes stand the units; below them one row says when communication is exposed, and one
when and why the device idles. Lanes beside the main one carry the gaps between their collectives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Nanoseconds, Spans, Timeline
from refshard.report.trace.details import Note, collectives_of, of_collective, of_exposed, of_gap, of_idle
from refshard.report.trace.hulls import Rows, busy_by_lane, hulls, within
from refshard.report.trace.idle import NAMES as IDLE
from refshard.tracing.figures import Cause, CollectiveFigures, StepFigures, TraceFigures
from refshard.tracing.idle import Gaps, idle_gaps
from refshard.tracing.overlap import exposed_communication

MOST_ROWS = 6
"""Of a lane; the last one takes what is enclosed more deeply."""
MOST_LANES = 12
NAMES = {
    Kind.COMPUTE.value: "compute", Kind.COMM.value: "communication", Kind.PREP.value: "preparation of a reduction",
    Kind.COPY.value: "copy", Kind.UNCLASSIFIED.value: "unclassified", "unit": "unit (layer)",
    "exposed": "exposed communication", **{f"idle-{cause}": name for cause, name in IDLE.items()},
    "gap": "gap between collectives", "gap-blocking": "blocking gap between collectives",
}  # fmt: skip
"""What a style is called in a legend, of those that have an entry."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks in one style of :data:`refshard.report.draw.palette.SPANS`, ordered by start, a note for each.

    Dimmed is what belongs to other units than the one that is shown.
    """

    style: str
    starts: Nanoseconds
    ends: Nanoseconds
    notes: Sequence[Note]
    dimmed: bool = False

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneRow:
    """A row of blocks; ``label`` names the lane that begins with it. Narrow rows say when something is the case."""

    label: str
    blocks: tuple[Blocks, ...]
    narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is drawn: a step, or all of a trace without steps (``step`` None); ``label`` says which and why."""

    step: int | None
    begin: int
    close: int
    label: str


def drawn_windows(figures: TraceFigures, timeline: Timeline) -> tuple[Window, ...]:
    """The step of median length, the shorter one of two, then the slowest where it is another."""
    ordered = sorted((s for s in figures.steps if s.step is not None), key=lambda step: step.breakdown.span_ns)
    if not ordered:
        spans = timeline.spans
        begin, close = (int(spans.starts.min()), int(spans.ends.max())) if len(spans) else (0, 0)
        return (Window(step=None, begin=begin, close=close, label="the whole trace"),)
    middle, slowest = ordered[(len(ordered) - 1) // 2], ordered[-1]
    if len(ordered) == 1:
        return (_window(middle, "the only one"),)
    words = ("the faster of two", "the slower of two") if len(ordered) == 2 else ("of median length", "the slowest")
    if middle.breakdown.span_ns == slowest.breakdown.span_ns:
        return (_window(middle, "median and slowest"),)
    return tuple(_window(step, why) for step, why in zip((middle, slowest), words))


def _window(step: StepFigures, why: str) -> Window:
    close = step.start_ns + step.breakdown.span_ns
    what = f"step {step.step}" if step.name is None else f"window {step.step}, {step.name}"
    return Window(step=step.step, begin=step.start_ns, close=close, label=f"{what}, {why}")


def step_rows(timeline: Timeline, figures: TraceFigures, window: Window) -> tuple[list[LaneRow], int]:
    """The rows of a step from above, and how many lanes are left out."""
    begin, close = window.begin, window.close
    spans, collectives = timeline.spans, figures.collectives
    seen = within(spans, begin, close)
    order, main = _lane_order(spans, seen), spans.main_lane()
    parts = collectives_of(spans, collectives)
    found = [_units(timeline, begin, close)]
    for lane in order[:MOST_LANES]:
        first, *others = lane_rows(spans, seen & (spans.lanes == lane), _label(spans, seen, lane), collectives, parts)
        gaps = () if lane == main else _gaps(collectives, spans.lane_names[lane], begin, close)
        found += [LaneRow(label=first.label, blocks=(*first.blocks, *gaps)), *others]
    found += [_exposed(timeline, collectives, begin, close), _idle(timeline, begin, close)]
    return [row for row in found if row.blocks], max(0, len(order) - MOST_LANES)


def lane_rows(
    spans: Spans, mine: Rows, label: str, collectives: Sequence[CollectiveFigures], parts: npt.NDArray[np.int64],
    own: int | None = None,
) -> list[LaneRow]:  # fmt: skip
    """The rows of the spans ``mine``, which share a lane; dimmed is what does not belong to the unit ``own``.

    ``parts`` are those of :func:`collectives_of`.
    """
    rows = np.flatnonzero(mine)
    rows = rows[np.lexsort((-spans.ends[rows], spans.starts[rows]))]
    depths = _depths(spans.starts[rows], spans.ends[rows])
    dimmed = np.zeros(len(rows), bool) if own is None else spans.units[rows] != own
    found = []
    for depth in range(int(depths.max(initial=0)) + 1):
        blocks = []
        for is_dimmed in (True, False):
            for code, kind in enumerate(KINDS):
                here = rows[(depths == depth) & (dimmed == is_dimmed) & (spans.kinds[rows] == code)]
                if len(here):
                    notes = [_note(spans, row, collectives, part) for row, part in zip(here.tolist(), parts[here])]
                    blocks.append(
                        Blocks(
                            style=kind.value, starts=spans.starts[here], ends=spans.ends[here], notes=notes,
                            dimmed=is_dimmed,
                        )
                    )  # fmt: skip
        found.append(LaneRow(label="" if depth else label, blocks=tuple(blocks)))
    return found


def _note(spans: Spans, row: int, collectives: Sequence[CollectiveFigures], part: int) -> Note:
    name = spans.name_table[spans.names[row]]
    if part != UNKNOWN:
        head, rest = of_collective(collectives[part])
        return head, f"{rest}; {name}"
    unit = spans.units[row]
    return name, "" if unit == UNKNOWN else spans.unit_names[unit]


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
    return f"{spans.lane_names[lane]}: {NAMES[KINDS[int(np.argmax(busy))].value]}"


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


def _units(timeline: Timeline, begin: int, close: int) -> LaneRow:
    """Two styles in turn, so that neighbours differ where they touch."""
    names = timeline.spans.unit_names
    found = hulls(timeline, begin, close)
    return LaneRow(
        label="units",
        blocks=tuple(
            Blocks(
                style=style, starts=np.array([hull.start for hull in chosen], np.int64),
                ends=np.array([hull.end for hull in chosen], np.int64),
                notes=[(names[hull.unit], hull.phase) for hull in chosen],
            )
            for style, chosen in (("unit", found[::2]), ("unit-odd", found[1::2]))
            if chosen
        ),
    )  # fmt: skip


def _gaps(collectives: Sequence[CollectiveFigures], lane: str, begin: int, close: int) -> Iterator[Blocks]:
    """The gaps between collectives on this lane, by whether they block."""
    mine = [one for one in collectives if one.lane == lane and one.gap_ns and begin < one.start_ns < close + one.gap_ns]
    for style, blocking in (("gap", False), ("gap-blocking", True)):
        here = sorted((one for one in mine if bool(one.gap_blocking) is blocking), key=lambda one: one.start_ns)
        if here:
            ends = np.array([one.start_ns for one in here], np.int64)
            starts = ends - np.array([one.gap_ns for one in here], np.int64)
            notes = [of_gap(one) for one in here]
            yield Blocks(style=style, starts=starts.clip(begin, close), ends=ends.clip(begin, close), notes=notes)


def _exposed(timeline: Timeline, collectives: Sequence[CollectiveFigures], begin: int, close: int) -> LaneRow:
    exposed = exposed_communication(timeline) & Intervals.of([(begin, close)])
    near = [one for one in collectives if one.start_ns < close and one.start_ns + one.duration_ns > begin]
    notes = of_exposed(near, exposed.starts, exposed.ends)
    blocks = Blocks(style="exposed", starts=exposed.starts, ends=exposed.ends, notes=notes)
    return LaneRow(label="exposed communication", blocks=(blocks,) if notes else (), narrow=True)


def _idle(timeline: Timeline, begin: int, close: int) -> LaneRow:
    blocks = tuple(
        Blocks(
            style=style, starts=gaps.starts, ends=gaps.ends,
            notes=of_idle(timeline, gaps),
        )
        for style, gaps in idle_styles(timeline, begin, close)
        if len(gaps.starts)
    )  # fmt: skip
    return LaneRow(label="idle", blocks=blocks, narrow=True)


def idle_styles(timeline: Timeline, begin: int, close: int) -> Iterator[tuple[str, Gaps]]:
    """The gaps of a window in which nothing runs, by the style of their cause."""
    gaps = idle_gaps(timeline, begin, close).split(np.array([begin], np.int64), np.array([close], np.int64))
    for cause in Cause:
        if (rows := gaps.caused_by(cause)).any():
            yield f"idle-{cause}", gaps.of(rows)
