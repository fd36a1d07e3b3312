"""The dependency graph of one rank's trace: what must have ended before a kernel starts or a call of the host returns.

Nodes are the device's spans and the host's calls that block on it. A span follows the one before it on its stream, the
host's call that launched it, and spans of other streams that it waits for; a blocking call follows the host's calls
before it and the spans that it waits for. Each dependency costs what such a dependency usually costs in the trace: the
median distance of two kernels on a stream, the median latency of a launch into an empty queue. Where a node was later
than all of them, the last one cost more this time, within limits (``delays.py``); for what is left the
graph has no explanation, and it stays as a hold.
"""

import re
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.dependencies import (
    NEAR_NS,
    NEVER,
    ORDINARY,
    CallOrder,
    Delays,
    blocked_for,
    blocking_rows,
    host_calls,
    inferred_waits,
    near_ends,
    previous_on_lane,
    usual,
    with_hidden_waits,
)
from refshard.analysis.kineto import Pairs, Streams
from refshard.analysis.spans import find_launches
from refshard.events.table import LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Kind, Nanoseconds, Spans, Timeline, Window

Rows = npt.NDArray[np.int64]

MOST_SPANS = 100_000
"""A trace with more is represented by the step of median length."""
TOO_MANY_SPANS = 400_000
"""A step with more is not replayed."""
FULL_QUEUE = 1000
"""CUDA lets so many launches wait for the device (1,022 on recent drivers); the next call blocks."""
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
    that the trace holds no other calls, so that waits of the host may be missing.
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
    waiting: Rows
    waited_for: Rows
    wait_delays: Nanoseconds
    full_queue: npt.NDArray[np.bool_]
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
    def is_span(self) -> npt.NDArray[np.bool_]:
        """Which nodes are spans of the device."""
        return np.asarray(self.rows != UNKNOWN, np.bool_)

    @property
    def communicates(self) -> npt.NDArray[np.bool_]:
        """Which nodes are spans of communication."""
        return self.is_span & self.spans.of_kind(Kind.COMM)[self.rows]


def graph_of(trace: TraceFile, timeline: Timeline, *, most_spans: int = MOST_SPANS) -> Graph | None:
    """The graph of a trace's steps, or of the step of median length where they hold over ``most_spans``.

    None of a CPU's trace, where a step has over :data:`TOO_MANY_SPANS`, and where no span ends in it.
    """
    if not timeline.on_device:
        return None
    windows, first, last = _chosen(timeline, most_spans)
    if not first < last <= first + TOO_MANY_SPANS or windows[0].start >= windows[-1].end:
        return None
    found = find_launches(trace)
    chosen = slice(first, last)
    spans, callers = _part(timeline.spans, chosen), found.calls[chosen]
    waits = _recorded(timeline, chosen)
    graph = _Builder(trace, timeline, windows, spans, callers, found.threads[chosen], waits).build()
    ended = graph.is_span & (graph.ends <= graph.end) & (np.arange(len(graph.ends)) >= graph.fixed)
    return graph if ended.any() else None


def _chosen(timeline: Timeline, most_spans: int) -> tuple[tuple[Window, ...], int, int]:
    """The steps to look at and the rows of the spans needed: of a step alone, also those of as long a time before.

    Windows between which time passes, which a user chose, cannot be replayed together.
    """
    windows, starts = timeline.windows, timeline.spans.starts
    follow = all(one.end == other.start for one, other in pairwise(windows))
    if len(starts) <= most_spans and follow:
        return windows, 0, int(np.searchsorted(starts, windows[-1].end, "left"))
    middle = sorted(windows, key=lambda window: window.end - window.start)[len(windows) // 2]
    bounds = (2 * middle.start - middle.end, middle.end)
    first, last = np.searchsorted(starts, bounds, "left").tolist()
    return (middle,), first, last


def _part(spans: Spans, rows: slice) -> Spans:
    """Copies of some rows, so that the others need not stay in memory."""
    columns: dict[str, Any] = {one.name: getattr(spans, one.name) for one in fields(spans)}
    parts: dict[str, Any] = {name: one[rows].copy() for name, one in columns.items() if isinstance(one, np.ndarray)}
    return replace(spans, **parts)


def _recorded(timeline: Timeline, rows: slice) -> Pairs | None:
    """Recorded waits of some spans for others of them; None where the trace records none at all."""
    calls = timeline.calls
    if calls is None or not len(calls.waiting):
        return None
    inside = (np.minimum(calls.waiting, calls.sources) >= rows.start) & (
        np.maximum(calls.waiting, calls.sources) < rows.stop
    )
    return calls.waiting[inside] - rows.start, calls.sources[inside] - rows.start


class _Builder:
    """Builds the graph of some spans. ``callers`` are the host's rows that launched them, on ``threads``."""

    def __init__(
        self, trace: TraceFile, timeline: Timeline, windows: tuple[Window, ...], spans: Spans, callers: Rows,
        threads: npt.NDArray[np.int32], recorded_waits: Pairs | None,
    ) -> None:  # fmt: skip
        self.trace, self.windows, self.spans, self.threads = trace, windows, spans, threads
        self.recorded_waits = recorded_waits
        self.host_windows = {window.step: window for window in timeline.host_windows}
        self.streams = Streams.of(spans)
        known = callers[callers != UNKNOWN]
        self.only_launches = len(known) > 0 and self._has_only_launches(known)
        self.since = int(trace.host.starts[known].min()) if len(known) else 0
        named = blocking_rows(trace, self.since, windows[-1].end) if len(known) else known
        own = self._blocked_on_their_own(callers)
        full = self._blocked_by_full_queue(np.unique(known))
        ordered = host_calls(trace.host, np.union1d(known, named), np.union1d(named, np.union1d(own, full)))
        self.calls = with_hidden_waits(ordered, trace, spans.ends)
        place = {row: i for i, row in enumerate(self.calls.rows.tolist())}
        self.launched_by = np.array([place.get(row, UNKNOWN) for row in callers.tolist()], np.int64)
        by_name = np.array([place[row] for row in np.setdiff1d(named, own).tolist()], np.int64)
        waits = blocked_for(trace, self.calls, self.streams, by_name, self._last_lanes())
        own_spans = np.flatnonzero(np.isin(callers, own))
        self.full_calls = np.array(
            [place[row] for row in np.setdiff1d(full, np.union1d(own, named)).tolist()], np.int64
        )
        self.blocked = np.concatenate((waits[0], self.launched_by[own_spans], self.full_calls))
        order = np.argsort(spans.ends, kind="stable")
        ended = np.searchsorted(spans.ends[order], self.calls.ends[self.full_calls], "right")
        self.blocked_for = np.concatenate((waits[1], own_spans, order[np.maximum(0, ended - 1)]))

    def _has_only_launches(self, known: Rows) -> bool:
        """Whether the host made no calls but those that launched, from the first of these to the last."""
        host, starts = self.trace.host, self.trace.host.starts[known]
        inside = (host.starts >= starts.min()) & (host.starts <= starts.max()) & (host.categories == LAUNCH)
        return int(inside.sum()) <= len(np.unique(known))

    def _blocked_on_their_own(self, callers: Rows) -> Rows:
        """Calls during which the span that they launched ran: copies to pageable memory, ``CUDA_LAUNCH_BLOCKING``."""
        host, spans = self.trace.host, self.spans
        mine = np.flatnonzero(callers != UNKNOWN)
        rows = callers[mine]
        inside = (host.categories[rows] == LAUNCH) & (spans.ends[mine] <= host.ends[rows])
        copies = np.array([bool(_COPIES.match(name)) for name in spans.name_table] or [False])
        lengths = spans.ends[mine] - spans.starts[mine]
        inside &= copies[spans.names[mine]] | (2 * lengths > host.ends[rows] - host.starts[rows])
        return np.unique(rows[inside])

    def _blocked_by_full_queue(self, rows: Rows) -> Rows:
        """Launches that took long while as many waited for the device as it takes."""
        host = self.trace.host
        rows = rows[host.categories[rows] == LAUNCH]
        lengths = host.ends[rows] - host.starts[rows]
        launched = np.searchsorted(np.sort(self.spans.launches), host.starts[rows], "left")
        pending = launched - np.searchsorted(self.spans.starts, host.starts[rows], "right")
        long = lengths > ORDINARY * np.median(lengths) if len(rows) else lengths > 0
        return rows[long & (pending >= FULL_QUEUE)]

    def _last_lanes(self) -> Rows:
        """The lane on which the thread of each call had launched last."""
        lanes = np.zeros(len(self.calls), np.int64)
        for thread in np.unique(self.calls.threads).tolist():
            rows = np.flatnonzero(self.threads == thread)
            rows = rows[np.argsort(self.spans.launches[rows], kind="stable")]
            mine = np.flatnonzero(self.calls.threads == thread)
            place = np.searchsorted(self.spans.launches[rows], self.calls.begins[mine], "left") - 1
            lanes[mine] = self.spans.lanes[rows[np.maximum(place, 0)]] if len(rows) else 0
        return lanes

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
        self._drop_later_host(columns)
        waiting, waited_for, delays = self._all_waits
        full = np.isin(waiting, self.node_of_call[self.full_calls])
        # A dependency on what comes later contradicts the trace's own times.
        fits = waited_for < waiting
        host_span_ns, host_last = self._host_bounds()
        return Graph(
            windows=self.windows, host_span_ns=host_span_ns, host_last=host_last, spans=spans, calls=calls,
            call_names=self.trace.names, waiting=waiting[fits], waited_for=waited_for[fits], wait_delays=delays[fits],
            full_queue=full[fits], fixed=1 + int(np.searchsorted(keys[order], self.windows[0].start, "left")),
            recorded=self.recorded, inferred=self.inferred, only_launches=self.only_launches, **columns,
        )  # fmt: skip

    def _drop_later_host(self, columns: dict[str, npt.NDArray[np.int64]]) -> None:
        """Where clocks disagree, so that a span began before the host had reached its launch, it follows no call."""
        later = columns["host"] >= np.arange(len(columns["host"]))
        later[_ROOT] = False
        columns["host"][later], columns["host_delays"][later] = _ROOT, NEVER
        alone = later & (columns["before_delays"] == NEVER)
        starts = columns["ends"] - columns["durations"] - columns["holds"]
        columns["before"][alone], columns["before_delays"][alone] = _ROOT, (starts - self.root)[alone]

    def _columns(self, blocks: Rows) -> list[tuple[str, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Of each column of the graph its value at the root, of the blocking calls and of the spans."""
        spans, calls = self.spans, self.calls
        none = np.full(len(blocks), NEVER)
        before, before_delays, host_delays, holds, of_spans = self._span_dependencies()
        call_delays, call_holds, of_calls = self._call_dependencies(blocks)
        self._all_waits = tuple(np.concatenate(pair) for pair in zip(of_spans, of_calls))
        return [
            ("rows", UNKNOWN, np.full(len(blocks), UNKNOWN), np.arange(len(spans))),
            ("call_of", UNKNOWN, blocks, np.full(len(spans), UNKNOWN)),
            ("launched_by", UNKNOWN, blocks, self.launched_by),
            ("ends", self.root, calls.ends[blocks], spans.ends),
            ("durations", 0, none * 0, spans.ends - spans.starts),
            ("holds", 0, call_holds, holds),
            ("before", _ROOT, none * 0, before),
            ("before_delays", NEVER, none, before_delays),
            ("host", _ROOT, self._segment_nodes(blocks), self._segment_nodes(self.launched_by)),
            ("host_delays", NEVER, call_delays, host_delays),
        ]

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

    def _span_dependencies(self) -> tuple[Rows, Nanoseconds, Nanoseconds, Nanoseconds, tuple[Rows, Rows, Rows]]:
        """Of the spans: what runs before, its delay, the host's delay, holds, and waits for other streams."""
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
        """Of the blocking calls: the host's delay, holds, and the spans that they wait for."""
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

    def _host_bounds(self) -> tuple[int, int | None]:
        """How long the host took for these steps, and the last node that it had passed."""
        windows = [self.host_windows[one.step] for one in self.windows if one.step in self.host_windows]
        inside = np.flatnonzero(
            (self.calls.begins >= windows[0].start) & (self.calls.begins < windows[-1].end) if windows else []
        )
        if not len(inside):
            return 0, None
        last = int(inside[-1])
        node = int(self._segment_nodes(np.array([last]))[0])
        return int(self.calls.begins[last] - self.calls.begins[inside[0]]), node
