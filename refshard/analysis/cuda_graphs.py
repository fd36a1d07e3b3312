"""CUDA and HIP graphs in a trace: what was captured, which does not run, and what replays of it ran.

Between the calls that begin and end a stream's capture, a launch adds a node to a graph. The replay of a graph is one
launch, and its kernels bear that launch's correlation id.
"""

import re

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import Capture, GraphFigures, Replays
from refshard.analysis.owners import named
from refshard.analysis.spans import device_order
from refshard.events.table import LAUNCH, TraceFile
from refshard.events.timeline import Intervals, Spans, Timeline

LAUNCHES_KERNEL = re.compile(r"LaunchKernel|GraphLaunch|LaunchCooperativeKernel|KernelLaunch")
"""Calls of CUDA, HIP and SYCL that start a kernel, or a graph of them."""
_REPLAYS = re.compile(r"GraphLaunch")
_BEGINS, _ENDS = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")


class _Captures(msgspec.Struct):
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    threads: npt.NDArray[np.int32]


def calls(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.int64]:
    """Rows of :attr:`TraceFile.host` of the runtime's and driver's calls whose names hold the pattern."""
    return np.flatnonzero((trace.host.categories == LAUNCH) & named(trace, pattern))


def captured(trace: TraceFile) -> npt.NDArray[np.int64]:
    """Rows of :attr:`TraceFile.host` of the kernel launches that were captured and did not run, in the file's order.

    They have no device event, and lie in a capture of their own thread; or, as autograd's do, in one of another thread
    while their own launched nothing that ran.
    """
    rows, of_thread = calls(trace, LAUNCHES_KERNEL), _captures(trace)
    if not len(of_thread.starts) or not len(rows):
        return np.empty(0, np.int64)
    host = trace.host
    ran = np.isin(host.correlations[rows], trace.device.correlations)
    threads, points = host.threads[rows], host.starts[rows]
    own = np.zeros(len(rows), np.bool_)
    for thread in np.unique(of_thread.threads):
        mine, here = of_thread.threads == thread, threads == thread
        own |= here & (Intervals.union(of_thread.starts[mine], of_thread.ends[mine]).within(points, points + 1) > 0)
    meanwhile = Intervals.union(of_thread.starts, of_thread.ends).within(points, points + 1) > 0
    runs_too = np.unique(threads[meanwhile & ran])
    return np.asarray(rows[~ran & (own | (meanwhile & ~np.isin(threads, runs_too)))], np.int64)


def find_graphs(trace: TraceFile, timeline: Timeline) -> GraphFigures | None:
    """Captures and replays; None where the trace has neither."""
    found = _captures(trace)
    order = np.argsort(found.starts, kind="stable")
    counts = np.bincount(_capture_at(trace, captured(trace), found), minlength=len(order))[order]
    captures = tuple(
        Capture(start_ns=start, end_ns=end, launches=count)
        for start, end, count in zip(found.starts[order].tolist(), found.ends[order].tolist(), counts.tolist())
    )
    replays = _replays(trace, timeline.spans, captures) if timeline.on_device else ()
    return GraphFigures(captures=captures, replays=replays) if captures or replays else None


def _capture_at(trace: TraceFile, rows: npt.NDArray[np.int64], found: _Captures) -> npt.NDArray[np.int64]:
    """The capture of each captured launch: the last begun on its own thread, or else on any."""
    threads, points = trace.host.threads[rows], trace.host.starts[rows]
    owners = np.zeros(len(rows), np.int64)
    for thread in np.unique(threads):
        here, mine = np.flatnonzero(threads == thread), np.flatnonzero(found.threads == thread)
        mine = mine if len(mine) else np.arange(len(found.starts))
        mine = mine[np.argsort(found.starts[mine], kind="stable")]
        owners[here] = mine[np.maximum(0, np.searchsorted(found.starts[mine], points[here], side="right") - 1)]
    return owners


def _replays(trace: TraceFile, spans: Spans, captures: tuple[Capture, ...]) -> tuple[Replays, ...]:
    """The launches of graphs of which the trace has device events, which bear the launch's correlation id."""
    host, replays = trace.host, calls(trace, _REPLAYS)
    replays = replays[host.correlations[replays] > 0]
    if not len(replays):
        return ()
    starts_of = dict(zip(host.correlations[replays].tolist(), host.starts[replays].tolist()))
    correlations = trace.device.correlations[device_order(trace)]
    rows = np.flatnonzero(np.isin(correlations, list(starts_of)))
    launched, of, counts = np.unique(correlations[rows], return_inverse=True, return_counts=True)
    found = []
    for events in np.unique(counts).tolist():
        mine, of_them = rows[counts[of] == events], launched[counts == events].tolist()
        first = min(starts_of[one] for one in of_them)
        before = [place for place, one in enumerate(captures) if one.end_ns <= first]
        alike = before if len(before) == 1 else [place for place in before if captures[place].launches == events]
        found.append(
            Replays(
                count=len(of_them),
                events=events,
                busy_ns=Intervals.union(spans.starts[mine], spans.ends[mine]).length,
                capture=alike[0] if len(alike) == 1 else None,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.busy_ns))


def _captures(trace: TraceFile) -> _Captures:
    """From the end of the call that begins a capture to the start of the one that ends it, on one thread.

    One that began before the trace did starts with it, and one that ended later ends with it.
    """
    host = trace.host
    if not len(host.starts):
        return _Captures(starts=host.starts, ends=host.ends, threads=host.threads)
    ever = int(host.starts.min()), int(host.ends.max())
    begins, ends = calls(trace, _BEGINS), calls(trace, _ENDS)
    rows = np.concatenate((begins, ends))
    is_begin = np.arange(len(rows)) < len(begins)
    order = np.lexsort((host.starts[rows], host.threads[rows]))
    found: list[tuple[int, int, int]] = []
    open_: dict[int, list[int]] = {}
    for row, begun in zip(rows[order].tolist(), is_begin[order].tolist()):
        thread = int(host.threads[row])
        waiting = open_.setdefault(thread, [])
        if begun:
            waiting.append(int(host.ends[row]))
        else:
            found.append((waiting.pop() if waiting else ever[0], int(host.starts[row]), thread))
    found += [(start, ever[1], thread) for thread, starts in open_.items() for start in starts]
    table = np.array([(start, max(start, end), thread) for start, end, thread in found], np.int64).reshape(-1, 3)
    return _Captures(starts=table[:, 0], ends=table[:, 1], threads=table[:, 2].astype(np.int32))
