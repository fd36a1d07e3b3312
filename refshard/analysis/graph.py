"""The dependency graph of one rank's trace: what must end before a kernel starts or a call of the host returns.

Nodes are the device's spans and the host's calls that block on it. A span follows the one before it on its stream, the
host's call that launched it, and spans of other streams that it waits for; a blocking call follows the host's calls
before it and the spans that it waits for. Where the profiler recorded synchronisation, its events say what waits
(:func:`refshard.analysis.kineto.recorded_waits`). Otherwise, waits are inferred: from c10d's rule that a collective
waits for what its thread launched before, from the order of the calls that make a stream wait, and from a queued kernel
that starts within microseconds of the end of a kernel on another stream.

Each dependency takes its usual time in the trace: the median distance of two kernels on a stream, the median latency of
a launch into an empty queue. If a node started later than all of them allow, the last dependency took longer this time,
within limits (:class:`Delays`); the rest is unexplained, and stays as a hold.
"""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from refshard.analysis.host_time import dispatching
from refshard.analysis.kineto import LOWEST, Pairs, Streams, begins_by_correlation, find_launches, lane_numbers
from refshard.analysis.labels import named
from refshard.analysis.names import AWAITS_WORK, FREES, STREAM_WAITS
from refshard.events.table import CONTEXT_SYNC, HOST, LAUNCH, STREAM_WAIT, HostEvents, TraceFile
from refshard.events.timeline import (
    KINDS,
    UNKNOWN,
    Ints,
    Kind,
    Mask,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    Window,
    rows_of,
)

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
    threads: Ints
    names: Ints
    blocks: Mask
    parents: Rows
    after: Mask
    segments: Rows

    def __len__(self) -> int:
        return len(self.rows)


def host_calls(host: HostEvents, rows: Rows, blocking: Rows) -> CallOrder:
    """The calls ``rows``; the ``blocking`` ones wait for the device."""
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
    # The blocking call that opens each call's segment, by following the calls' parents.
    opened = has & after & blocks[parents]
    pointer = np.where(has & ~opened, parents, np.arange(len(parents)))
    while ((further := pointer[pointer]) != pointer).any():
        pointer = further
    return CallOrder(
        rows=rows, begins=begins, ends=ends, threads=threads, names=host.names[rows], blocks=blocks, parents=parents,
        after=after, segments=np.where(opened[pointer], parents[pointer], UNKNOWN),
    )  # fmt: skip


def _parents(host: HostEvents, begins: Nanoseconds, ends: Nanoseconds, threads: Ints) -> Rows:
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
    since, until = begins[np.minimum(before[switched] + 1, len(begins) - 1)], ends[switched - 1]
    for thread in np.unique(threads[switched]).tolist():
        mine = threads[switched] == thread
        begun = np.sort(host.starts[(host.threads == thread) & (host.categories == HOST)])
        alone = np.searchsorted(begun, until[mine], "right") <= np.searchsorted(begun, since[mine], "left")
        handed = switched[mine][alone]
        found[handed] = handed - 1
    return found


_SOON_NS = 100_000
"""A call that frees memory so soon after work of the device has ended is taken to have waited for that work."""


def with_hidden_waits(calls: CallOrder, trace: TraceFile, ended: Nanoseconds) -> CallOrder:
    """The same calls, but calls that free memory begin where their thread's wait began; ``ended`` is when the device's
    work ended.

    The thread waited if it made no call until work of the device ended, and freed memory at once. A call keeps its
    begin if another thread's call began in between.
    """
    frees = [code for code, name in enumerate(trace.names) if FREES.match(name)]
    places = np.flatnonzero(np.isin(calls.names, frees))
    if not len(places) or not len(ended):
        return calls
    host, begins = trace.host, calls.begins[places]
    since = begins.copy()  # when the call before each of these returned, on its thread; its own begin without one
    for thread in np.unique(calls.threads[places]).tolist():
        mine = np.flatnonzero(calls.threads[places] == thread)
        ends = np.sort(host.ends[(host.threads == thread) & (host.categories == LAUNCH)])
        before = np.searchsorted(ends, since[mine], "right") - 1
        since[mine] = np.where(before >= 0, ends[np.maximum(before, 0)], since[mine])
    ordered = np.sort(ended)
    last = ordered[np.maximum(np.searchsorted(ordered, begins, "right") - 1, 0)]
    waited = (last <= begins) & (begins - last <= _SOON_NS) & (2 * (last - since) > begins - since)
    waited &= calls.begins[np.maximum(places - 1, 0)] <= since
    found = calls.begins.copy()
    found[places[waited]] = since[waited]
    return replace(calls, begins=found)


NEAR_NS = 10_000
"""A kernel that was queued and starts so soon after the end of one on another stream is taken to have waited for it."""


def inferred_waits(trace: TraceFile, spans: Spans, threads: Ints, streams: Streams) -> Pairs:
    """Waits of kernels for kernels of other streams that the trace implies: none contradicts its times."""
    # A collective waits for the work that its thread launched last on another lane.
    known = np.flatnonzero(spans.launches != UNKNOWN)
    order = known[np.lexsort((spans.launches[known], threads[known]))]
    communicates = spans.kinds[order] == KINDS.index(Kind.COMM)
    last = np.maximum.accumulate(np.where(communicates, -1, np.arange(len(order))))
    mine, source = order[communicates & (last >= 0)], order[last[communicates & (last >= 0)]]
    fits = (threads[mine] == threads[source]) & (spans.lanes[mine] != spans.lanes[source])
    fits &= spans.ends[source] <= spans.starts[mine]
    near = near_ends(spans, streams, np.ones(len(spans), np.bool_))
    found = [near, (mine[fits], source[fits]), _after_stream_waits(trace, spans, threads, streams)]
    waiting, sources = (np.concatenate(columns) for columns in zip(*found))
    pairs = np.unique(np.stack((waiting, sources)), axis=1)
    return pairs[0], pairs[1]


def near_ends(spans: Spans, streams: Streams, among: Mask) -> Pairs:
    """Pairs of spans ``among`` these: a queued span, and one on another lane that ended just before it started."""
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


def _after_stream_waits(trace: TraceFile, spans: Spans, threads: Ints, streams: Streams) -> Pairs:
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

    ``lanes`` are where each call's thread had launched last. If the profiler did not record what a call waits for, it
    is the lane whose work ended last during the call, or else that lane.
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
"""A dependency may cost this many times the usual before the rest counts as unexplained."""
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
    def of(cls, spans: Spans, queued: Nanoseconds, before: Rows, launched: Mask, waits: tuple[Rows, Rows]) -> "Delays":
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
        # If many waits held no span up, distances say nothing: a wait costs what following on a stream does.
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
            before=follow + np.where(last == _BEFORE, more, 0), launch=launch + np.where(last == _LAUNCH, more, 0),
            waits=each, holds=late - more,
        )  # fmt: skip


def usual(bound: Nanoseconds, any_of: Nanoseconds) -> int:
    """The median over the spans bound by such a dependency; if these are too few, the minimum over all."""
    few = int(any_of.min()) if len(any_of) else 0
    return min(LONGEST_ORDINARY_NS, int(np.median(bound)) if len(bound) >= _FEW else few)


MOST_SPANS = 100_000
"""A trace with more is represented by the step of median length."""
TOO_MANY_SPANS = 400_000
"""A step with more is not replayed."""
FULL_QUEUE = 1000
"""Launches that CUDA queues for the device (1,022 on recent drivers); the next call blocks."""
_ROOT = 0
_COPIES = re.compile(r"[mM]emcpy")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Nodes in an order in which each follows what it depends on; node 0 is where the host begins.

    ``rows`` are the spans of the nodes, in ``spans``; ``call_of`` the blocking calls, in ``calls``; :data:`UNKNOWN` for
    the others. A node starts at the latest of its dependencies' ends plus their delays: ``before`` (the span before on
    its stream), ``host`` (the last blocking call, or node 0) and ``waiting`` for ``waited_for``, pairs of nodes; then
    it is held for ``holds`` and lasts ``durations``. The delay is :data:`NEVER` where there is no dependency.
    ``launched_by`` is the call behind each dependency on the host, and ``full_queue`` says which waits are of launches
    for a place in the queue. ``ends`` are the trace's. The first ``fixed`` nodes come before the steps looked at, which
    are ``windows``. In these the host took ``host_span_ns`` from its first call to its last, and ``host_last`` is the
    node that it had passed last then. ``recorded`` and ``inferred`` count waits between streams; ``only_launches`` says
    that the trace holds no other calls, so that waits of the host may be missing. ``dispatch`` is how much of each
    dependency on the host is modes in Python that dispatch operators.
    """

    windows: tuple[Window, ...]
    host_span_ns: int
    host_last: int | None
    spans: Spans
    calls: CallOrder
    call_names: tuple[str, ...]
    rows: Rows
    call_of: Rows
    launched_by: Rows
    ends: Nanoseconds
    durations: Nanoseconds
    holds: Nanoseconds
    before: Rows
    before_delays: Nanoseconds
    host: Rows
    host_delays: Nanoseconds
    dispatch: Nanoseconds
    waiting: Rows
    waited_for: Rows
    wait_delays: Nanoseconds
    full_queue: Mask
    fixed: int
    recorded: int
    inferred: int
    only_launches: bool

    @property
    def start(self) -> int:
        """Where the steps looked at begin."""
        return self.windows[0].start

    @property
    def end(self) -> int:
        """Where the steps looked at end."""
        return self.windows[-1].end

    @property
    def is_span(self) -> Mask:
        """Which nodes are spans of the device."""
        return np.asarray(self.rows != UNKNOWN, np.bool_)

    @property
    def communicates(self) -> Mask:
        """Which nodes are spans of communication."""
        return self.is_span & self.spans.of_kind(Kind.COMM)[self.rows]


def graph_of(trace: TraceFile, timeline: Timeline, *, most_spans: int = MOST_SPANS) -> Graph | None:
    """The graph of a trace's steps, or of the step of median length where they hold over ``most_spans``.

    None of a CPU's trace, where a step has over :data:`TOO_MANY_SPANS`, and where no span ends in it.
    """
    if not timeline.on_device:
        return None
    windows, starts = timeline.windows, timeline.spans.starts
    first, last = 0, int(np.searchsorted(starts, windows[-1].end, "left"))
    # Windows between which time passes, which a user chose, cannot be replayed together.
    if len(starts) > most_spans or any(one.end != other.start for one, other in pairwise(windows)):
        middle = sorted(windows, key=lambda window: window.end - window.start)[len(windows) // 2]
        # For a single step, also the spans of an equally long time before.
        first, last = np.searchsorted(starts, (2 * middle.start - middle.end, middle.end), "left").tolist()
        windows = (middle,)
    if not first < last <= first + TOO_MANY_SPANS or windows[0].start >= windows[-1].end:
        return None
    found = find_launches(trace)
    chosen = slice(first, last)
    spans, callers = rows_of(timeline.spans, np.arange(first, last)), found.calls[chosen]
    waits, recorded = None, timeline.calls
    if recorded is not None and len(recorded.waiting):
        inside = np.minimum(recorded.waiting, recorded.sources) >= first
        inside &= np.maximum(recorded.waiting, recorded.sources) < last
        waits = recorded.waiting[inside] - first, recorded.sources[inside] - first
    graph = _Builder(trace, timeline, windows, spans, callers, found.threads[chosen], waits).build()
    ended = graph.is_span & (graph.ends <= graph.end) & (np.arange(len(graph.ends)) >= graph.fixed)
    return graph if ended.any() else None


class _Builder:
    """Builds the graph of some spans. ``callers`` are the host's rows that launched them, on ``threads``."""

    def __init__(
        self, trace: TraceFile, timeline: Timeline, windows: tuple[Window, ...], spans: Spans, callers: Rows,
        threads: Ints, recorded_waits: Pairs | None,
    ) -> None:  # fmt: skip
        self.trace, self.windows, self.spans, self.threads = trace, windows, spans, threads
        self.recorded_waits, self.dispatching = recorded_waits, dispatching(trace, threads)
        self.host_windows = {window.step: window for window in timeline.host_windows}
        self.streams = Streams.of(spans)
        known = callers[callers != UNKNOWN]
        self.only_launches, blocking, host = False, known, trace.host
        if len(known):  # whether the host made only launching calls, from the first launch to the last
            since, until = host.starts[known].min(), host.starts[known].max()
            inside = (host.starts >= since) & (host.starts <= until) & (host.categories == LAUNCH)
            self.only_launches = int(inside.sum()) <= len(np.unique(known))
            inside = (host.starts >= since) & (host.starts < windows[-1].end) & (host.categories == LAUNCH)
            blocking = np.flatnonzero(inside & named(trace, AWAITS_WORK))
        # Calls during which the span that they launched ran: copies to pageable memory, CUDA_LAUNCH_BLOCKING.
        mine = np.flatnonzero(callers != UNKNOWN)
        rows, lengths = callers[mine], spans.ends[mine] - spans.starts[mine]
        during = (host.categories[rows] == LAUNCH) & (spans.ends[mine] <= host.ends[rows])
        copies = np.array([bool(_COPIES.match(name)) for name in spans.name_table] or [False])
        during &= copies[spans.names[mine]] | (2 * lengths > host.ends[rows] - host.starts[rows])
        own = np.unique(rows[during])
        # Launches that took long while as many waited for the device as it takes.
        rows = np.unique(known)
        rows = rows[host.categories[rows] == LAUNCH]
        lengths = host.ends[rows] - host.starts[rows]
        pending = np.searchsorted(np.sort(spans.launches), host.starts[rows], "left")
        pending -= np.searchsorted(spans.starts, host.starts[rows], "right")
        long = lengths > ORDINARY * np.median(lengths) if len(rows) else lengths > 0
        full = rows[long & (pending >= FULL_QUEUE)]
        ordered = host_calls(trace.host, np.union1d(known, blocking), np.union1d(blocking, np.union1d(own, full)))
        self.calls = with_hidden_waits(ordered, trace, spans.ends)
        place = {row: i for i, row in enumerate(self.calls.rows.tolist())}
        self.launched_by = np.array([place.get(row, UNKNOWN) for row in callers.tolist()], np.int64)
        by_name = np.array([place[row] for row in np.setdiff1d(blocking, own).tolist()], np.int64)
        lanes = np.zeros(len(self.calls), np.int64)  # on which the thread of each call had launched last
        for thread in np.unique(self.calls.threads).tolist():
            rows = np.flatnonzero(threads == thread)
            rows = rows[np.argsort(spans.launches[rows], kind="stable")]
            mine = np.flatnonzero(self.calls.threads == thread)
            last = np.searchsorted(spans.launches[rows], self.calls.begins[mine], "left") - 1
            lanes[mine] = spans.lanes[rows[np.maximum(last, 0)]] if len(rows) else 0
        waits = blocked_for(trace, self.calls, self.streams, by_name, lanes)
        own_spans = np.flatnonzero(np.isin(callers, own))
        self.full_calls = np.array(
            [place[row] for row in np.setdiff1d(full, np.union1d(own, blocking)).tolist()], np.int64
        )
        self.blocked = np.concatenate((waits[0], self.launched_by[own_spans], self.full_calls))
        order = np.argsort(spans.ends, kind="stable")
        ended = np.searchsorted(spans.ends[order], self.calls.ends[self.full_calls], "right")
        self.blocked_for = np.concatenate((waits[1], own_spans, order[np.maximum(0, ended - 1)]))

    def build(self) -> Graph:
        """All of it."""
        calls, spans, blocks = self.calls, self.spans, np.flatnonzero(self.calls.blocks)
        keys = np.concatenate((calls.ends[blocks], spans.starts))
        order = np.lexsort((np.arange(len(keys)) >= len(blocks), keys))
        number = np.empty(len(keys), np.int64)
        number[order] = np.arange(1, len(keys) + 1)
        self.node_of_call = np.full(len(calls), UNKNOWN, np.int64)
        self.node_of_call[blocks] = number[: len(blocks)]
        self.node_of_span = number[len(blocks) :]
        self.root = min([*calls.begins[:1].tolist(), int(spans.starts[0]), self.windows[0].start])
        columns = {
            name: np.concatenate(([root], np.concatenate((of_calls, of_spans))[order])).astype(np.int64)
            for name, root, of_calls, of_spans in self._columns(blocks)
        }
        # Where clocks disagree, so that a span began before the host had reached its launch, it follows no call.
        later = columns["host"] >= np.arange(len(columns["host"]))
        later[_ROOT] = False
        columns["host"][later], columns["host_delays"][later] = _ROOT, NEVER
        alone = later & (columns["before_delays"] == NEVER)
        starts = columns["ends"] - columns["durations"] - columns["holds"]
        columns["before"][alone], columns["before_delays"][alone] = _ROOT, (starts - self.root)[alone]
        waiting, waited_for, delays = self._all_waits
        full = np.isin(waiting, self.node_of_call[self.full_calls])
        # A dependency on what comes later contradicts the trace's own times.
        fits = waited_for < waiting
        # How long the host took for these steps, and the last node that it had passed.
        own = [self.host_windows[one.step] for one in self.windows if one.step in self.host_windows]
        inside = np.flatnonzero((calls.begins >= own[0].start) & (calls.begins < own[-1].end) if own else [])
        host_span_ns, host_last = 0, None
        if len(inside):
            host_span_ns = int(calls.begins[inside[-1]] - calls.begins[inside[0]])
            host_last = int(self._segment_nodes(inside[-1:])[0])
        return Graph(
            windows=self.windows, host_span_ns=host_span_ns, host_last=host_last, spans=spans, calls=calls,
            call_names=self.trace.names, waiting=waiting[fits], waited_for=waited_for[fits], wait_delays=delays[fits],
            full_queue=full[fits], fixed=1 + int(np.searchsorted(keys[order], self.windows[0].start, "left")),
            recorded=self.recorded, inferred=self.inferred, only_launches=self.only_launches, **columns,
        )  # fmt: skip

    def _columns(self, blocks: Rows) -> list[tuple[str, int, Rows, Rows]]:
        """Each column of the graph: its value at the root, for the blocking calls and for the spans."""
        spans, calls = self.spans, self.calls
        none = np.full(len(blocks), NEVER)
        before, before_delays, host_delays, holds, of_spans = self._span_dependencies()
        call_delays, call_holds, of_calls = self._call_dependencies(blocks)
        self._all_waits = tuple(np.concatenate(pair) for pair in zip(of_spans, of_calls))
        return [
            ("rows", UNKNOWN, np.full(len(blocks), UNKNOWN), np.arange(len(spans))),
            ("call_of", UNKNOWN, blocks, np.full(len(spans), UNKNOWN)),
            ("launched_by", UNKNOWN, blocks, self.launched_by), ("ends", self.root, calls.ends[blocks], spans.ends),
            ("durations", 0, none * 0, spans.ends - spans.starts), ("holds", 0, call_holds, holds),
            ("before", _ROOT, none * 0, before), ("before_delays", NEVER, none, before_delays),
            ("host", _ROOT, self._segment_nodes(blocks), self._segment_nodes(self.launched_by)),
            ("host_delays", NEVER, call_delays, host_delays),
            ("dispatch", 0, self._dispatch(blocks), self._dispatch(self.launched_by)),
        ]  # fmt: skip

    def _segment_nodes(self, calls: Rows) -> Rows:
        """The node of the blocking call before each call; the root without one."""
        segments = np.where(calls == UNKNOWN, UNKNOWN, self._segments(calls))
        return np.where(segments == UNKNOWN, _ROOT, self.node_of_call[segments] if len(self.calls) else _ROOT)

    def _segments(self, calls: Rows) -> Rows:
        return self.calls.segments[calls] if len(self.calls) else np.full(len(calls), UNKNOWN)

    def _since_segment(self, calls: Rows, points: Nanoseconds) -> Nanoseconds:
        """How long after the last blocking call, or the root, the host reached each point."""
        segments = self._segments(calls)
        opened = self.calls.ends[segments] if len(self.calls) else segments
        return points - np.where(segments == UNKNOWN, self.root, opened)

    def _dispatch(self, calls: Rows) -> Nanoseconds:
        """How long modes in Python dispatched operators before each call, since the last blocking call or the root."""
        known = np.where(calls == UNKNOWN, 0, calls)
        until = self.calls.begins[known] if len(self.calls) else known * 0
        since = until - self._since_segment(known, until)
        return np.where(calls == UNKNOWN, 0, self.dispatching.within(np.minimum(since, until), until))

    def _span_dependencies(self) -> tuple[Rows, Nanoseconds, Nanoseconds, Nanoseconds, tuple[Rows, Rows, Rows]]:
        """For the spans: what runs before, its delay, the host's delay, holds, and waits for other streams."""
        spans, streams = self.spans, self.streams
        if self.recorded_waits is None:
            waits = inferred_waits(self.trace, spans, self.threads, streams)
        else:  # collectives on several streams take turns without an event
            turns = near_ends(spans, streams, spans.of_kind(Kind.COMM))
            waits = (np.append(self.recorded_waits[0], turns[0]), np.append(self.recorded_waits[1], turns[1]))
        self.recorded = 0 if self.recorded_waits is None else len(self.recorded_waits[0])
        self.inferred = len(waits[0]) - self.recorded
        before = previous_on_lane(spans)
        # What neither was launched nor follows anything on its lane follows what came before it at all.
        before = np.where((before == UNKNOWN) & (self.launched_by == UNKNOWN), np.arange(len(spans)) - 1, before)
        queued = self._queued(before)
        delays = Delays.of(spans, queued, before, self.launched_by != UNKNOWN, waits)
        known = self.launched_by != UNKNOWN
        since_segment = self._since_segment(self.launched_by, queued)
        first = before == UNKNOWN
        nodes = np.where(first, _ROOT, self.node_of_span[before])
        alone = first & ~known
        before_delays = np.where(alone, spans.starts - self.root, np.where(first, NEVER, delays.before))
        return (
            nodes, before_delays, np.where(known, since_segment + delays.launch, NEVER),
            np.where(alone, 0, delays.holds),
            (self.node_of_span[waits[0]], self.node_of_span[waits[1]], delays.waits),
        )  # fmt: skip

    def _queued(self, before: Rows) -> Nanoseconds:
        """When each span was queued.

        A call that blocks on the span that it launched returns too late to tell. Where such a span followed the one
        before it on its stream closely, it is taken to have been queued as soon as calls usually return.
        """
        spans, calls = self.spans, self.calls
        mine = np.flatnonzero(self.launched_by != UNKNOWN)
        lengths = (calls.ends - calls.begins)[self.launched_by[mine]]
        late = calls.ends[self.launched_by[mine]] >= spans.starts[mine]
        least = int(np.median(lengths[~late])) if (~late).any() else 0
        follows = (before[mine] != UNKNOWN) & (spans.starts[mine] - spans.ends[before[mine]] <= NEAR_NS)
        early = mine[late & follows]
        queued = spans.queued.copy()
        queued[early] = np.minimum(spans.launches[early] + least, spans.starts[early])
        return queued

    def _call_dependencies(self, blocks: Rows) -> tuple[Nanoseconds, Nanoseconds, tuple[Rows, Rows, Rows]]:
        """For the blocking calls: the host's delay, holds, and the spans that they wait for."""
        calls, spans = self.calls, self.spans
        blocked, sources = self.blocked, self.blocked_for
        slack = calls.ends[blocked] - spans.ends[sources]
        latest = calls.begins.copy()
        np.maximum.at(latest, blocked, spans.ends[sources])
        binding = (
            (spans.ends[sources] > calls.begins[blocked]) & (slack >= 0) & (spans.ends[sources] == latest[blocked])
        )
        delays = np.clip(np.minimum(slack, usual(slack[binding], slack[slack >= 0])), 0, None)
        waits = np.zeros(len(calls), np.bool_)
        waits[blocked[binding]] = True
        lengths = calls.ends - calls.begins
        # What a call costs that need not wait: at most what calls that never wait cost.
        most = int(np.median(lengths[~calls.blocks])) if (~calls.blocks).any() else 0
        least = np.full(len(self.trace.names), most)
        np.minimum.at(least, calls.names, lengths)
        own = np.where(waits, least[calls.names], lengths)
        reached = calls.begins + own
        np.maximum.at(reached, blocked, spans.ends[sources] + delays)
        holds = np.clip(calls.ends - reached, 0, None)
        host = self._since_segment(blocks, calls.begins[blocks]) + own[blocks]
        return host, holds[blocks], (self.node_of_call[blocked], self.node_of_span[sources], delays)
