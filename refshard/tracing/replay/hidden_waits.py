"""Waits of the host that the profiler did not record: those of torch's allocator before it frees what it has cached.

It first waits for events of the streams that used the memory. Traces of 2023 hold the cudaFree alone, which would leave
a second of waiting for another rank as a second that the host computes.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from refshard.events.table import LAUNCH, TraceFile
from refshard.events.timeline import Nanoseconds
from refshard.tracing.host.runtime import FREES
from refshard.tracing.replay.hostcalls import CallOrder

NEAR_NS = 100_000
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
    waited = (last <= begins) & (begins - last <= NEAR_NS) & (2 * (last - since) > begins - since)
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
