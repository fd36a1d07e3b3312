"""What a trace leaves untold so that no verdict on losses can be given: a device without events, a graph's capture."""

import re

from refshard.events.table import TraceFile
from refshard.events.timeline import Intervals, Timeline
from refshard.quantities import format_ns, format_percent
from refshard.tracing.graph_figures import GraphFigures
from refshard.tracing.graphs import LAUNCHES_KERNEL, calls, captured

_USES_DEVICE = re.compile(
    rf"{LAUNCHES_KERNEL.pattern}|Mem(?:cpy|set)\w*Async|runFunction|enqueueCommand"  # the last two are MTIA's
)
_NCCL = "nccl:"
_MOSTLY = 0.5
"""A capture that is longer than this part of the trace leaves little else to judge."""


def missing_device(trace: TraceFile) -> str | None:
    """Why a trace of a program that used a device tells nothing of it, and how to record that; None for others."""
    if len(trace.device.starts):
        return None
    if unread := trace.skipped.get("unread_device_events"):
        return (
            f"The device's share is unknown: {unread:,} events of an MTIA device are not read, because their meaning "
            "is not documented. Record with a torch whose Kineto writes MTIA's kernels in the category kernel."
        )
    used = len(calls(trace, _USES_DEVICE))
    if used and used == len(captured(trace)):
        return (
            f"The device's share is unknown: all {used:,} launches of the trace were captured into a graph, not run. "
            "Record a replay of the graph."
        )
    if used:
        return (
            f"The device's events are missing: the host made {used:,} launches and copies, but the trace has no "
            "kernel. Record with ProfilerActivity.CUDA, and with no other profiler at work (Nsight, CUPTI's range "
            "profiler)."
        )
    annotations = sum(trace.names[trace.host.names[row]].startswith(_NCCL) for row in trace.host_args)
    if annotations:
        return (
            f"The device's events are missing: {annotations:,} collectives ran over NCCL, but the trace has no kernel. "
            "Record with ProfilerActivity.CUDA."
        )
    return None


def mostly_capture(timeline: Timeline, graphs: GraphFigures | None) -> str | None:
    """That most of a device's trace is the capture of graphs, in which the device idles; None where it is not."""
    if graphs is None or not graphs.captures or not timeline.on_device or not len(timeline.spans):
        return None
    first, last = int(timeline.spans.starts.min()), int(timeline.spans.ends.max())
    first = min(first, *(one.start_ns for one in graphs.captures))
    last = max(last, *(one.end_ns for one in graphs.captures))
    length = Intervals.of((one.start_ns, one.end_ns) for one in graphs.captures).length
    if length <= _MOSTLY * (last - first):
        return None
    share = format_percent(length / (last - first), 0)
    return (
        f"Most of this trace is the capture of graphs ({format_ns(length)}, {share}), "
        "in which kernels are recorded and not run: its losses say nothing of a replay. Analyse a trace of replays."
    )
