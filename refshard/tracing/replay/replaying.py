"""Replays of a trace's dependency graph: when each node ends, if some of its times were others."""

from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import Intervals, Nanoseconds
from refshard.tracing.replay.delays import NEVER
from refshard.tracing.replay.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """What nodes take and what dependencies cost, in nanoseconds; as in :class:`~refshard.tracing.replay.graph.Graph`.

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


def last_nodes(graph: Graph) -> npt.NDArray[np.int64]:
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
    least = _communication_ns(graph, times) if times.overlapped else 0
    return max(device, least, min(host, graph.end - graph.start)) // len(graph.windows)


def _communication_ns(graph: Graph, times: Times) -> int:
    """How long communication takes in the steps looked at, where it overlaps with itself as in the trace."""
    mine = graph.communicates
    busy = Intervals.union(graph.ends[mine] - times.durations[mine], graph.ends[mine])
    return int(busy.within(np.array([graph.start]), np.array([graph.end]))[0])
