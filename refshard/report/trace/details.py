"""What pointing at a block of a timeline says: of a collective, a gap, an idle stretch, exposed communication.

Each is a note: a short name, which some blocks bear where they are wide enough, and the rest.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Kind, Nanoseconds, Spans, Timeline
from refshard.quantities import format_bytes, format_ns, format_rate
from refshard.tracing.figures import Cause, CollectiveFigures
from refshard.tracing.idle import CAUSES, Gaps

Note = tuple[str, str]
MOST_AT_ONCE = 3


def short_name(one: CollectiveFigures) -> str:
    """The operation and the unit."""
    return f"{one.op} {one.unit}" if one.unit else one.op


def of_collective(one: CollectiveFigures) -> Note:
    """Size, bandwidth, exposed part, wait in the queue, and the gap before it."""
    told = [] if one.bytes is None else [format_bytes(one.bytes)]
    for word, rate in (("algorithm", one.algorithm_bandwidth), ("bus", one.bus_bandwidth)):
        told += [] if rate is None else [f"{word} bandwidth {format_rate(rate / 1e9)} GB/s"]
    told.append(f"exposed {format_ns(one.exposed_ns)}" if one.exposed_ns else "not exposed")
    told += [] if one.queued_ns is None else [f"queued {format_ns(one.queued_ns)}"]
    return short_name(one), "; ".join([*told, _gap(one)])


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


def of_idle(timeline: Timeline, gaps: Gaps) -> list[Note]:
    """For each idle gap what ends it, and why nothing ran."""
    return [("idle", _why(timeline, gaps, place)) for place in range(len(gaps.starts))]


def _why(timeline: Timeline, gaps: Gaps, place: int) -> str:
    spans, follower, before = timeline.spans, int(gaps.followers[place]), int(gaps.before[place])
    if follower == UNKNOWN:
        return "nothing runs after it"
    told, cause = f"ended by {spans.name_table[spans.names[follower]]}", CAUSES[gaps.causes[place]]
    if not timeline.on_device:
        return told
    if cause is Cause.CALL and timeline.calls is not None:
        return f"{told}, launched late: its thread was in {spans.name_table[timeline.calls.names[gaps.calls[place]]]}"
    if cause is Cause.DEPENDENCY and before != UNKNOWN:
        ended = f"{spans.name_table[spans.names[before]]} on {spans.lane_names[spans.lanes[before]]}"
        return f"{told}, which was queued and waited; {ended} ended last"
    return told + {
        Cause.LAUNCH: ", launched too late: the queue was empty",
        Cause.BACK_TO_BACK: ", the next in its queue",
        Cause.UNKNOWN: ", which was queued; the trace does not say what it waited for",
    }.get(cause, "")
