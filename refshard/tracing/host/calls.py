"""The host's calls to the device's runtime: which block their thread, and which tell a stream to wait."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from refshard.events.table import LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, HostCalls, Spans
from refshard.tracing.device import Launches, device_order
from refshard.tracing.host.runtime import LONG_NS, STREAM_WAITS, blocks
from refshard.tracing.host.stream_waits import recorded_waits


def find_calls(trace: TraceFile, launches: Launches, spans: Spans) -> HostCalls:
    """What the calls of a trace tell of waits, for its device events in the order of the spans."""
    host = trace.host
    calls = host.categories == LAUNCH
    long = host.ends - host.starts >= LONG_NS
    rows = np.flatnonzero(calls & (long | _named(trace, blocks)[host.names]))
    rows = rows[np.argsort(host.starts[rows], kind="stable")]
    waiting, sources = recorded_waits(trace, spans)
    return HostCalls(
        threads=launches.threads,
        awaits=_awaits(trace, launches, np.flatnonzero(calls & _named(trace, STREAM_WAITS.match)[host.names])),
        starts=host.starts[rows],
        ends=host.ends[rows],
        callers=host.threads[rows],
        names=host.names[rows],
        waiting=waiting,
        sources=sources,
    )


def _named(trace: TraceFile, test: Callable[[str], object]) -> npt.NDArray[np.bool_]:
    """Which names of the trace's table pass a test."""
    return np.array([bool(test(name)) for name in trace.names] or [False])


def _awaits(trace: TraceFile, launches: Launches, waits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Before which spans a wait was called, on the span's thread, since the last launch on the span's stream."""
    found = np.zeros(len(launches.points), np.bool_)
    lanes = trace.device.lanes[device_order(trace)]
    known = np.flatnonzero(launches.points != UNKNOWN)
    order = known[np.lexsort((launches.points[known], lanes[known]))]
    before = np.full(len(order), np.iinfo(np.int64).min)
    same = lanes[order][1:] == lanes[order][:-1]
    before[1:][same] = launches.points[order][:-1][same]
    for thread in np.unique(trace.host.threads[waits]):
        times = np.sort(trace.host.starts[waits[trace.host.threads[waits] == thread]])
        rows = np.flatnonzero(launches.threads[order] == thread)
        until = np.searchsorted(times, launches.points[order[rows]], side="left")
        found[order[rows]] = until > np.searchsorted(times, before[rows], side="left")
    return found
