"""What waits for what in a trace, and what a wait costs: kernels for kernels of other streams, calls of the host for
the device and for each other.

Where the profiler recorded synchronisation, its events say it (:func:`refshard.analysis.kineto.recorded_waits`).
Elsewhere it is inferred: from c10d's rule that a collective waits for what its thread launched before, from the order
of the calls that make a stream wait, and from a queued kernel that starts within microseconds of the end of a kernel on
another stream.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refshard.analysis.kineto import LOWEST, Pairs, Rows, Streams, begins_by_correlation, lane_numbers
from refshard.analysis.names import AWAITS_WORK, FREES, STREAM_WAITS
from refshard.analysis.owners import named
from refshard.events.table import CONTEXT_SYNC, HOST, LAUNCH, STREAM_WAIT, HostEvents, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Kind, Nanoseconds, Spans

WHOLE_DEVICE = re.compile(r"(?:Device|Ctx|Context|Thread)Synchronize|Free$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOrder:
    """Calls in the order in which they began.

    ``rows`` are those of :class:`HostEvents`. ``parents`` are the calls that each one follows,
    and ``after`` says whether it began after its parent returned. ``blocks`` are the calls that wait for the device;
    ``segments`` the blocking call that the host had returned from last before each. :data:`UNKNOWN` without one.
    """

    rows: Rows
    begins: Nanoseconds
    ends: Nanoseconds
    threads: npt.NDArray[np.int32]
    names: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.bool_]
    parents: Rows
    after: npt.NDArray[np.bool_]
    segments: Rows

    def __len__(self) -> int:
        return len(self.rows)


def blocking_rows(trace: TraceFile, start: int, end: int) -> Rows:
    """Rows of calls in ``[start, end)`` that block by their name."""
    host = trace.host
    inside = (host.starts >= start) & (host.starts < end) & (host.categories == LAUNCH)
    return np.flatnonzero(inside & named(trace, AWAITS_WORK))


def host_calls(host: HostEvents, rows: Rows, blocking: Rows) -> CallOrder:
    """The calls ``rows``, of which ``blocking`` wait for the device."""
    # An operator that stands for its launch goes on after it: it counts as a moment.
    ends = np.where(host.categories[rows] == LAUNCH, host.ends[rows], host.starts[rows])
    order = np.lexsort((-ends, host.starts[rows]))
    rows, ends = rows[order], ends[order]
    begins, threads = host.starts[rows], host.threads[rows]
    blocks = np.isin(rows, blocking)
    parents = _parents(host, begins, ends, threads)
    after = np.zeros(len(rows), np.bool_)
    has = parents != UNKNOWN
    after[has] = begins[has] >= ends[parents[has]]
    return CallOrder(
        rows=rows, begins=begins, ends=ends, threads=threads, names=host.names[rows], blocks=blocks, parents=parents,
        after=after, segments=_segments(parents, after, blocks),
    )  # fmt: skip


def _parents(host: HostEvents, begins: Nanoseconds, ends: Nanoseconds, threads: npt.NDArray[np.int32]) -> Rows:
    """The call that each one follows: on its own thread, or of the thread that handed over."""
    count = np.arange(len(begins))
    if not len(begins):
        return count
    by_thread = np.argsort(threads, kind="stable")
    same = np.zeros(len(begins), np.bool_)
    same[1:] = threads[by_thread][1:] == threads[by_thread][:-1]
    before = np.full(len(begins), UNKNOWN, np.int64)
    before[by_thread[same]] = by_thread[np.flatnonzero(same) - 1]
    switched = np.flatnonzero((before != count - 1) & (before != UNKNOWN))
    switched = switched[ends[switched - 1] <= begins[switched]]
    found = np.where(before == UNKNOWN, count - 1, before)
    # A thread that itself began operators meanwhile was not waiting for the other.
    own = _operators_begun(
        host, threads[switched], begins[np.minimum(before[switched] + 1, len(begins) - 1)], ends[switched - 1]
    )
    handed = switched[own == 0]
    found[handed] = handed - 1
    return found


def _operators_begun(
    host: HostEvents, threads: npt.NDArray[np.int32], starts: Nanoseconds, ends: Nanoseconds
) -> npt.NDArray[np.int64]:
    """How many operators a thread began in ``[start, end]``."""
    found = np.zeros(len(threads), np.int64)
    for thread in np.unique(threads).tolist():
        mine = threads == thread
        begun = np.sort(host.starts[(host.threads == thread) & (host.categories == HOST)])
        found[mine] = np.searchsorted(begun, ends[mine], "right") - np.searchsorted(begun, starts[mine], "left")
    return found


def _segments(parents: Rows, after: npt.NDArray[np.bool_], blocks: npt.NDArray[np.bool_]) -> Rows:
    """The blocking call that opens each call's segment, by following the calls' parents."""
    has = parents != UNKNOWN
    opened = has & after & blocks[parents]
    pointer = np.where(has & ~opened, parents, np.arange(len(parents)))
    while True:
        further = pointer[pointer]
        if (further == pointer).all():
            return np.where(opened[pointer], parents[pointer], UNKNOWN)
        pointer = further


_SOON_NS = 100_000
"""A call that frees memory so soon after work of the device has ended is taken to have waited for that work."""


def with_hidden_waits(calls: CallOrder, trace: TraceFile, ended: Nanoseconds) -> CallOrder:
    """The same calls, of which those that free memory begin where their thread's wait began; ``ended`` is when work of
    the device did.

    The thread waited if it made no call until work of the device ended, and freed memory at once. A call keeps its
    begin if another thread's call began in between.
    """
    frees = [code for code, name in enumerate(trace.names) if FREES.match(name)]
    places = np.flatnonzero(np.isin(calls.names, frees))
    if not len(places) or not len(ended):
        return calls
    begins, since = calls.begins[places], _last_call(trace, calls, places)
    ordered = np.sort(ended)
    last = ordered[np.maximum(np.searchsorted(ordered, begins, "right") - 1, 0)]
    waited = (last <= begins) & (begins - last <= _SOON_NS) & (2 * (last - since) > begins - since)
    waited &= calls.begins[np.maximum(places - 1, 0)] <= since
    found = calls.begins.copy()
    found[places[waited]] = since[waited]
    return replace(calls, begins=found)


def _last_call(trace: TraceFile, calls: CallOrder, places: npt.NDArray[np.intp]) -> Nanoseconds:
    """When the call before each of these returned, on its thread; its own begin without one."""
    host, found = trace.host, calls.begins[places].copy()
    for thread in np.unique(calls.threads[places]).tolist():
        mine = np.flatnonzero(calls.threads[places] == thread)
        ends = np.sort(host.ends[(host.threads == thread) & (host.categories == LAUNCH)])
        before = np.searchsorted(ends, found[mine], "right") - 1
        found[mine] = np.where(before >= 0, ends[np.maximum(before, 0)], found[mine])
    return found


NEAR_NS = 10_000
"""A kernel that was queued and starts so soon after the end of one on another stream is taken to have waited for it."""


def inferred_waits(trace: TraceFile, spans: Spans, threads: npt.NDArray[np.int32], streams: Streams) -> Pairs:
    """Waits of kernels for kernels of other streams that the trace implies: none contradicts its times."""
    found = [
        near_ends(spans, streams, np.ones(len(spans), np.bool_)),
        _issued(spans, threads),
        _after_stream_waits(trace, spans, threads, streams),
    ]
    waiting, sources = (np.concatenate(columns) for columns in zip(*found))
    pairs = np.unique(np.stack((waiting, sources)), axis=1)
    return pairs[0], pairs[1]


def near_ends(spans: Spans, streams: Streams, among: npt.NDArray[np.bool_]) -> Pairs:
    """Of queued spans that start just after the end of one on another lane, both ``among`` these."""
    before = previous_on_lane(spans)
    free = np.where(before == UNKNOWN, LOWEST, spans.ends[before])
    late = spans.starts - NEAR_NS
    idle = np.flatnonzero(among & (spans.queued != UNKNOWN) & (spans.queued < late) & (free < late))
    best, source = np.full(len(idle), LOWEST), np.full(len(idle), UNKNOWN)
    for lane, mine in enumerate(streams.rows):
        rows = mine[among[mine]]
        order = rows[np.argsort(spans.ends[rows], kind="stable")]
        place = np.searchsorted(spans.ends[order], spans.starts[idle], "right") - 1
        row = order[np.maximum(place, 0)] if len(order) else np.zeros(len(idle), np.int64)
        fits = (place >= 0) & (spans.lanes[idle] != lane) & (spans.launches[row] <= spans.launches[idle])
        fits &= (spans.ends[row] >= late[idle]) & (spans.ends[row] > best)
        best, source = np.where(fits, spans.ends[row], best), np.where(fits, row, source)
    return idle[source != UNKNOWN], source[source != UNKNOWN]


def _issued(spans: Spans, threads: npt.NDArray[np.int32]) -> Pairs:
    """A collective waits for the work that its thread launched last on another lane."""
    known = np.flatnonzero(spans.launches != UNKNOWN)
    order = known[np.lexsort((spans.launches[known], threads[known]))]
    communicates = spans.kinds[order] == KINDS.index(Kind.COMM)
    last = np.maximum.accumulate(np.where(communicates, -1, np.arange(len(order))))
    fits = communicates & (last >= 0)
    mine, source = order[fits], order[last[fits]]
    fits = (threads[mine] == threads[source]) & (spans.lanes[mine] != spans.lanes[source])
    fits &= spans.ends[source] <= spans.starts[mine]
    return mine[fits], source[fits]


def _after_stream_waits(trace: TraceFile, spans: Spans, threads: npt.NDArray[np.int32], streams: Streams) -> Pairs:
    """What a thread launches after making a stream wait follows the last to end of what other lanes had been given."""
    host = trace.host
    rows = np.flatnonzero(named(trace, STREAM_WAITS) & (host.categories == LAUNCH))
    pairs = [_as_pairs([])]
    for thread in np.unique(host.threads[rows]).tolist():
        mine = np.flatnonzero((threads == thread) & (spans.launches != UNKNOWN))
        mine = mine[np.argsort(spans.launches[mine], kind="stable")]
        calls = host.starts[rows[host.threads[rows] == thread]]
        place = np.searchsorted(spans.launches[mine], calls, "left")
        waiting, calls = mine[place[place < len(mine)]], calls[place < len(mine)]
        best, source = np.full(len(waiting), LOWEST), np.full(len(waiting), UNKNOWN)
        for lane in range(len(streams.rows)):
            row = streams.last_before(lane, calls)
            fits = (row != UNKNOWN) & (spans.lanes[waiting] != lane)
            fits &= (spans.ends[row] <= spans.starts[waiting]) & (spans.ends[row] > best)
            best, source = np.where(fits, spans.ends[row], best), np.where(fits, row, source)
        pairs.append((waiting[source != UNKNOWN], source[source != UNKNOWN]))
    return np.concatenate([one for one, _ in pairs]), np.concatenate([other for _, other in pairs])


def blocked_for(trace: TraceFile, calls: CallOrder, streams: Streams, blocking: Rows, lanes: Rows) -> Pairs:
    """The calls ``blocking``, each with the spans that it waits for.

    ``lanes`` are those on which each call's thread had launched last. Where the profiler did not record what a call
    waits for, it is the lane of which the work ended last during the call, or else that lane.
    """
    begins, ends = calls.begins[blocking], calls.ends[blocking]
    last = np.stack([streams.last_before(lane, begins) for lane in range(len(streams.rows))])
    ended = np.where(last == UNKNOWN, LOWEST, streams.ends[last])
    during = np.where((ended > begins) & (ended <= ends), ended, LOWEST)
    chosen = np.where(during.max(axis=0) > LOWEST, during.argmax(axis=0), lanes[blocking])
    whole = np.array([bool(WHOLE_DEVICE.search(trace.names[code])) for code in calls.names[blocking].tolist()], bool)
    wanted = (np.arange(len(last))[:, None] == chosen) | whole
    wanted &= (last != UNKNOWN) & (ended <= ends)
    known = _recorded_sources(trace, calls, streams, blocking)
    wanted[:, list({place for place, _ in known})] = False
    lane, place = np.nonzero(wanted)
    found = _as_pairs(known)
    waiting = np.concatenate((place, found[0]))
    return blocking[waiting], np.concatenate((last[lane, place], found[1]))


def _recorded_sources(trace: TraceFile, calls: CallOrder, streams: Streams, blocking: Rows) -> list[tuple[int, int]]:
    """For places in ``blocking``, the spans that the profiler says each waited for."""
    syncs, numbers = trace.syncs, lane_numbers(trace)
    if not len(syncs.kinds) or not len(blocking):
        return []
    places = {int(trace.host.correlations[row]): place for place, row in enumerate(calls.rows[blocking].tolist())}
    begins = begins_by_correlation(trace, syncs.records)
    found = []
    for row in np.flatnonzero(syncs.kinds != STREAM_WAIT).tolist():
        place = places.get(int(syncs.correlations[row]))
        if place is None:
            continue
        device, point = int(syncs.devices[row]), int(calls.begins[blocking[place]])
        if syncs.kinds[row] == CONTEXT_SYNC:
            waited = [lane for (of, _), lane in numbers.items() if of == device]
        else:
            streams_of = (int(syncs.sources[row]), int(syncs.streams[row]))
            waited = [numbers[device, stream] for stream in streams_of if (device, stream) in numbers][:1]
            point = int(begins[row]) if begins[row] != UNKNOWN else point
        found += [(place, int(streams.last_before(lane, np.array([point]))[0])) for lane in waited]
    return [pair for pair in found if pair[1] != UNKNOWN]


def previous_on_lane(spans: Spans) -> Rows:
    """The span before each one on its lane, :data:`UNKNOWN` for the first."""
    order = np.argsort(spans.lanes, kind="stable")
    found = np.full(len(spans), UNKNOWN, np.int64)
    same = np.flatnonzero(spans.lanes[order][1:] == spans.lanes[order][:-1])
    found[order[same + 1]] = order[same]
    return found


def _as_pairs(pairs: list[tuple[int, int]]) -> Pairs:
    flat = np.array(pairs, np.int64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1]


ORDINARY = 10
"""A dependency may cost so many times as much as usual before the rest is called unexplained."""
LONGEST_ORDINARY_NS = 100_000
"""No dependency of streams, and no launch into an empty queue, ordinarily costs more."""
NEVER = -(2**62)
"""The delay of a dependency that does not exist."""
_FEW = 5
_BEFORE, _LAUNCH, _WAIT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delays:
    """What the dependencies of spans cost, so that each starts when it did."""

    before: Nanoseconds
    launch: Nanoseconds
    waits: Nanoseconds
    holds: Nanoseconds

    @classmethod
    def of(
        cls, spans: Spans, queued: Nanoseconds, before: Rows, launched: npt.NDArray[np.bool_], waits: tuple[Rows, Rows]
    ) -> "Delays":
        """``queued`` are times, ``before`` the spans before, ``waits`` pairs of a span and one that it waits for."""
        starts, first = spans.starts, before == UNKNOWN
        free = np.where(first, NEVER, spans.ends[before])
        queued = np.where(launched, queued, NEVER)
        met = np.full(len(spans), NEVER)
        np.maximum.at(met, waits[0], spans.ends[waits[1]])
        after_launch, after_before, after_waits = starts - queued, starts - free, starts - met
        latency = usual(after_launch[launched & (queued >= free) & (queued >= met)], after_launch[launched])
        gap = usual(
            after_before[(free >= queued + latency) & (met == NEVER) & ~first & (after_before >= 0)],
            after_before[~first & (after_before >= 0)],
        )
        after_each = starts[waits[0]] - spans.ends[waits[1]]
        bound = (met >= free + gap) & (met >= queued + latency)
        # Of many waits of which none held a span up, distances say nothing: one costs what following on a stream does.
        known = after_each[after_each >= 0]
        wait = usual(after_waits[bound & (after_waits >= 0)], np.minimum(known, gap) if len(known) >= _FEW else known)
        launch = np.minimum(after_launch, latency)
        follow = np.minimum(after_before, gap)
        each = np.clip(np.minimum(after_each, wait), 0, None)
        ready_waits = np.full(len(spans), NEVER)
        np.maximum.at(ready_waits, waits[0], spans.ends[waits[1]] + each)
        ready = np.stack(
            (np.where(first, NEVER, free + follow), np.where(launched, queued + launch, NEVER), ready_waits)
        )
        last, late = ready.argmax(axis=0), np.clip(starts - ready.max(axis=0), 0, None)
        ordinary = ORDINARY * np.array([gap, latency, wait])[last]
        given = np.stack((follow, launch, np.zeros_like(launch)))[last, np.arange(len(spans))]
        more = np.minimum(late, np.clip(np.minimum(ordinary, LONGEST_ORDINARY_NS) - given, 0, None))
        latest = spans.ends[waits[1]] + each == ready_waits[waits[0]]
        each += np.where((last[waits[0]] == _WAIT) & latest, more[waits[0]], 0)
        return cls(
            before=follow + np.where(last == _BEFORE, more, 0),
            launch=launch + np.where(last == _LAUNCH, more, 0),
            waits=each,
            holds=late - more,
        )


def usual(bound: Nanoseconds, any_of: Nanoseconds) -> int:
    """The median of those that were bound by such a dependency; of too few, the least of any."""
    few = int(any_of.min()) if len(any_of) else 0
    return min(LONGEST_ORDINARY_NS, int(np.median(bound)) if len(bound) >= _FEW else few)
