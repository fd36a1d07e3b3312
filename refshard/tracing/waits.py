"""What a device waited for while it idled: gaps summed by their cause and by what ended or caused them."""

from collections.abc import Iterator

import numpy as np

from refshard.events.timeline import UNKNOWN, Nanoseconds, Timeline
from refshard.tracing.figures import Cause, IdleFigures
from refshard.tracing.idle import Gaps, idle_gaps, knows_launches


def idle_figures(timeline: Timeline) -> tuple[IdleFigures, ...]:
    """The gaps in the windows of a timeline, those that took most time first; empty where no launch is known."""
    if not len(timeline.spans) or not knows_launches(timeline.spans):
        return ()
    starts = np.array([window.start for window in timeline.windows], np.int64)
    ends = np.array([window.end for window in timeline.windows], np.int64)
    gaps = idle_gaps(timeline, int(starts.min()), int(ends.max())).split(starts, ends)
    gaps = gaps.of(gaps.ends > gaps.starts)
    found = [one for cause in Cause for one in _of_cause(cause, gaps.of(gaps.caused_by(cause)), timeline)]
    return tuple(sorted(found, key=lambda one: (-one.ns, one.cause, one.what)))


def _of_cause(cause: Cause, gaps: Gaps, timeline: Timeline) -> Iterator[IdleFigures]:
    lengths, keys = gaps.ends - gaps.starts, _keys(cause, gaps, timeline)
    distinct, place = np.unique(keys, return_inverse=True)
    sums, longest = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.int64)
    np.add.at(sums, place, lengths)
    np.maximum.at(longest, place, lengths)
    counts = np.bincount(place, minlength=len(distinct))
    for key, ns, count, most in zip(distinct.tolist(), sums.tolist(), counts.tolist(), longest.tolist()):
        yield IdleFigures(cause=cause, what=_what(cause, key, timeline), ns=ns, count=count, longest_ns=most)


def _keys(cause: Cause, gaps: Gaps, timeline: Timeline) -> Nanoseconds:
    """A number for each gap; gaps of one number are summed. :data:`UNKNOWN` where nothing follows."""
    spans, followers = timeline.spans, gaps.followers
    if cause is Cause.BACK_TO_BACK:
        return np.zeros(len(followers), np.int64)
    if cause is Cause.CALL and timeline.calls is not None:
        return timeline.calls.names[gaps.calls].astype(np.int64)
    if cause is Cause.DEPENDENCY:
        lanes = np.append(spans.lanes, UNKNOWN).astype(np.int64)
        return (lanes[followers] + 1) * (len(spans.lane_names) + 1) + lanes[gaps.before] + 1
    return np.append(spans.operators, UNKNOWN)[followers].astype(np.int64)


def _what(cause: Cause, key: int, timeline: Timeline) -> str:
    spans = timeline.spans
    if cause is Cause.BACK_TO_BACK:
        return ""
    if cause is Cause.DEPENDENCY:
        waiting, other = (place - 1 for place in divmod(key, len(spans.lane_names) + 1))
        names = [spans.lane_names[lane] if lane >= 0 else "an unknown stream" for lane in (waiting, other)]
        return f"{names[0]} waits for an event" if waiting == other else f"{names[0]} waits for {names[1]}"
    return spans.name_table[key] if key >= 0 else "nothing runs any more"
