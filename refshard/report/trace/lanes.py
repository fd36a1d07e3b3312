"""Rows of blocks over time: the lanes of a step, or of the time around one layer's backward.

Each block has a note, which hovering shows: a short name, which is also drawn on wide blocks, and the rest.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refshard.analysis.analyse import Analysis
from refshard.analysis.figures import Cause, CollectiveFigures, TraceFigures
from refshard.analysis.overlap import Gaps, exposed_communication, idle_gaps
from refshard.events.timeline import KINDS, UNKNOWN, Collective, Intervals, Kind, Meaning, Nanoseconds, Spans, Timeline
from refshard.quantities import format_bytes, format_ns, format_rate
from refshard.report.trace.text import IDLE

Note = tuple[str, str]
Rows = npt.NDArray[np.bool_]
MOST_ROWS, MOST_LANES, _MOST_AT_ONCE = 6, 12, 3
"""Rows of a lane (the last also takes anything nested more deeply); lanes; names of concurrent collectives."""
_COMPARABLE = 2
"""Timelines share a scale if the longest is at most this many times the shortest."""
_WIDEST = 3
"""The picture of a layer reaches at most this many times the layer's length to either side."""
NAMES = {
    Kind.COMPUTE.value: "compute", Kind.COMM.value: "communication", Kind.PREP.value: "preparation of a reduction",
    Kind.COPY.value: "copy", Kind.UNCLASSIFIED.value: "unclassified", "unit": "unit (layer)",
    "exposed": "exposed communication", **{f"idle-{cause}": name for cause, name in IDLE.items()},
    "gap": "gap between collectives", "gap-blocking": "blocking gap between collectives",
}  # fmt: skip
"""The styles that a legend has, by what it calls them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks in one style of :data:`refshard.report.draw.palette.SPANS`, ordered by start, with a note each.

    Blocks of other units than the one that is shown are dimmed.
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
    """A row of blocks; ``label`` names the lane that begins with it. Narrow rows show when something holds."""

    label: str
    blocks: tuple[Blocks, ...]
    narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time that is drawn: a step, or all of a trace without steps (``step`` None); ``label`` says which and why."""

    step: int | None
    begin: int
    close: int
    label: str


def drawn_windows(figures: TraceFigures, timeline: Timeline) -> tuple[Window, ...]:
    """The step of median length, the shorter one of two, then the slowest if it is another."""
    ordered = sorted((s for s in figures.steps if s.step is not None), key=lambda step: step.breakdown.span_ns)
    if not ordered:
        spans = timeline.spans
        begin, close = (int(spans.starts.min()), int(spans.ends.max())) if len(spans) else (0, 0)
        return (Window(step=None, begin=begin, close=close, label="the whole trace"),)
    middle, slowest = ordered[(len(ordered) - 1) // 2], ordered[-1]
    chosen = [(middle, "of median length"), (slowest, "the slowest")]
    if len(ordered) == 2:
        chosen = [(middle, "the faster of two"), (slowest, "the slower of two")]
    if middle.breakdown.span_ns == slowest.breakdown.span_ns:
        chosen = [(middle, "the only one" if len(ordered) == 1 else "median and slowest")]
    return tuple(
        Window(
            step=step.step, begin=step.start_ns, close=step.start_ns + step.breakdown.span_ns,
            label=f"{f'step {step.step}' if step.name is None else f'window {step.step}, {step.name}'}, {why}",
        )
        for step, why in chosen
    )  # fmt: skip


def one_scale(analyses: Sequence[Analysis]) -> int:
    """Nanoseconds that the timelines of all these traces can have as their scale: 0 if the drawn steps differ by more
    than :data:`_COMPARABLE`.
    """
    shown = [drawn_windows(one.figures, one.kept)[0] for one in analyses if one.kept is not None]
    lengths = [window.close - window.begin for window in shown] or [0]
    return max(lengths) if max(lengths) <= _COMPARABLE * min(lengths) else 0


def rows_of(
    timeline: Timeline, figures: TraceFigures, begin: int, close: int, own: int | None = None
) -> tuple[list[LaneRow], int]:
    """The rows of a window from above, and how many lanes are left out.

    The units come first, then the main lane, the lanes that communicate, and the others, the busier first, then strips
    that show when communication is exposed and when nothing runs. A window around one unit, its ``own``, dims the spans
    of other units. It has no units, gaps, idle time and names of strips, to be short on a small screen.
    """
    spans, collectives = timeline.spans, figures.collectives
    seen, main, parts = within(spans, begin, close), spans.main_lane(), collectives_of(spans, collectives)
    communicating, busy = (_busy(spans, rows) for rows in (seen & spans.of_kind(Kind.COMM), seen))
    present = np.unique(spans.lanes[seen]).tolist()
    order = sorted(present, key=lambda lane: (lane != main, -communicating[lane], -busy[lane]))
    found = [_units(timeline, begin, close)] if own is None else []
    for lane in order[:MOST_LANES]:
        mine = seen & (spans.lanes == lane)
        kinds = np.bincount(spans.kinds[mine], weights=(spans.ends - spans.starts)[mine], minlength=len(KINDS))
        label = f"{spans.lane_names[lane]}: {NAMES[KINDS[int(np.argmax(kinds))].value]}"
        first, *others = _lane_rows(spans, mine, label, collectives, parts, own)
        gaps = () if lane == main or own is not None else _gaps(collectives, spans.lane_names[lane], begin, close)
        found += [replace(first, blocks=(*first.blocks, *gaps)), *others]
    exposed = _exposed(timeline, collectives, begin, close)
    found += [exposed, _idle(timeline, begin, close)] if own is None else [replace(exposed, label="")]
    return [row for row in found if row.blocks], max(0, len(order) - MOST_LANES)


def within(spans: Spans, begin: int, close: int) -> Rows:
    """The spans that run in a window, if only in part."""
    instants = (spans.starts == spans.ends) & (spans.starts == begin)
    return np.asarray((spans.starts < close) & (spans.ends > begin) | instants)


def _busy(spans: Spans, rows: Rows) -> npt.NDArray[np.float64]:
    """Nanoseconds of these rows on every lane."""
    lengths = (spans.ends - spans.starts)[rows]
    return np.asarray(np.bincount(spans.lanes[rows], weights=lengths, minlength=len(spans.lane_names)), np.float64)


def _lane_rows(
    spans: Spans, mine: Rows, label: str, collectives: Sequence[CollectiveFigures], parts: npt.NDArray[np.int64],
    own: int | None,
) -> list[LaneRow]:  # fmt: skip
    """The rows of the spans ``mine``, which share a lane; spans of other units than ``own`` are dimmed.

    ``parts`` are those of :func:`collectives_of`.
    """
    rows = np.flatnonzero(mine)
    rows = rows[np.lexsort((-spans.ends[rows], spans.starts[rows]))]
    depths = _depths(spans.starts[rows], spans.ends[rows])
    dimmed = np.zeros(len(rows), bool) if own is None else spans.units[rows] != own

    def note(row: int, part: int) -> Note:
        name, unit = spans.name_table[spans.names[row]], spans.units[row]
        if part != UNKNOWN:
            return _short(collectives[part]), f"{_about(collectives[part])}; {name}"
        return name, "" if unit == UNKNOWN else spans.unit_names[unit]

    found = []
    for depth in range(int(depths.max(initial=0)) + 1):
        blocks = tuple(
            Blocks(
                style=kind.value, starts=spans.starts[here], ends=spans.ends[here], dimmed=is_dimmed,
                notes=[note(row, part) for row, part in zip(here.tolist(), parts[here])],
            )
            for is_dimmed in (True, False)
            for code, kind in enumerate(KINDS)
            if len(here := rows[(depths == depth) & (dimmed == is_dimmed) & (spans.kinds[rows] == code)])
        )  # fmt: skip
        found.append(LaneRow(label="" if depth else label, blocks=blocks))
    return found


def _depths(starts: Nanoseconds, ends: Nanoseconds) -> npt.NDArray[np.int64]:
    """The first free row for each span, ordered by start and the longer first; the last row takes the rest."""
    depths = np.zeros(len(starts), np.int64)
    if not len(starts) or np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1]):
        return depths
    free: list[int] = []
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        depth = min(next((row for row, until in enumerate(free) if until <= start), len(free)), MOST_ROWS - 1)
        depths[place] = depth
        free[depth : depth + 1] = [max(end, free[depth]) if depth < len(free) else end]
    return depths


def _short(one: CollectiveFigures) -> str:
    return f"{one.op} {one.unit}" if one.unit else one.op


def _about(one: CollectiveFigures) -> str:
    """Size, bandwidth, exposed part, wait in the queue, and the gap before a collective."""
    sentences = [] if one.bytes is None else [format_bytes(one.bytes)]
    for word, rate in (("algorithm", one.algorithm_bandwidth), ("bus", one.bus_bandwidth)):
        sentences += [] if rate is None else [f"{word} bandwidth {format_rate(rate / 1e9)} GB/s"]
    sentences.append(f"exposed {format_ns(one.exposed_ns)}" if one.exposed_ns else "not exposed")
    sentences += [] if one.queued_ns is None else [f"queued {format_ns(one.queued_ns)}"]
    blocks = {True: "which blocks", False: "which does not block", None: "not known whether it blocks"}
    gap = f"gap of {format_ns(one.gap_ns)} before it, {blocks[one.gap_blocking]}" if one.gap_ns else "no gap before it"
    return "; ".join([*sentences, "the first on its stream" if one.gap_ns is None else gap])


def collectives_of(spans: Spans, collectives: Sequence[CollectiveFigures]) -> npt.NDArray[np.int64]:
    """The place of the collective that each span is a part of, :data:`UNKNOWN` for none."""
    found = np.full(len(spans), UNKNOWN, np.int64)
    places: dict[str, list[int]] = {}
    for place, one in sorted(enumerate(collectives), key=lambda pair: pair[1].start_ns):
        places.setdefault(one.lane, []).append(place)
    for lane, mine in places.items():
        if lane not in spans.lane_names:
            continue
        rows = np.flatnonzero(spans.of_kind(Kind.COMM) & (spans.lanes == spans.lane_names.index(lane)))
        starts = np.array([collectives[place].start_ns for place in mine], np.int64)
        ends = starts + np.array([collectives[place].duration_ns for place in mine], np.int64)
        last = np.searchsorted(starts, spans.starts[rows], side="right") - 1
        inside = (last >= 0) & (spans.ends[rows] <= ends[last])
        found[rows[inside]] = np.array(mine, np.int64)[last[inside]]
    return found


def _units(timeline: Timeline, begin: int, close: int) -> LaneRow:
    """Two styles in turn, so that touching neighbours differ."""
    names, found = timeline.spans.unit_names, hulls(timeline, begin, close)
    blocks = tuple(
        Blocks(
            style=style, starts=np.array([hull.start for hull in chosen], np.int64),
            ends=np.array([hull.end for hull in chosen], np.int64),
            notes=[(names[hull.unit], hull.phase) for hull in chosen],
        )
        for style, chosen in (("unit", found[::2]), ("unit-odd", found[1::2]))
        if chosen
    )  # fmt: skip
    return LaneRow(label="units", blocks=blocks)


def _gaps(collectives: Sequence[CollectiveFigures], lane: str, begin: int, close: int) -> Iterator[Blocks]:
    """The gaps between collectives on this lane, by whether they block."""
    mine = [one for one in collectives if one.lane == lane and one.gap_ns and begin < one.start_ns < close + one.gap_ns]
    more = ", which was launched already while compute ran"
    for style, name, rest, blocking in (("gap", "gap", "", False), ("gap-blocking", "blocking gap", more, True)):
        here = sorted((one for one in mine if bool(one.gap_blocking) is blocking), key=lambda one: one.start_ns)
        if here:
            ends = np.array([one.start_ns for one in here], np.int64)
            starts = ends - np.array([one.gap_ns for one in here], np.int64)
            notes = [(name, f"before {_short(one)}{rest}") for one in here]
            yield Blocks(style=style, starts=starts.clip(begin, close), ends=ends.clip(begin, close), notes=notes)


def _exposed(timeline: Timeline, collectives: Sequence[CollectiveFigures], begin: int, close: int) -> LaneRow:
    """Exposed communication, with the collectives that are exposed, the longest first."""
    exposed = exposed_communication(timeline) & Intervals.of([(begin, close)])
    begins = np.array([one.start_ns for one in collectives], np.int64)
    closes = begins + np.array([one.duration_ns for one in collectives], np.int64)
    notes = []
    for start, end in zip(exposed.starts, exposed.ends):
        shared = np.minimum(closes, end) - np.maximum(begins, start)
        order = np.flatnonzero(shared > 0)
        alike = Counter(_short(collectives[i]) for i in order[np.argsort(-shared[order], kind="stable")].tolist())
        names = [name if count == 1 else f"{count} x {name}" for name, count in alike.items()]
        more = f" and {len(names) - _MOST_AT_ONCE} more" if len(names) > _MOST_AT_ONCE else ""
        notes.append(("exposed communication", f"{', '.join(names[:_MOST_AT_ONCE])}{more}"))
    blocks = Blocks(style="exposed", starts=exposed.starts, ends=exposed.ends, notes=notes)
    return LaneRow(label="exposed communication", blocks=(blocks,) if notes else (), narrow=True)


def _idle(timeline: Timeline, begin: int, close: int) -> LaneRow:
    blocks = tuple(
        Blocks(
            style=f"idle-{cause}", starts=gaps.starts, ends=gaps.ends,
            notes=[(IDLE[cause], _ended(timeline, cause, gaps, place)) for place in range(len(gaps.starts))],
        )
        for cause, gaps in idle_by_cause(timeline, begin, close)
        if len(gaps.starts)
    )  # fmt: skip
    return LaneRow(label="idle", blocks=blocks, narrow=True)


def idle_by_cause(timeline: Timeline, begin: int, close: int) -> Iterator[tuple[Cause, Gaps]]:
    """The gaps of a window in which nothing runs."""
    gaps = idle_gaps(timeline, begin, close).split(np.array([begin], np.int64), np.array([close], np.int64))
    for cause in Cause:
        if (rows := gaps.caused_by(cause)).any():
            yield cause, gaps.of(rows)


def _ended(timeline: Timeline, cause: Cause, gaps: Gaps, place: int) -> str:
    """What ends an idle gap, and the call or the kernel that it was waiting for."""
    spans, follower, before, call = timeline.spans, gaps.followers[place], gaps.before[place], gaps.calls[place]
    if follower == UNKNOWN:
        return "nothing runs after it"
    found = f"ended by {spans.name_table[spans.names[follower]]}"
    if cause is Cause.CALL and timeline.calls is not None:
        return f"{found}; its thread was in {spans.name_table[timeline.calls.names[call]]}"
    if cause is Cause.DEPENDENCY and before != UNKNOWN:
        last = f"{spans.name_table[spans.names[before]]} on {spans.lane_names[spans.lanes[before]]}"
        return f"{found}, which was queued and waited; {last} ended last"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """A unit's forward or backward on the main lane, from its first span to its last."""

    unit: int
    phase: str
    start: int
    end: int


_OF_COLLECTIVES = Meaning.COPY_IN | Meaning.COPY_OUT | Meaning.ALL_GATHER | Meaning.REDUCE


def hulls(timeline: Timeline, begin: int, close: int) -> list[Hull]:
    """Runs of compute of one unit in one phase on the main lane.

    Spans of collectives (:data:`_OF_COLLECTIVES`) and of no known unit neither break a run nor extend it: they belong
    to a prefetch or a reduction. If no phase is known, the last run of a unit before its reduction is its backward.
    """
    spans = timeline.spans
    seen = within(spans, begin, close)
    computing = seen & (spans.lanes == spans.main_lane()) & (spans.units != UNKNOWN) & spans.of_kind(Kind.COMPUTE)
    rows = np.flatnonzero(computing & (spans.under & _OF_COLLECTIVES == 0))
    if not len(rows):
        return []
    units, under = spans.units[rows], spans.under[rows]
    # A span that tells no phase has the one that its unit's spans before it began.
    known = np.where(under & Meaning.BACKWARD, Meaning.BACKWARD, under & Meaning.FORWARD).astype(np.int16)
    places = np.arange(len(units))
    first = np.maximum.accumulate(np.where(np.append(True, np.diff(units) != 0), places, 0))
    last = np.maximum.accumulate(np.where(known != 0, places, 0))
    phases = np.where(last >= first, known[last], 0)
    changes = np.flatnonzero((np.diff(units) != 0) | (np.diff(phases) != 0)) + 1
    names = {Meaning.FORWARD: "forward", Meaning.BACKWARD: "backward"}
    found = [
        Hull(
            unit=int(spans.units[run[0]]), phase=names.get(Meaning(int(phase[0])), ""),
            start=int(spans.starts[run[0]]), end=int(spans.ends[run].max()),
        )
        for run, phase in zip(np.split(rows, changes), np.split(phases, changes))
    ]  # fmt: skip
    backwards = set[Hull]()
    for unit in {hull.unit for hull in found if not hull.phase}:
        for start, _ in _ran(timeline, unit, Meaning.REDUCE):
            before = [hull for hull in found if hull.unit == unit and hull.start <= start < close]
            backwards.update(before[-1:])
    return [replace(h, phase="backward") if not h.phase and h in backwards else h for h in found]


def _ran(timeline: Timeline, unit: int, meaning: Meaning) -> list[tuple[int, int]]:
    """Start and end of the unit's collectives with this purpose."""
    name = timeline.spans.unit_names[unit]
    return [
        (one.start, one.end)
        for one in timeline.collectives
        if one.unit == name and one.start is not None and one.end is not None and _purpose(timeline, one) is meaning
    ]


def _purpose(timeline: Timeline, one: Collective) -> Meaning:
    """Whether a collective gathers or reduces.

    Over gloo an exchange may do either: the label that it was launched under tells, without one it is a reduction.
    """
    if one.op.startswith(("all_gather", "reduce_scatter", "all_reduce")):
        return Meaning.ALL_GATHER if one.op.startswith("all_gather") else Meaning.REDUCE
    is_gather = one.launched is not None and any(
        label.meaning & Meaning.ALL_GATHER and label.unit == one.unit and label.start <= one.launched <= label.end
        for label in timeline.labels
    )
    return Meaning.ALL_GATHER if is_gather else Meaning.REDUCE


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a timeline around a layer: ``gather`` and ``reduce`` are start and end of its collectives."""

    timeline: Timeline
    hull: Hull
    gather: tuple[int, int] | None
    reduce: tuple[int, int] | None
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Nanoseconds that are drawn."""
        return self.end - self.begin

    @property
    def before(self) -> int:
        """Nanoseconds that are drawn before the layer starts."""
        return self.hull.start - self.begin

    def spanning(self, before: int, after: int) -> "View":
        """The same from ``before`` to ``after`` the layer's start, ns, so that several charts share scale and zero."""
        return replace(self, begin=self.hull.start - before, end=self.hull.start + after)

    @property
    def unit(self) -> str:
        """The layer's name."""
        return self.timeline.spans.unit_names[self.hull.unit]


def find_layer(timeline: Timeline, begin: int, close: int, unit: str | None = None) -> View | None:
    """The layer to draw of a window: ``unit`` if it is there, else a typical one; None without known units."""
    found = hulls(timeline, begin, close)
    hull = _typical([hull for hull in found if timeline.spans.unit_names[hull.unit] == unit]) or _typical(found)
    if hull is None:
        return None
    # Its last gather and first reduction, unless the unit computes in between.
    since = max((one.end for one in found if one.unit == hull.unit and one.end <= hull.start), default=begin)
    until = min((one.start for one in found if one.unit == hull.unit and one.start >= hull.end), default=close)
    gathers = [one for one in _ran(timeline, hull.unit, Meaning.ALL_GATHER) if since <= one[0] < hull.end]
    reductions = [one for one in _ran(timeline, hull.unit, Meaning.REDUCE) if hull.start <= one[0] < until]
    gather, reduce = max(gathers, default=None), min(reductions, default=None)
    far = _WIDEST * (hull.end - hull.start)
    first, last = hull.start, hull.end
    if gather is not None and gather[1] > hull.start - far:
        first = min(first, max(gather[0], hull.start - far))
    if reduce is not None and reduce[0] < hull.end + far:
        last = max(last, min(reduce[1], hull.end + far))
    margin = (last - first) // 24 + 1
    return View(timeline=timeline, hull=hull, gather=gather, reduce=reduce, begin=first - margin, end=last + margin)


def _typical(found: Sequence[Hull]) -> Hull | None:
    """The one of median length in the middle half of the backward hulls; of all if none is known to be backward."""
    candidates = [hull for hull in found if hull.phase == "backward" and hull.end > hull.start]
    candidates = candidates or [hull for hull in found if hull.end > hull.start]
    quarter = len(candidates) // 4
    ordered = sorted(candidates[quarter : len(candidates) - quarter], key=lambda hull: hull.end - hull.start)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def layer_sentence(view: View) -> str:
    """When the layer and its collectives run, and how much of the collectives is not drawn."""
    hull, noun = view.hull, "kernel" if view.timeline.on_device else "operator"

    def lasts(ran: tuple[int, int]) -> str:
        return format_ns(ran[1] - ran[0])

    def relative(ns: int, event: str) -> str:
        return f"{format_ns(abs(ns))} {'before' if ns < 0 else 'after'} {event}"

    def undrawn(ran: tuple[int, int]) -> str:
        left_out = ran[1] - ran[0] - max(min(ran[1], view.end) - max(ran[0], view.begin), 0)
        if not left_out:
            return ""
        return ", too far away to be drawn" if left_out >= ran[1] - ran[0] else f"; {format_ns(left_out)} not drawn"

    sentences = [f"{view.unit}: {hull.phase or 'compute'} takes {format_ns(hull.end - hull.start)}."]
    if (gather := view.gather) is None:
        sentences.append("No all-gather precedes it.")
    else:
        when = relative(gather[1] - hull.start, f"its first {noun} starts")
        sentences.append(f"Its all-gather takes {lasts(gather)} and ends {when}{undrawn(gather)}.")
    if (reduce := view.reduce) is None:
        sentences.append("No reduction of it follows.")
    else:
        begins = relative(reduce[0] - hull.end, f"its last {noun} ends")
        ends = relative(reduce[1] - hull.end, "that")
        sentences.append(f"Its reduction takes {lasts(reduce)}, starts {begins} and ends {ends}{undrawn(reduce)}.")
    return " ".join(sentences)
