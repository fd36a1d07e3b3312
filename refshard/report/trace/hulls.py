"""When each unit computes forward and backward, and the collectives that lead to it and follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Collective, Kind, Meaning, Spans, Timeline

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
