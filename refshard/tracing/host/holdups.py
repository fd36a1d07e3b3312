"""What holds the GPU up: the host's calls that wait, allocate or load, and the idle time that follows them."""

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from refshard.events.table import LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Nanoseconds, Timeline
from refshard.tracing.device import Launches, find_launches
from refshard.tracing.host.holdup_calls import HOLDS, Calls, find_calls
from refshard.tracing.host.holdup_figures import HoldUp, HoldUps
from refshard.tracing.idle import NEVER, Gaps, idle_gaps
from refshard.tracing.steps import step_at


def find_holdups(trace: TraceFile, timeline: Timeline) -> HoldUps | None:
    """What holds the GPU up in this trace; None for a trace without a GPU's events."""
    if not timeline.on_device:
        return None
    if not np.any(trace.host.categories == LAUNCH):
        return HoldUps(places=None, reason="the trace holds no calls of the CUDA or HIP runtime")
    launches = find_launches(trace)
    if not np.any(launches.calls != UNKNOWN):
        return HoldUps(places=None, reason="no call of the trace has the correlation id of a kernel")
    starts = np.array([window.start for window in timeline.windows], np.int64)
    ends = np.array([window.end for window in timeline.windows], np.int64)
    # Calls before the first kernel and after the last find the GPU idle too.
    first, last = min(starts.min(), trace.host.starts.min()), max(ends.max(), trace.host.ends.max())
    gaps = idle_gaps(timeline, int(first), int(last))
    calls = find_calls(trace, timeline.spans, launches, _starved(timeline, gaps))
    windows = Intervals.union(starts, ends)
    idle, followed = idle_caused(timeline.spans.starts, gaps, launches, calls, windows)
    has_steps = timeline.windows[0].step is not None
    counted = step_at(calls.starts, timeline.host_windows) != UNKNOWN if has_steps else np.ones(len(calls), np.bool_)
    return HoldUps(
        places=_places(trace, calls, np.flatnonzero(counted), idle, followed),
        steps=len(timeline.windows) if has_steps else None,
        span_ns=windows.length,
        idle_ns=int(windows.within(gaps.starts, gaps.ends).sum()),
    )


def idle_caused(
    kernels: Nanoseconds, gaps: Gaps, launches: Launches, calls: Calls, windows: Intervals
) -> tuple[Nanoseconds, Nanoseconds]:
    """Idle time within ``windows`` that each call causes, and all that follows it; ``kernels`` are the spans' starts.

    A gap that ends with the first span of a launch, which was not queued yet when the gap began, may be due to the
    calls that the launching thread began since its previous launch, that one and this one included. Each nanosecond of
    the gap follows the call that began last. Without the calls the launch would have come earlier by their durations:
    they cause so much of the gap's end, and share it in proportion. The duration of a call that launches counts for the
    gap before its own span as far as the call stands in that gap, the rest for the gap after.
    """
    caused, followed = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64)
    own = _first_spans(kernels, launches, int(calls.rows.max(initial=-1)) + 1)[calls.rows]
    until_own = np.maximum(calls.starts, np.where(own == NEVER, calls.starts, np.minimum(own, calls.ends)))
    before_own = Intervals(gaps.starts, gaps.ends).within(calls.starts, until_own)
    follower = gaps.followers
    ended = np.flatnonzero((follower != UNKNOWN) & (gaps.ends > gaps.starts))
    _, first = np.unique(launches.calls, return_index=True)
    ended = ended[(launches.calls[follower[ended]] != UNKNOWN) & np.isin(follower[ended], first)]
    ended = ended[launches.queued[follower[ended]] > gaps.starts[ended]]
    for thread in np.unique(calls.threads).tolist():
        mine = ended[launches.threads[follower[ended]] == thread]
        launch, previous = _with_previous(launches, thread, launches.points[follower[mine]])
        low, high = np.searchsorted(calls.threads, (thread, thread + 1)).tolist()
        from_ = low + np.searchsorted(calls.starts[low:high], previous, side="left")
        place, call, is_last = _pairs(from_, low + np.searchsorted(calls.starts[low:high], launch, side="right"))
        start, end = gaps.starts[mine][place], gaps.ends[mine][place]
        begin = np.maximum(start, calls.starts[call])
        until = np.where(is_last, end, np.minimum(end, calls.starts[np.minimum(call + 1, len(calls) - 1)]))
        followed_here = np.maximum(0, until - begin)
        np.add.at(followed, call, np.where(followed_here > 0, windows.within(begin, begin + followed_here), 0))
        launches_itself = calls.rows[call] == launches.calls[follower[mine]][place]
        delay = np.where(launches_itself, before_own[call], (calls.ends - calls.starts - before_own)[call])
        total = _sums(place, delay, len(mine))
        idle = np.minimum(total, _sums(place, followed_here, len(mine)))
        idle = windows.within(gaps.ends[mine] - idle, gaps.ends[mine])
        np.add.at(caused, call, _shares(place, delay, total, idle))
    return caused, followed


def _first_spans(kernels: Nanoseconds, launches: Launches, count: int) -> Nanoseconds:
    """When the first span of each of the first ``count`` host events starts; :data:`NEVER` where it launched none."""
    found = np.full(count, NEVER, np.int64)
    rows = np.flatnonzero((launches.calls != UNKNOWN) & (launches.calls < count))
    np.minimum.at(found, launches.calls[rows], kernels[rows])
    return found


def _with_previous(launches: Launches, thread: int, launch: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Some launches of a thread, and the one before each."""
    points = np.unique(launches.points[launches.threads == thread])
    before = np.searchsorted(points, launch, side="left") - 1
    return launch, np.where(before < 0, -NEVER, points[before] if len(points) else 0)


def _pairs(
    from_: npt.NDArray[np.int64], to: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Every place with each number in its ``range(from_, to)``, and whether that is the last."""
    count = np.maximum(0, to - from_)
    place = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count) + from_[place]
    return place, number, number == to[place] - 1


def _sums(place: npt.NDArray[np.int64], values: Nanoseconds, count: int) -> Nanoseconds:
    total = np.zeros(count, np.int64)
    np.add.at(total, place, values)
    return total


def _shares(place: npt.NDArray[np.int64], parts: Nanoseconds, totals: Nanoseconds, amounts: Nanoseconds) -> Nanoseconds:
    """``amounts[place]`` divided in proportion to ``parts``, which add up to ``totals``; whole, and with nothing lost.

    ``place`` is ordered.
    """
    reached = np.cumsum(parts)
    before = (np.cumsum(totals) - totals)[place]
    scale = np.where(totals > 0, amounts / np.maximum(totals, 1), 0.0)[place]
    up_to = np.rint((reached - before) * scale).astype(np.int64)
    from_ = np.rint((reached - parts - before) * scale).astype(np.int64)
    return np.asarray(up_to - from_, np.int64)


def _starved(timeline: Timeline, gaps: Gaps) -> Intervals:
    """When nothing runs and the call that launches what runs next has not returned."""
    queued = np.where(gaps.followers == UNKNOWN, np.iinfo(np.int64).max, timeline.spans.queued[gaps.followers])
    rows = queued > gaps.starts
    return Intervals(gaps.starts[rows], np.minimum(gaps.ends, queued)[rows])


def _places(
    trace: TraceFile, calls: Calls, rows: npt.NDArray[np.int64], idle: Nanoseconds, followed: Nanoseconds
) -> tuple[HoldUp, ...]:
    """Sums over the calls of each kind and place."""
    known = calls.frames[rows] != UNKNOWN
    units = np.where(known, UNKNOWN, calls.units[rows])
    annotations = np.where(known | (units != UNKNOWN), UNKNOWN, calls.annotations[rows])
    operators = calls.operators[rows]
    threads = np.where(known | (operators != UNKNOWN) | (units != UNKNOWN), UNKNOWN, calls.threads[rows])
    columns = (calls.kinds[rows], calls.frames[rows], operators, units, annotations, threads)
    key = np.stack([column.astype(np.int64) for column in columns], axis=1)
    _, place = np.unique(key, axis=0, return_inverse=True)
    members: dict[int, list[int]] = defaultdict(list)
    for row, number in zip(rows.tolist(), place.reshape(-1).tolist()):
        members[number].append(row)
    found = [_place(trace, calls, np.array(of), idle, followed) for of in members.values()]
    return tuple(sorted(found, key=lambda one: (-one.idle_ns, -one.host_ns, one.call)))


def _place(
    trace: TraceFile, calls: Calls, rows: npt.NDArray[np.int64], idle: Nanoseconds, followed: Nanoseconds
) -> HoldUp:
    lengths = (calls.ends - calls.starts)[rows]
    row, copies = int(rows[0]), calls.copies[rows]
    copies = copies[copies != UNKNOWN]
    by_name = np.bincount(calls.names[rows], weights=lengths)
    unit, annotation, frame = int(calls.units[row]), int(calls.annotations[row]), int(calls.frames[row])
    operator = int(calls.operators[row])
    label = calls.unit_names[unit] if unit != UNKNOWN else None
    return HoldUp(
        kind=HOLDS[calls.kinds[row]],
        call=trace.names[int(np.argmax(by_name))],
        line=None if frame == UNKNOWN else trace.frames.name_table[frame],
        operator=None if operator == UNKNOWN else trace.names[operator],
        unit=label if label is not None or annotation == UNKNOWN else trace.names[annotation],
        thread="/".join(trace.threads[int(calls.threads[row])]),
        copied=trace.names[int(copies[0])] if len(copies) else None,
        count=len(np.unique(calls.occurrences[rows])),
        host_ns=int(lengths.sum()),
        idle_ns=int(idle[rows].sum()),
        followed_ns=int(followed[rows].sum()),
    )
