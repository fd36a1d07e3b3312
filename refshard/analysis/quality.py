"""Warnings about a trace: events that its recorder dropped, contradictions of its clocks and annotations, and reasons
for no verdict on losses (a device without events, the capture of a graph).

Between the calls that begin and end a stream's capture, a launch adds a node to a CUDA or HIP graph and runs nothing.
The replay of a graph is one launch, and its kernels bear that launch's correlation id.
"""

import re
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from refshard.analysis.figures import Capture, GraphFigures, Replays, TraceWarning
from refshard.analysis.jobs import identity_of, rank_in_name
from refshard.analysis.kineto import device_order
from refshard.analysis.labels import named
from refshard.analysis.names import PEER_COPY, custom_operation
from refshard.analysis.windows import inferred_steps, left_out, suggestion
from refshard.events.table import LAUNCH, OVERHEAD, TraceFile, whole
from refshard.events.timeline import UNKNOWN, Collective, Intervals, Ints, Kind, Rows, Spans, Timeline
from refshard.quantities import format_ns, format_percent

LAUNCHES_KERNEL = re.compile(r"LaunchKernel|GraphLaunch|LaunchCooperativeKernel|KernelLaunch")
"""Calls of CUDA, HIP and SYCL that start a kernel, or a graph of them."""
_REPLAYS = re.compile(r"GraphLaunch")
_BEGINS, _ENDS = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")


class _Captures(msgspec.Struct):
    starts: Rows
    ends: Rows
    threads: Ints


def calls(trace: TraceFile, pattern: "re.Pattern[str]") -> Rows:
    """Rows of :attr:`TraceFile.host` with runtime and driver calls that match the pattern."""
    return np.flatnonzero((trace.host.categories == LAUNCH) & named(trace, pattern))


def captured(trace: TraceFile) -> Rows:
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


def _capture_at(trace: TraceFile, rows: Rows, found: _Captures) -> Rows:
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
    """The graph launches with device events in the trace, which carry the launch's correlation id."""
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
                count=len(of_them), events=events, busy_ns=Intervals.union(spans.starts[mine], spans.ends[mine]).length,
                capture=alike[0] if len(alike) == 1 else None,
            )
        )  # fmt: skip
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


_USES_DEVICE = re.compile(
    rf"{LAUNCHES_KERNEL.pattern}|Mem(?:cpy|set)\w*Async|runFunction|enqueueCommand"  # the last two are MTIA's
)
_XPU = re.compile(r"urEnqueue|zeCommand")
_NCCL = "nccl:"
_MOSTLY = 0.5
"""A capture that is longer than this part of the trace leaves little else to judge."""


def missing_device(trace: TraceFile) -> str | None:
    """Why a trace of a program that used a device tells nothing of it, and how to record that; None for others."""
    if len(trace.device.starts):
        return None
    for kind, unread in (("an MTIA", "unread_device_events"), ("a Gaudi", "unread_hpu_events")):
        if count := trace.skipped.get(unread):
            return (
                f"The device's share is unknown: {count:,} events of {kind} device are not read, because "
                f"their meaning is not documented. Record with a torch whose Kineto writes its kernels in the "
                "category kernel."
            )
    used = len(calls(trace, _USES_DEVICE))
    if used and used == len(captured(trace)):
        return (
            f"The device's share is unknown: all {used:,} launches of the trace were captured into a graph, not run. "
            "Record a replay of the graph."
        )
    if used:
        activity = "XPU" if any(_XPU.match(name) for name in trace.names) else "CUDA"
        return (
            f"The device's events are missing: the host made {used:,} launches and copies, but the trace has no "
            f"kernel. Record with ProfilerActivity.{activity}, and with no other profiler at work (Nsight, CUPTI's "
            "range profiler)."
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


_MESSAGES = {
    "no_rank": "a report of Nsight Systems names no rank; name the file after it, such as rank0.sqlite",
    "no_steps": "no range ProfilerStep#: the report is taken as one window; put every step in a range: "
    "torch.cuda.nvtx.range(f'ProfilerStep#{step}')",
    "no_process_group_metadata": "a report of Nsight Systems names no process groups: no bus bandwidth",
    "no_collective_sizes": "no sizes of collectives: a report of Nsight Systems keeps them in payloads that are not "
    "read; a Kineto trace with record_shapes=True has them",
}


_NOTABLE_OVERHEAD = 0.01
_FAKE = "fake"
"""torch's backend for tests, ``torch.testing._internal.distributed.fake_pg``."""
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
    "unread_hpu_events": "{} events of a Gaudi device are not read: what they mean is not documented",
    "without_category": "{} events have no category and are left out",
    "unusable_metadata": "the file's metadata is malformed; read as absent",
    "unusable_arguments": "{} event arguments are malformed; read as absent",
    "ranges_without_end": "{} NVTX ranges were open when the report ended and are left out",
    "graphs_as_a_whole": "{} CUDA graphs were traced as a whole, and what ran in them is unclassified; record with "
    "nsys profile --cuda-graph-trace=node",
}


def _warning(code: str, message: str, count: int | None = None, ns: int | None = None) -> TraceWarning:
    return TraceWarning(code=code, message=message, count=count, ns=ns)


def find_warnings(trace: TraceFile, timeline: Timeline) -> tuple[TraceWarning, ...]:
    """Every doubt about a trace, and about the figures that are made of it; about a report, with what helps there."""
    found = [
        _warning(code, _SKIPPED[code].format(f"{count:,}"), count if "{}" in _SKIPPED[code] else None)
        for code, count in trace.skipped.items()
    ]
    found += _identity(trace, timeline)
    host_only = missing_device(trace) is not None
    if host_only:
        text = "the trace has no device events: compute, communication and idle time are unknown"
        found.append(_warning("device_events_missing", text))
    found += _collectives(trace, timeline, host_only=host_only)
    graphs = find_graphs(trace, timeline)
    if graphs is not None and (count := sum(one.launches for one in graphs.captures)):
        ns = sum(one.end_ns - one.start_ns for one in graphs.captures)
        into = "a graph" if len(graphs.captures) == 1 else f"{len(graphs.captures)} graphs"
        text = f"{count} kernel launches were captured into {into}, not run, within {format_ns(ns)} of the host: "
        found.append(_warning("launches_captured", text + "no kernel of theirs is missing", count, ns))
    if timeline.on_device:
        found += (*_launches(trace, timeline.spans), *_streams(timeline.spans))
    found += (*_steps(trace, timeline), *_perturbation(trace, timeline.spans))
    if trace.metadata.get("recorder") != "Nsight Systems":
        return tuple(found)
    for place, one in enumerate(found):
        if message := _MESSAGES.get(one.code):
            _, hint, more = one.message.partition("; or use --window")
            found[place] = msgspec.structs.replace(one, message=message + hint + more)
    return tuple(found)


def _identity(trace: TraceFile, timeline: Timeline) -> Iterator[TraceWarning]:
    # Other ranks are known by the metadata, or by a collective of a group that is not known to be of one rank.
    info = trace.metadata.get("distributedInfo")
    size = whole(info.get("world_size")) if isinstance(info, dict) else None
    groups = {one.group_size for one in timeline.collectives if one.op != PEER_COPY}
    if timeline.rank is None and size != 1 and ((size or 0) > 1 or groups - {1}):
        named = rank_in_name(trace.path)
        instead = "" if named is None else f"; {named} is taken from the file's name"
        yield _warning("no_rank", f"the trace does not say which rank it is: its distributedInfo has no rank{instead}")
    if not any(window.step is not None for window in timeline.windows):
        text = "no ProfilerStep: the trace is taken as one window; call profiler.step() after every step"
        yield _warning("no_steps", text + suggestion(trace))
    elif (inferred := inferred_steps(trace)) is not None and not any(one.name for one in timeline.host_windows):
        text = f"no ProfilerStep: {len(timeline.windows)} steps were found without, since {inferred.by}"
        yield _warning("steps_inferred", text)
    devices = {trace.lanes[lane][0] for lane in np.unique(trace.device.lanes).tolist()}
    if len(devices) > 1:
        text = (
            f"events of {len(devices)} devices are in one trace and are counted together, so that what one "
            f"computes hides the others' idle time and communication; --gpu {min(devices)} shows one alone"
        )
        yield _warning("several_devices", text, len(devices))


def _collectives(trace: TraceFile, timeline: Timeline, *, host_only: bool) -> Iterator[TraceWarning]:
    ran, backend = [one for one in timeline.collectives if one.start is not None], identity_of(trace).backend
    # A kernel or copy that no process group of torch knows of has no group.
    custom = [not one.announced and one.group is None and _operation(one, timeline.spans) is not None for one in ran]
    nameless = [one for one, is_custom in zip(ran, custom) if not is_custom and one.group is None]
    if timeline.on_device and nameless:
        no_bandwidth = "no bus bandwidth, and " if any(one.group_size is None for one in nameless) else ""
        args = (*trace.host_args.values(), *trace.device_args.values())
        if any("Process Group Name" in one for one in args):
            why = "others of this trace do, but theirs lacks the event that names it"
        else:
            unnamed = backend in (None, "nccl")
            why = "no event of this trace does" if unnamed else f"backend '{backend}' does not record it"
        text = f"{len(nameless)} collectives do not name their process group ({why}): "
        text += f"{no_bandwidth}ranks are matched by order alone"
        yield _warning("no_process_group_metadata", text, len(nameless))
    if shapeless := [one for one in ran if one.bytes is None]:
        causes = Counter(_why_no_size(one, trace, timeline.spans) for one in shapeless)
        found = "; ".join(cause if len(causes) == 1 else f"{count}: {cause}" for cause, count in causes.most_common())
        text = f"{len(shapeless)} collectives have no size, so no bandwidth: {found}"
        yield _warning("no_collective_sizes", text, len(shapeless))
    # NCCL launches no kernel for a group of one rank.
    expected = [one for one in timeline.collectives if not (timeline.on_device and one.group_size == 1)]
    unseen = 0 if host_only else sum(one.start is None for one in expected)
    if unseen and backend == _FAKE:
        text = f"{unseen} collectives were issued to torch's backend '{_FAKE}', which runs nothing: communication "
        yield _warning("fake_backend", text + "takes no time in this trace", unseen)
    elif unseen:
        text = f"{unseen} collectives were issued but did not run in the trace: dropped, or after its end"
        yield _warning("collectives_without_execution", text, unseen)


def _operation(one: Collective, spans: Spans) -> str | None:
    return custom_operation(spans.name_table[spans.names[one.rows[0]]]) if one.rows else None


def _why_no_size(one: Collective, trace: TraceFile, spans: Spans) -> str:
    """Why a collective that ran has no size, as far as the trace shows."""
    if one.announced and not any("Input Dims" in args for args in trace.host_args.values()):
        return "no operator has its shapes; record with record_shapes=True"
    if one.announced:
        return "the shapes of their operators do not give it"
    if _operation(one, spans) is not None:
        return "kernels of their own kind, outside of torch's process groups, do not record it"
    if trace.device.starts.size and one.launched is None:
        return "the launches of their kernels are not in the trace, and so neither are their operators"
    return "the trace has no c10d operator of theirs; the cause is unknown"


def _launches(trace: TraceFile, spans: Spans) -> Iterator[TraceWarning]:
    unlaunched = spans.launches == UNKNOWN
    if count := int(unlaunched.sum()):
        text = f"{count} device events have no launch: their step, and what they waited for, are unknown"
        yield _warning("launches_missing", text, count)
    early = ~unlaunched & (spans.starts < spans.launches)
    for code, what, rows in (
        ("collectives_before_launch", "collectives start", early & spans.of_kind(Kind.COMM)),
        ("kernels_before_launch", "other device events start", early & ~spans.of_kind(Kind.COMM)),
    ):
        if count := int(rows.sum()):
            by = int((spans.launches - spans.starts)[rows].max())
            text = f"{count} {what} before their launch, by up to {format_ns(by)}: "
            yield _warning(code, text + "the clocks of host and device disagree", count, by)
    host, launches = trace.host, calls(trace, LAUNCHES_KERNEL)
    launches = launches[host.correlations[launches] >= 0]
    seen = np.isin(host.correlations[launches], trace.device.correlations)
    if seen.all() or not seen.any():
        return
    times, lost = host.starts[launches], ~seen & ~np.isin(launches, captured(trace))
    first, last = times[seen].min(), times[seen].max()
    for code, where, rows in (
        ("kernels_dropped_at_start", "before the first kernel of the trace: the profiler started too late for them",
         lost & (times < first)),
        ("kernels_dropped", "in the middle of the trace: the profiler dropped them, so figures are too low",
         lost & (times >= first) & (times <= last)),
        ("kernels_cut_off", "after the last one of the trace: the trace ended before they ran", lost & (times > last)),
    ):  # fmt: skip
        if count := int(rows.sum()):
            yield _warning(code, f"{count} launches have no kernel, {where}", count)


def _streams(spans: Spans) -> Iterator[TraceWarning]:
    order = np.argsort(spans.lanes, kind="stable")
    count = overlap = 0
    for rows in np.split(order, np.flatnonzero(np.diff(spans.lanes[order])) + 1):
        reach = np.maximum.accumulate(spans.ends[rows])
        beyond = np.minimum(reach[:-1], spans.ends[rows][1:]) - spans.starts[rows][1:]
        count += int((beyond > 0).sum())
        overlap += int(beyond[beyond > 0].sum())
    if count:
        text = f"{'1 event starts' if count == 1 else f'{count:,} events start'} before the previous one on the "
        text += f"same stream ends, {format_ns(overlap)} in all: programmatic dependent launch, or a profiler error"
        yield _warning("overlap_on_stream", text, count, overlap)
    unclassified = spans.of_kind(Kind.UNCLASSIFIED)
    if count := int(unclassified.sum()):
        text = f"{count} device events have no name and count as unclassified"
        yield _warning("unclassified", text, count, spans.covered(unclassified).length)


def _steps(trace: TraceFile, timeline: Timeline) -> Iterator[TraceWarning]:
    """Steps in which nothing ran, steps that contradict each other, and what ran outside of all steps."""
    if any(window.name is not None for window in timeline.host_windows):
        return  # chosen windows, which are not the steps that the trace announces
    unused, renumbered = left_out(trace, timeline.host_windows)
    if unused > 0:
        text = f"{unused} ProfilerStep annotations lie within others or on other threads and are left out"
        yield _warning("steps_overlap", text, unused)
    if renumbered:
        yield _warning("steps_repeat", "step numbers repeat; steps are renumbered from 0 in order of time")
    lived = {window.step for window in timeline.windows}
    if empty := [window.step for window in timeline.host_windows if window.step not in lived]:
        text = f"steps {', '.join(map(str, empty))} have no device event and are left out: the trace was cut off"
        yield _warning("steps_cut_off", text, len(empty))
    if timeline.windows and timeline.windows[0].step is not None:
        first, last = timeline.windows[0].start, timeline.windows[-1].end
        beyond = (timeline.spans.starts < first) | (timeline.spans.ends > last)
        if beyond.any():
            covered = timeline.spans.covered(beyond)
            ns = covered.length - int(covered.within(np.array([first]), np.array([last]))[0])
            text = f"{format_ns(ns)} of what ran lies outside of all steps, and in no step's figures"
            yield _warning("outside_steps", text, int(beyond.sum()), ns)


def _perturbation(trace: TraceFile, spans: Spans) -> Iterator[TraceWarning]:
    rows = trace.host.categories == OVERHEAD
    ns = int((trace.host.ends - trace.host.starts)[rows].sum())
    span = int(spans.ends.max() - spans.starts.min()) if len(spans) else 0
    if span and ns > _NOTABLE_OVERHEAD * span:
        text = f"the profiler's own work takes {format_ns(ns)}, {ns / span:.1%} of the trace's span"
        yield _warning("profiler_overhead", text, int(rows.sum()), ns)
    if trace.metadata.get("with_stack"):
        text = "recorded with with_stack=True, which slows the host: launch-bound idle time is overstated"
        yield _warning("recorded_with_stacks", text)
