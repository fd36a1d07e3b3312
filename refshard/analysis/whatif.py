"""Replays of a trace's dependency graph: how long a step would take without one cause of lost time, in which order to
remove these causes, and the critical path.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from refshard.analysis.attribution import meanings
from refshard.analysis.figures import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    COPY,
    FAST_HOST,
    HOST,
    KERNEL,
    LAUNCHES,
    NO_MODES,
    NO_SYNC,
    ON_TIME,
    OVERLAPPED,
    ROOFLINE,
    TOLERATED_ERROR,
    UNEXPLAINED,
    CriticalPath,
    OperatorReport,
    PathPart,
    WhatIf,
    WhatIfFigures,
)
from refshard.analysis.graph import NEVER, Graph
from refshard.analysis.names import operator_in_words
from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Nanoseconds, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """What nodes take and what dependencies cost, in nanoseconds; as in :class:`~refshard.analysis.graph.Graph`.

    Where communication is ``overlapped``, nothing waits for as long as it takes; but a step takes that long at least.
    Where the ``host_is_free``, a step does not wait for it.
    """

    durations: Nanoseconds
    holds: Nanoseconds
    before_delays: Nanoseconds
    host_delays: Nanoseconds
    wait_delays: Nanoseconds
    overlapped: bool = False
    host_is_free: bool = False

    @classmethod
    def of(cls, graph: Graph) -> "Times":
        """The trace's own."""
        return cls(
            durations=graph.durations, holds=graph.holds, before_delays=graph.before_delays,
            host_delays=graph.host_delays, wait_delays=graph.wait_delays,
        )  # fmt: skip


def replay(graph: Graph, times: Times) -> Nanoseconds:
    """When each node ends.

    Nodes before the steps looked at end when they did, and no span of these starts before them.
    """
    found: list[int] = graph.ends[: graph.fixed].tolist()
    rest, add, more = slice(graph.fixed, None), found.append, waits_of(graph, times)
    durations = np.where(graph.communicates & times.overlapped, 0, times.durations)
    columns = (
        graph.before, times.before_delays, graph.host, times.host_delays, durations + times.holds,
        np.where(graph.is_span, graph.start + durations, NEVER),
    )  # fmt: skip
    rows = zip(*(column[rest].tolist() for column in columns))
    node = graph.fixed
    # Up to each node that waits for more than its stream and the host, a node is two sums and three comparisons.
    for until in [*sorted(more), len(graph.ends)]:
        for before, delay, host, host_delay, length, least in islice(rows, until - node):
            start, launched = found[before] + delay, found[host] + host_delay
            if launched > start:
                start = launched
            start += length
            add(start if start > least else least)
        node = until
        if until in more:
            before, delay, host, host_delay, length, least = next(rows)
            waits = [found[source] + wait for source, wait in more[until]]
            add(max(max(*waits, found[before] + delay, found[host] + host_delay) + length, least))
            node += 1
    return np.array(found, np.int64)


def waits_of(graph: Graph, times: Times) -> dict[int, list[tuple[int, int]]]:
    """What each node not fixed waits for beyond its stream and the host, with the delay of each."""
    mine = np.flatnonzero((times.wait_delays != NEVER) & (graph.waiting >= graph.fixed))
    found: dict[int, list[tuple[int, int]]] = {}
    for node, source, delay in zip(
        *(one[mine].tolist() for one in (graph.waiting, graph.waited_for, times.wait_delays))
    ):
        found.setdefault(node, []).append((source, delay))
    return found


def last_nodes(graph: Graph) -> Rows:
    """The spans among which the one lies that ends the steps looked at."""
    nodes = np.arange(len(graph.ends))
    return np.flatnonzero((nodes >= graph.fixed) & graph.is_span & (graph.ends <= graph.end))


def step_ns(graph: Graph, times: Times) -> int:
    """The mean length of the steps looked at, in a replay.

    Where the host ran ahead of the device, that lead would be used up after some steps: in the long run a step takes
    what the slower of the two needs for it.
    """
    found, last = replay(graph, times), last_nodes(graph)
    after = graph.end - int(graph.ends[last].max())
    device = int(found[last].max()) + after - graph.start
    host = 0
    if graph.host_last is not None and not times.host_is_free:
        host = graph.host_span_ns + int(found[graph.host_last] - graph.ends[graph.host_last])
    least = 0
    if times.overlapped:  # how long communication takes in the steps, where it overlaps with itself as in the trace
        mine = graph.communicates
        busy = Intervals.union(graph.ends[mine] - times.durations[mine], graph.ends[mine])
        least = int(busy.within(np.array([graph.start]), np.array([graph.end]))[0])
    return max(device, least, min(host, graph.end - graph.start)) // len(graph.windows)


_CLASSES = {Kind.COMM: COMMUNICATION, Kind.PREP: COPY, Kind.COPY: COPY}
_CLASS_OF_KIND = [_CLASSES.get(kind, COMPUTE) for kind in KINDS]
_MOST_OWNERS = 20


def critical_path(graph: Graph) -> CriticalPath:
    """The path that ends with the last of the steps looked at; it is followed back to where they begin."""
    walk = _Walk(graph)
    walk.run()
    steps, by_class = len(graph.windows), defaultdict[str, int](int)
    for (kind, _), ns in walk.found.items():
        by_class[kind] += ns
    parts = [PathPart(kind=kind, ns=round(ns / steps)) for kind, ns in by_class.items() if ns]
    owners = [
        PathPart(kind=kind, ns=round(ns / steps), name=name) for (kind, name), ns in walk.found.items() if ns and name
    ]
    return CriticalPath(
        parts=tuple(sorted(parts, key=lambda part: -part.ns)),
        owners=tuple(sorted(owners, key=lambda part: -part.ns)[:_MOST_OWNERS]),
    )


class _Walk:
    """Follows from each node what it started after, and sums up the time between."""

    def __init__(self, graph: Graph) -> None:
        self.graph, times = graph, Times.of(graph)
        self.at = replay(graph, times)
        self.more = waits_of(graph, times)
        self.found = defaultdict[tuple[str, str], int](int)
        first = np.full(len(graph.calls), UNKNOWN, np.int64)
        nodes = np.flatnonzero(graph.is_span & (graph.launched_by != UNKNOWN))[::-1]
        first[graph.launched_by[nodes]] = graph.rows[nodes]
        self.first_span = first
        self.meanings, self.meaning_of = meanings(graph.spans)

    def run(self) -> None:
        """From the end of the steps back to their start."""
        graph, last = self.graph, last_nodes(self.graph)
        node = int(last[np.argmax(self.at[last])])
        self._add(UNEXPLAINED, "", int(self.at[node]), graph.end)
        while node >= graph.fixed:
            node = self._step_back(node)
        span = int(graph.rows[node])
        if span != UNKNOWN:
            self._add(*self._work(span), int(self.at[node] - graph.durations[node]), int(self.at[node]))
            return
        self._add(UNEXPLAINED, "", graph.start, int(self.at[node]))

    def _step_back(self, node: int) -> int:
        """Count what a node took and waited; the node that it waited for last."""
        graph, span = self.graph, int(self.graph.rows[node])
        end = int(self.at[node])
        start = end - int(graph.durations[node])
        ready = start - int(graph.holds[node])
        if span != UNKNOWN:
            self._add(*self._work(span), start, end)
            self._add(UNEXPLAINED, "", ready, start)
        else:
            self._add(HOST, self._call_name(int(graph.call_of[node])), ready, end)
        between = [(source, delay, False) for source, delay in self.more.get(node, ())]
        between.append((int(graph.before[node]), int(graph.before_delays[node]), False))
        between.append((int(graph.host[node]), int(graph.host_delays[node]), True))
        source, delay, by_host = max(
            (one for one in between if one[1] != NEVER), key=lambda one: int(self.at[one[0]]) + one[1]
        )
        reached = int(self.at[source]) + delay
        self._add(UNEXPLAINED, "", reached, ready)
        ready = reached
        if by_host:
            self._add_host(int(graph.launched_by[node]), source, ready)
        elif span == UNKNOWN:
            self._add(HOST, self._call_name(int(graph.call_of[node])), ready - delay, ready)
        else:
            self._add(BETWEEN, "", ready - delay, ready)
        return source

    def _add_host(self, call: int, opened: int, until: int) -> None:
        """Count the host's calls and the time between them, from a call back to what opened its segment."""
        graph, calls = self.graph, self.graph.calls
        shift = int(self.at[opened] - graph.ends[opened])
        segment = calls.segments[call]
        while call != UNKNOWN and calls.segments[call] == segment:
            begin = int(calls.begins[call]) + shift
            self._add(HOST, self._call_name(call), begin, until)
            parent = int(calls.parents[call])
            opens = parent in (UNKNOWN, segment)
            since = int(self.at[opened]) if opens else int(calls.ends[parent] if calls.after[call] else begin - shift)
            since = since if opens else since + shift
            self._add(HOST, f"before {self._operator(call)}", since, begin)
            until, call = since, UNKNOWN if opens else parent
        self._add(UNEXPLAINED, "", int(self.at[opened]), until)

    def _work(self, span: int) -> tuple[str, str]:
        spans = self.graph.spans
        return _CLASS_OF_KIND[spans.kinds[span]], self.meanings[self.meaning_of[span]]

    def _call_name(self, call: int) -> str:
        return str(self.graph.call_names[self.graph.calls.names[call]])

    def _operator(self, call: int) -> str:
        """The operator that a call launched for, or the call itself."""
        spans, span = self.graph.spans, int(self.first_span[call])
        return self._call_name(call) if span == UNKNOWN else str(spans.name_table[spans.operators[span]])

    def _add(self, kind: str, name: str, start: int, end: int) -> None:
        """Count a piece as far as it lies in the steps. One that overlaps the next counts less than nothing."""
        start, end = max(start, self.graph.start), max(end, self.graph.start)
        if end != start:
            self.found[kind, name] += end - start


_Change = Callable[[Times], Times]


def what_ifs(
    graph: Graph, waited: Sequence[tuple[int, int]] = (), report: OperatorReport | None = None
) -> WhatIfFigures:
    """Replay a graph with each change, and with the best of them one after the other.

    ``waited`` are the start of collectives and how long this rank stood in each for others, in nanoseconds. ``report``
    tells how close the kernels come to their rooflines.
    """
    base, times = (graph.end - graph.start) // len(graph.windows), Times.of(graph)
    free = replace(times, holds=np.where(graph.is_span, 0, times.holds))
    error = abs(step_ns(graph, replace(free, host_is_free=True)) - base) / base
    changes, details = _changes(graph, waited, report)
    alone = ranked = _ranked(graph, times, changes, base, details)
    order = list[WhatIf]()
    # The best change, then the best of the others after it, and so on.
    while error <= TOLERATED_ERROR and ranked and ranked[0].gain_ns > 0:
        best = ranked[0]
        order.append(best)
        times = changes.pop(best.what)(times)
        ranked = _ranked(graph, times, changes, best.step_ns, details)
    return WhatIfFigures(
        steps=len(graph.windows), step_ns=base, replay_error=error, waits_recorded=graph.recorded,
        waits_inferred=graph.inferred, only_launches=graph.only_launches, what_ifs=alone,
        order=tuple(order),
        path=critical_path(graph),
    )  # fmt: skip


def _ranked(
    graph: Graph, times: Times, changes: dict[str, _Change], now: int, details: dict[str, str]
) -> tuple[WhatIf, ...]:
    """Each change to ``times``, the largest gain first; a step takes ``now``."""
    found = []
    for what, change in changes.items():
        step = min(now, step_ns(graph, change(times)))
        found.append(WhatIf(what=what, step_ns=step, gain_ns=now - step, detail=details.get(what)))
    return tuple(sorted(found, key=lambda one: -one.gain_ns))


def _changes(
    graph: Graph, waited: Sequence[tuple[int, int]], report: OperatorReport | None
) -> tuple[dict[str, _Change], dict[str, str]]:
    """What may be changed in this trace, and details by name."""
    spans, details = graph.spans, dict[str, str]()

    def launches_free(times: Times) -> Times:
        """The host takes no time, but still waits for the device where it did."""
        delays = np.where(times.host_delays == NEVER, NEVER, 0)
        holds = np.where(graph.is_span, times.holds, 0)
        return replace(times, host_delays=delays, holds=holds, host_is_free=True)

    def host_fast(times: Times) -> Times:
        """The host takes half its time between waits; with it half as many launches, or a compiled model."""
        delays = np.where(times.host_delays == NEVER, NEVER, times.host_delays // 2)
        holds = np.where(graph.is_span, times.holds, times.holds // 2)
        return replace(times, host_delays=delays, holds=holds, host_is_free=True)

    def modes_free(times: Times) -> Times:
        """No mode in Python dispatches operators."""
        delays = np.where(times.host_delays == NEVER, NEVER, np.clip(times.host_delays - graph.dispatch, 0, None))
        return replace(times, host_delays=delays, host_is_free=True)

    changes: dict[str, _Change] = {LAUNCHES: launches_free, FAST_HOST: host_fast}
    if graph.dispatch.any():
        changes[NO_MODES] = modes_free
    if graph.communicates.any():
        changes[OVERLAPPED] = lambda times: replace(times, overlapped=True)
    waits = np.zeros(len(graph.ends), np.int64)  # how long each node stood for other ranks
    starts = (graph.ends - graph.durations).tolist()
    by_start = {starts[node]: node for node in np.flatnonzero(graph.communicates).tolist()}
    for start, ns in waited:
        if start in by_start:
            waits[by_start[start]] = max(int(waits[by_start[start]]), ns)
    if waits.any():
        changes[ON_TIME] = lambda times: replace(times, durations=np.clip(times.durations - waits, 0, None))
    synchronises = (graph.rows[graph.waiting] == UNKNOWN) & ~graph.full_queue
    if synchronises.any():
        changes[NO_SYNC] = lambda times: replace(times, wait_delays=np.where(synchronises, NEVER, times.wait_delays))
    inside = spans.of_kind(Kind.COMPUTE) & (spans.starts >= graph.start) & (spans.starts < graph.end)
    if inside.any():  # the work that takes longest
        names, codes = meanings(spans)
        most = int(np.argmax(np.bincount(codes[inside], weights=(spans.ends - spans.starts)[inside])))
        mine = graph.is_span & (codes == most)[graph.rows]
        alike = [one for one in report.operators if operator_in_words(one) == names[most]] if report is not None else []
        reached = max((one.of_roofline or 0.0 for one in alike), default=0.0)
        what, left = (ROOFLINE, min(1.0, reached)) if reached > 1 / 2 else (KERNEL, 1 / 2)
        details[what] = names[most]
        changes[what] = lambda times: replace(
            times, durations=np.where(mine, (left * times.durations).astype(np.int64), times.durations)
        )
    return changes, details
