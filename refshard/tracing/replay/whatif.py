"""What if: how long a step would take with one cause of lost time gone, and in which order removing them pays.

Each answer is a replay of the trace's own dependency graph with other times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from refshard.events.timeline import UNKNOWN, Kind, Nanoseconds
from refshard.tracing.replay.criticalpath import critical_path
from refshard.tracing.replay.delays import NEVER
from refshard.tracing.replay.graph import Graph
from refshard.tracing.replay.replaying import Times, step_ns
from refshard.tracing.replay.whatif_figures import (
    KERNEL,
    LAUNCHES,
    NO_SYNC,
    ON_TIME,
    OVERLAPPED,
    TOLERATED_ERROR,
    WhatIf,
    WhatIfFigures,
)

_Change = Callable[[Times], Times]


def what_ifs(graph: Graph, waited: Sequence[tuple[int, int]] = ()) -> WhatIfFigures:
    """Replay a graph with each change, and with the best of them one after the other.

    ``waited`` are the start of collectives and how long this rank stood in each for others, in nanoseconds.
    """
    base, times = (graph.end - graph.start) // len(graph.windows), Times.of(graph)
    free = replace(times, holds=np.where(graph.is_span, 0, times.holds))
    error = abs(step_ns(graph, replace(free, host_is_free=True)) - base) / base
    changes, details = _changes(graph, waited)
    alone = _ranked(graph, times, changes, base, details)
    return WhatIfFigures(
        steps=len(graph.windows),
        step_ns=base,
        replay_error=error,
        waits_recorded=graph.recorded,
        waits_inferred=graph.inferred,
        only_launches=graph.only_launches,
        what_ifs=alone,
        order=_order(graph, times, changes, alone, details) if error <= TOLERATED_ERROR else (),
        path=critical_path(graph),
    )


def _ranked(
    graph: Graph, times: Times, changes: dict[str, _Change], now: int, details: dict[str, str]
) -> tuple[WhatIf, ...]:
    """Each change to ``times``, of which a step takes ``now``, the largest gain first."""
    found = []
    for what, change in changes.items():
        step = min(now, step_ns(graph, change(times)))
        found.append(WhatIf(what=what, step_ns=step, gain_ns=now - step, detail=details.get(what)))
    return tuple(sorted(found, key=lambda one: -one.gain_ns))


def _order(
    graph: Graph, times: Times, changes: dict[str, _Change], alone: tuple[WhatIf, ...], details: dict[str, str]
) -> tuple[WhatIf, ...]:
    """The best change, then the best of the others after it, and so on. ``alone`` are all of them, by gain."""
    found, left, ranked = list[WhatIf](), dict(changes), alone
    while ranked and ranked[0].gain_ns > 0:
        best = ranked[0]
        found.append(best)
        times = left.pop(best.what)(times)
        ranked = _ranked(graph, times, left, best.step_ns, details)
    return tuple(found)


def _changes(graph: Graph, waited: Sequence[tuple[int, int]]) -> tuple[dict[str, _Change], dict[str, str]]:
    """What may be changed in this trace, and details by name."""
    changes: dict[str, _Change] = {LAUNCHES: lambda times: _launches_free(graph, times)}
    details: dict[str, str] = {}
    if graph.communicates.any():
        changes[OVERLAPPED] = lambda times: replace(times, overlapped=True)
    waits = _waited(graph, waited)
    if waits.any():
        changes[ON_TIME] = lambda times: replace(times, durations=np.clip(times.durations - waits, 0, None))
    synchronises = (graph.rows[graph.waiting] == UNKNOWN) & ~graph.full_queue
    if synchronises.any():
        changes[NO_SYNC] = lambda times: replace(times, wait_delays=np.where(synchronises, NEVER, times.wait_delays))
    name = _largest_kernel(graph)
    if name is not None:
        mine = graph.is_span & (graph.spans.names == name)[graph.rows]
        changes[KERNEL] = lambda times: replace(times, durations=np.where(mine, times.durations // 2, times.durations))
        details[KERNEL] = graph.spans.name_table[name]
    return changes, details


def _launches_free(graph: Graph, times: Times) -> Times:
    """The host takes no time, but still waits for the device where it did."""
    return replace(
        times,
        host_delays=np.where(times.host_delays == NEVER, NEVER, 0),
        holds=np.where(graph.is_span, times.holds, 0),
        host_is_free=True,
    )


def _waited(graph: Graph, waited: Sequence[tuple[int, int]]) -> Nanoseconds:
    """For each node how long it stood for other ranks."""
    found = np.zeros(len(graph.ends), np.int64)
    starts = graph.ends - graph.durations
    by_start = {int(starts[node]): node for node in np.flatnonzero(graph.communicates).tolist()}
    for start, ns in waited:
        if start in by_start:
            found[by_start[start]] = max(int(found[by_start[start]]), ns)
    return found


def _largest_kernel(graph: Graph) -> int | None:
    """The name of the compute kernels that take most time."""
    spans = graph.spans
    inside = spans.of_kind(Kind.COMPUTE) & (spans.starts >= graph.start) & (spans.starts < graph.end)
    if not inside.any():
        return None
    return int(np.argmax(np.bincount(spans.names[inside], weights=(spans.ends - spans.starts)[inside])))
