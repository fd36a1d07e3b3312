"""What waits for what in a trace: kernels for kernels of other streams, and calls of the host for the device.

Where the profiler recorded synchronisation, its events say it (:mod:`~refshard.tracing.host.stream_waits`). Elsewhere
it is inferred: from c10d's rule that a
collective waits for what its thread launched before, from the order of the calls that make a stream wait, and from a
queued kernel that starts within microseconds of the end of a kernel on another stream.
"""

import numpy as np
import numpy.typing as npt

from refshard.events.table import CONTEXT_SYNC, LAUNCH, STREAM_WAIT, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Kind, Spans
from refshard.tracing.host.runtime import STREAM_WAITS
from refshard.tracing.host.stream_waits import LOWEST, Pairs, Rows, Streams, begins_by_correlation, lane_numbers
from refshard.tracing.replay.hostcalls import WHOLE_DEVICE, CallOrder

NEAR_NS = 10_000
"""A kernel that was queued and starts so soon after the end of one on another stream is taken to have waited for it."""


def inferred_waits(trace: TraceFile, spans: Spans, threads: npt.NDArray[np.int32], streams: Streams) -> Pairs:
    """Waits of kernels for kernels of other streams that the trace implies: none contradicts its times."""
    found = [_near(spans, streams), _issued(spans, threads), _after_stream_waits(trace, spans, threads, streams)]
    waiting, sources = (np.concatenate(columns) for columns in zip(*found))
    pairs = np.unique(np.stack((waiting, sources)), axis=1)
    return pairs[0], pairs[1]


def _near(spans: Spans, streams: Streams) -> Pairs:
    """Of queued spans that start just after the end of one on another lane."""
    before = previous_on_lane(spans)
    free = np.where(before == UNKNOWN, LOWEST, spans.ends[before])
    late = spans.starts - NEAR_NS
    idle = np.flatnonzero((spans.queued != UNKNOWN) & (spans.queued < late) & (free < late))
    best, source = np.full(len(idle), LOWEST), np.full(len(idle), UNKNOWN)
    for lane, rows in enumerate(streams.rows):
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
    codes = [code for code, name in enumerate(trace.names) if STREAM_WAITS.match(name)]
    rows = np.flatnonzero(np.isin(host.names, codes) & (host.categories == LAUNCH))
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
    told = _as_pairs(known)
    waiting = np.concatenate((place, told[0]))
    return blocking[waiting], np.concatenate((last[lane, place], told[1]))


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
