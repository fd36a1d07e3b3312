"""What is doubtful about a trace: what its recorder dropped, and where its clocks and claims contradict each other."""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from refshard.quantities import format_ns
from refshard.timeline import UNKNOWN, Kind, Spans, Timeline
from refshard.tracing.events import LAUNCH, OVERHEAD, TraceFile
from refshard.tracing.figures import TraceWarning
from refshard.tracing.steps import left_out

_LAUNCHES_KERNEL = re.compile(r"LaunchKernel|GraphLaunch|LaunchCooperativeKernel")
_NOTABLE_OVERHEAD = 0.01
_SKIPPED = {
    "not_numbers": "{} numbers are NaN or infinity; read as null",
    "without_times": "{} events have no usable time or duration and are left out",
    "negative_durations": "{} events end before they start and are left out",
    "unusable_events": "{} events are malformed and are left out",
    "begin_and_end_pairs": "{} begin/end events, which Kineto does not write, are left out",
    "trailing_commas": "{} commas stand before a closing bracket, which is no JSON; read as absent",
    "unclosed_array": "the array of events is never closed: the file may be cut off, and its last events missing",
    "far_events": "left out as errors of the recorder's clock: {} events an hour or more away from all others",
    "unread_device_events": "{} events of an MTIA device are not read: what they mean is not documented",
    "unusable_metadata": "the file's metadata is malformed; read as absent",
    "unusable_arguments": "{} event arguments are malformed; read as absent",
}


def find_warnings(trace: TraceFile, timeline: Timeline) -> tuple[TraceWarning, ...]:
    """Every doubt about a trace, and about the figures that are made of it."""
    found = [
        TraceWarning(code=code, message=_SKIPPED[code].format(count), count=count if "{}" in _SKIPPED[code] else None)
        for code, count in trace.skipped.items()
    ]
    found += _identity(trace, timeline)
    found += _collectives(timeline)
    if timeline.on_device:
        found += _launches(trace, timeline.spans)
        found += _streams(timeline.spans)
    found += _steps(trace, timeline)
    found += _perturbation(trace, timeline.spans)
    return tuple(found)


def _identity(trace: TraceFile, timeline: Timeline) -> Iterator[TraceWarning]:
    if timeline.rank is None:
        yield TraceWarning(
            code="no_rank", message="the trace does not say which rank it is: its distributedInfo has no rank"
        )
    if not any(window.step is not None for window in timeline.windows):
        yield TraceWarning(
            code="no_steps",
            message="no ProfilerStep: the trace is taken as one window; call profiler.step() after every step",
        )
    devices = {device for device, _ in trace.lanes}
    if len(devices) > 1:
        yield TraceWarning(
            code="several_devices",
            message=f"events of {len(devices)} devices are in one trace and are counted together",
            count=len(devices),
        )


def _collectives(timeline: Timeline) -> Iterator[TraceWarning]:
    ran = [one for one in timeline.collectives if one.start is not None]
    if timeline.on_device and (nameless := sum(one.group is None for one in ran)):
        yield TraceWarning(
            code="no_process_group_metadata",
            message=f"{nameless} collectives do not name their process group (torch before 2.2 or so): "
            "no bus bandwidth, and ranks are matched by order alone",
            count=nameless,
        )
    if shapeless := sum(one.bytes is None for one in ran):
        yield TraceWarning(
            code="no_collective_sizes",
            message=f"{shapeless} collectives have no size, so no bandwidth; record with record_shapes=True",
            count=shapeless,
        )
    if unseen := sum(one.start is None for one in timeline.collectives):
        yield TraceWarning(
            code="collectives_without_execution",
            message=f"{unseen} collectives were issued but did not run in the trace: dropped, or after its end",
            count=unseen,
        )


def _launches(trace: TraceFile, spans: Spans) -> Iterator[TraceWarning]:
    unlaunched = spans.launches == UNKNOWN
    if unlaunched.any():
        yield TraceWarning(
            code="launches_missing",
            message=f"{_events(unlaunched)} have no launch: their step, and what they waited for, are unknown",
            count=int(unlaunched.sum()),
        )
    early = ~unlaunched & (spans.starts < spans.launches)
    for code, what, rows in (
        ("collectives_before_launch", "collectives start", early & spans.of_kind(Kind.COMM)),
        ("kernels_before_launch", "other device events start", early & ~spans.of_kind(Kind.COMM)),
    ):
        if rows.any():
            by = int((spans.launches - spans.starts)[rows].max())
            yield TraceWarning(
                code=code,
                message=f"{int(rows.sum())} {what} before their launch, by up to {format_ns(by)}: "
                "the clocks of host and device disagree",
                count=int(rows.sum()),
                ns=by,
            )
    yield from _dropped(trace)


def _dropped(trace: TraceFile) -> Iterator[TraceWarning]:
    """Launches of kernels whose kernel is not in the trace, by where they lie."""
    host = trace.host
    launches_kernel = np.array([bool(_LAUNCHES_KERNEL.search(name)) for name in trace.names] or [False])
    calls = np.flatnonzero((host.categories == LAUNCH) & launches_kernel[host.names] & (host.correlations >= 0))
    seen = np.isin(host.correlations[calls], trace.device.correlations)
    if seen.all() or not seen.any():
        return
    times, lost = host.starts[calls], ~seen
    first, last = times[seen].min(), times[seen].max()
    for code, where, rows in (
        ("kernels_dropped_at_start", "before the first kernel of the trace: the profiler started too late for them",
         lost & (times < first)),
        ("kernels_dropped", "in the middle of the trace: the profiler dropped them, so figures are too low",
         lost & (times >= first) & (times <= last)),
        ("kernels_cut_off", "after the last one of the trace: the trace ended before they ran", lost & (times > last)),
    ):  # fmt: skip
        if rows.any():
            count = int(rows.sum())
            yield TraceWarning(code=code, message=f"{count} launches have no kernel, {where}", count=count)


def _streams(spans: Spans) -> Iterator[TraceWarning]:
    count = overlap = 0
    for lane in np.unique(spans.lanes):
        rows = spans.lanes == lane
        starts, reach = spans.starts[rows], np.maximum.accumulate(spans.ends[rows])
        beyond = np.minimum(reach[:-1], spans.ends[rows][1:]) - starts[1:]
        count += int((beyond > 0).sum())
        overlap += int(beyond[beyond > 0].sum())
    if count:
        yield TraceWarning(
            code="overlap_on_stream",
            message=f"{count} events start before the previous one on their stream ends, "
            f"{format_ns(overlap)} in all: programmatic dependent launch, or a profiler error",
            count=count,
            ns=overlap,
        )
    if (unclassified := spans.of_kind(Kind.UNCLASSIFIED)).any():
        yield TraceWarning(
            code="unclassified",
            message=f"{_events(unclassified)} have no name and count as unclassified",
            count=int(unclassified.sum()),
            ns=spans.covered(unclassified).length,
        )


def _steps(trace: TraceFile, timeline: Timeline) -> Iterator[TraceWarning]:
    """Steps of which nothing ran, steps that contradict each other, and what ran outside of all steps."""
    unused, renumbered = left_out(trace, timeline.host_windows)
    if unused > 0:
        yield TraceWarning(
            code="steps_overlap",
            message=f"{unused} ProfilerStep annotations lie within others or on other threads and are left out",
            count=unused,
        )
    if renumbered:
        yield TraceWarning(
            code="steps_repeat", message="step numbers repeat; steps are renumbered from 0 in order of time"
        )
    lived = {window.step for window in timeline.windows}
    if empty := [window.step for window in timeline.host_windows if window.step not in lived]:
        yield TraceWarning(
            code="steps_cut_off",
            message=f"steps {', '.join(map(str, empty))} have no device event and are left out: the trace was cut off",
            count=len(empty),
        )
    if timeline.windows and timeline.windows[0].step is not None:
        first, last = timeline.windows[0].start, timeline.windows[-1].end
        spans = timeline.spans
        beyond = (spans.starts < first) | (spans.ends > last)
        if beyond.any():
            ns = spans.covered(beyond).length - int(
                spans.covered(beyond).within(np.array([first]), np.array([last]))[0]
            )
            yield TraceWarning(
                code="outside_steps",
                message=f"{format_ns(ns)} of what ran lies outside of all steps, and in no step's figures",
                count=int(beyond.sum()),
                ns=ns,
            )


def _perturbation(trace: TraceFile, spans: Spans) -> Iterator[TraceWarning]:
    rows = trace.host.categories == OVERHEAD
    ns = int((trace.host.ends - trace.host.starts)[rows].sum())
    span = int(spans.ends.max() - spans.starts.min()) if len(spans) else 0
    if span and ns > _NOTABLE_OVERHEAD * span:
        yield TraceWarning(
            code="profiler_overhead",
            message=f"the profiler's own work takes {format_ns(ns)}, {ns / span:.1%} of the trace's span",
            count=int(rows.sum()),
            ns=ns,
        )
    if trace.metadata.get("with_stack"):
        yield TraceWarning(
            code="recorded_with_stacks",
            message="recorded with with_stack=True, which slows the host: launch-bound idle time is overstated",
        )


def _events(rows: npt.NDArray[np.bool_]) -> str:
    return f"{int(rows.sum())} device events"
