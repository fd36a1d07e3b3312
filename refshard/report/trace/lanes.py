"""What pointing at a block of a timeline says: of a collective, a gap, an idle stretch, exposed communication.

Each is a note: a short name, which some blocks bear where they are wide enough, and the rest.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import Cause, CollectiveFigures, StepFigures, TraceFigures
from refshard.analysis.overlap import CAUSES, Gaps, exposed_communication, idle_gaps
from refshard.events.timeline import KINDS, UNKNOWN, Collective, Intervals, Kind, Meaning, Nanoseconds, Spans, Timeline
from refshard.quantities import format_bytes, format_ns, format_rate
from refshard.report.trace.idle import NAMES as IDLE

Note = tuple[str, str]
MOST_AT_ONCE = 3


def short_name(one: CollectiveFigures) -> str:
    """The operation and the unit."""
    return f"{one.op} {one.unit}" if one.unit else one.op


def of_collective(one: CollectiveFigures) -> Note:
    """Size, bandwidth, exposed part, wait in the queue, and the gap before it."""
    sentences = [] if one.bytes is None else [format_bytes(one.bytes)]
    for word, rate in (("algorithm", one.algorithm_bandwidth), ("bus", one.bus_bandwidth)):
        sentences += [] if rate is None else [f"{word} bandwidth {format_rate(rate / 1e9)} GB/s"]
    sentences.append(f"exposed {format_ns(one.exposed_ns)}" if one.exposed_ns else "not exposed")
    sentences += [] if one.queued_ns is None else [f"queued {format_ns(one.queued_ns)}"]
    return short_name(one), "; ".join([*sentences, _gap(one)])


def _gap(one: CollectiveFigures) -> str:
    if one.gap_ns is None:
        return "the first on its stream"
    if not one.gap_ns:
        return "no gap before it"
    blocks = {True: "which blocks", False: "which does not block", None: "not known whether it blocks"}
    return f"gap of {format_ns(one.gap_ns)} before it, {blocks[one.gap_blocking]}"


def of_gap(following: CollectiveFigures) -> Note:
    """The gap before a collective."""
    if following.gap_blocking:
        return "blocking gap", f"before {short_name(following)}, which was launched already while compute ran"
    return "gap", f"before {short_name(following)}"


def collectives_of(spans: Spans, collectives: Sequence[CollectiveFigures]) -> npt.NDArray[np.int64]:
    """For each span the place of the collective that it is a part of, :data:`UNKNOWN` for none."""
    found = np.full(len(spans), UNKNOWN, np.int64)
    places: dict[str, list[int]] = {}
    for place, one in sorted(enumerate(collectives), key=lambda pair: pair[1].start_ns):
        places.setdefault(one.lane, []).append(place)
    communicates = spans.of_kind(Kind.COMM)
    for lane, mine in places.items():
        if lane not in spans.lane_names:
            continue
        rows = np.flatnonzero(communicates & (spans.lanes == spans.lane_names.index(lane)))
        starts = np.array([collectives[place].start_ns for place in mine], np.int64)
        ends = starts + np.array([collectives[place].duration_ns for place in mine], np.int64)
        last = np.searchsorted(starts, spans.starts[rows], side="right") - 1
        inside = (last >= 0) & (spans.ends[rows] <= ends[last])
        found[rows[inside]] = np.array(mine, np.int64)[last[inside]]
    return found


def of_exposed(collectives: Sequence[CollectiveFigures], starts: Nanoseconds, ends: Nanoseconds) -> list[Note]:
    """For each interval of exposed communication, whose it is."""
    begins = np.array([one.start_ns for one in collectives], np.int64)
    closes = begins + np.array([one.duration_ns for one in collectives], np.int64)
    found = []
    for start, end in zip(starts, ends):
        shared = np.minimum(closes, end) - np.maximum(begins, start)
        order = np.flatnonzero(shared > 0)
        alike = Counter(short_name(collectives[i]) for i in order[np.argsort(-shared[order], kind="stable")].tolist())
        names = [name if count == 1 else f"{count} x {name}" for name, count in alike.items()]
        more = f" and {len(names) - MOST_AT_ONCE} more" if len(names) > MOST_AT_ONCE else ""
        found.append(("exposed communication", f"{', '.join(names[:MOST_AT_ONCE])}{more}"))
    return found


def _why(timeline: Timeline, gaps: Gaps, place: int) -> str:
    """What ends an idle gap, and why nothing ran."""
    spans, follower, before = timeline.spans, int(gaps.followers[place]), int(gaps.before[place])
    if follower == UNKNOWN:
        return "nothing runs after it"
    found, cause = f"ended by {spans.name_table[spans.names[follower]]}", CAUSES[gaps.causes[place]]
    if not timeline.on_device:
        return found
    if cause is Cause.CALL and timeline.calls is not None:
        return f"{found}, launched late: its thread was in {spans.name_table[timeline.calls.names[gaps.calls[place]]]}"
    if cause is Cause.DEPENDENCY and before != UNKNOWN:
        ended = f"{spans.name_table[spans.names[before]]} on {spans.lane_names[spans.lanes[before]]}"
        return f"{found}, which was queued and waited; {ended} ended last"
    return found + {
        Cause.LAUNCH: ", launched too late: the queue was empty",
        Cause.BACK_TO_BACK: ", the next in its queue",
        Cause.UNKNOWN: ", which was queued; the trace does not say what it waited for",
    }.get(cause, "")


_OF_COLLECTIVES = Meaning.COPY_IN | Meaning.COPY_OUT | Meaning.ALL_GATHER | Meaning.REDUCE
_BY_NAME = {"all_gather": Meaning.ALL_GATHER, "reduce_scatter": Meaning.REDUCE, "all_reduce": Meaning.REDUCE}
Rows = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """A unit's forward or backward on the main lane, from its first span to its last."""

    unit: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """When a collective ran."""

    start: int
    end: int


def within(spans: Spans, begin: int, close: int) -> Rows:
    """Which spans run in a window, if only in part."""
    instants = (spans.starts == spans.ends) & (spans.starts == begin)
    return np.asarray((spans.starts < close) & (spans.ends > begin) | instants)


def busy_by_lane(spans: Spans, rows: Rows) -> npt.NDArray[np.float64]:
    """Nanoseconds of these rows on every lane."""
    lengths = (spans.ends - spans.starts)[rows]
    return np.asarray(np.bincount(spans.lanes[rows], weights=lengths, minlength=len(spans.lane_names)), np.float64)


def hulls(timeline: Timeline, begin: int, close: int) -> list[Hull]:
    """Runs of compute of one unit in one phase on the main lane.

    What belongs to a collective (:data:`_OF_COLLECTIVES`) and spans of no known unit neither break a run nor extend it:
    they are a prefetch's, or a reduction's. Where no phase is known, the last run of a unit before its reduction is its
    backward.
    """
    spans = timeline.spans
    seen = within(spans, begin, close)
    computing = seen & (spans.lanes == spans.main_lane()) & (spans.units != UNKNOWN) & spans.of_kind(Kind.COMPUTE)
    rows = np.flatnonzero(computing & (spans.under & _OF_COLLECTIVES == 0))
    if not len(rows):
        return []
    units = spans.units[rows]
    phases = _phases(spans.under[rows], units)
    changes = np.flatnonzero((np.diff(units) != 0) | (np.diff(phases) != 0)) + 1
    words = {Meaning.FORWARD: "forward", Meaning.BACKWARD: "backward"}
    found = [
        Hull(
            unit=int(spans.units[run[0]]),
            phase=words.get(Meaning(int(phase[0])), ""),
            start=int(spans.starts[run[0]]),
            end=int(spans.ends[run].max()),
        )
        for run, phase in zip(np.split(rows, changes), np.split(phases, changes))
    ]
    return _with_backwards(found, timeline, close)


def _phases(under: npt.NDArray[np.int16], units: npt.NDArray[np.int32]) -> npt.NDArray[np.int16]:
    """The phase of each span; of one that tells none, the phase that its unit's spans before it began."""
    known = np.where(under & Meaning.BACKWARD, Meaning.BACKWARD, under & Meaning.FORWARD).astype(np.int16)
    places = np.arange(len(units))
    first = np.maximum.accumulate(np.where(np.append(True, np.diff(units) != 0), places, 0))
    last = np.maximum.accumulate(np.where(known != 0, places, 0))
    return np.asarray(np.where(last >= first, known[last], 0), np.int16)


def _with_backwards(found: list[Hull], timeline: Timeline, close: int) -> list[Hull]:
    """The same, with the last run of unknown phase that starts before a reduction of its unit as a backward."""
    backwards = set()
    for unit in {hull.unit for hull in found if not hull.phase}:
        mine = [hull for hull in found if hull.unit == unit]
        for one in _ran(timeline, unit, Meaning.REDUCE):
            before = [hull for hull in mine if hull.start <= one.start < close]
            backwards.update(before[-1:])
    return [replace(h, phase="backward") if not h.phase and h in backwards else h for h in found]


def gather_of(timeline: Timeline, hull: Hull, found: Sequence[Hull], begin: int) -> Ran | None:
    """The unit's last all-gather before this compute ends, if it started since the unit's earlier compute ended."""
    since = max((one.end for one in found if one.unit == hull.unit and one.end <= hull.start), default=begin)
    mine = [one for one in _ran(timeline, hull.unit, Meaning.ALL_GATHER) if since <= one.start < hull.end]
    return max(mine, key=lambda one: one.start, default=None)


def reduction_of(timeline: Timeline, hull: Hull, found: Sequence[Hull], close: int) -> Ran | None:
    """The unit's first reduction from its compute on, if the unit does not compute again before that."""
    until = min((one.start for one in found if one.unit == hull.unit and one.start >= hull.end), default=close)
    mine = [one for one in _ran(timeline, hull.unit, Meaning.REDUCE) if hull.start <= one.start < until]
    return min(mine, key=lambda one: one.start, default=None)


def _ran(timeline: Timeline, unit: int, meaning: Meaning) -> list[Ran]:
    name = timeline.spans.unit_names[unit]
    return [
        Ran(start=c.start, end=c.end)
        for c in timeline.collectives
        if c.unit == name and c.start is not None and c.end is not None and _meaning(timeline, c) is meaning
    ]


def _meaning(timeline: Timeline, collective: Collective) -> Meaning:
    """What a collective is for.

    Over gloo an exchange may stand for either; then the label that it was launched under tells, and without one it is
    taken for a reduction.
    """
    for start, meaning in _BY_NAME.items():
        if collective.op.startswith(start):
            return meaning
    at = collective.launched
    if at is not None:
        gathers = (label for label in timeline.labels if label.meaning & Meaning.ALL_GATHER)
        if any(label.unit == collective.unit and label.start <= at <= label.end for label in gathers):
            return Meaning.ALL_GATHER
    return Meaning.REDUCE


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
            notes=[("idle", _why(timeline, gaps, place)) for place in range(len(gaps.starts))],
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
