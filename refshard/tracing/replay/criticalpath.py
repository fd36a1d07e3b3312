"""The critical path of a trace: the chain of work and waits without a gap that makes the steps as long as they are."""

from collections import defaultdict

import numpy as np

from refshard.events.timeline import KINDS, UNKNOWN, Kind
from refshard.tracing.replay.delays import NEVER
from refshard.tracing.replay.graph import Graph
from refshard.tracing.replay.replaying import Times, last_nodes, replay, waits_of
from refshard.tracing.replay.whatif_figures import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    COPY,
    HOST,
    UNEXPLAINED,
    CriticalPath,
    PathPart,
)

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
        return _CLASS_OF_KIND[spans.kinds[span]], spans.name_table[spans.names[span]]

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
