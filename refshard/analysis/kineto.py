"""Which kernels waited for kernels of other streams, as the profiler recorded it (``enable_cuda_sync_events``)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from refshard.analysis.issued import find_collectives
from refshard.analysis.labels import find_labels
from refshard.analysis.names import BLOCKS, LONG_NS, STREAM_WAITS
from refshard.analysis.owners import named
from refshard.analysis.spans import Launches, cpu_spans, device_order, device_spans, find_launches, main_thread
from refshard.analysis.windows import (
    WindowOptions,
    chosen_windows,
    cut_to,
    device_windows,
    device_windows_apart,
    host_steps,
)
from refshard.errors import TraceError
from refshard.events.reader import read_trace
from refshard.events.table import LAUNCH, STREAM_WAIT, TraceFile, whole
from refshard.events.timeline import UNKNOWN, Collective, HostCalls, Nanoseconds, Spans, Timeline, Window

Rows = npt.NDArray[np.int64]
Pairs = tuple[Rows, Rows]
"""What waits, and the span that it waits for."""

LOWEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """The spans of each lane in the order in which they run, and when they had been launched at the latest."""

    rows: tuple[Rows, ...]
    launches: tuple[Nanoseconds, ...]
    starts: Nanoseconds
    ends: Nanoseconds

    @classmethod
    def of(cls, spans: Spans) -> "Streams":
        """A lane runs in the order of its launches, so a span of unknown launch counts as launched with the last."""
        order = np.argsort(spans.lanes, kind="stable")
        cuts = np.searchsorted(spans.lanes[order], np.arange(1, len(spans.lane_names)))
        rows = tuple(np.split(order, cuts))
        launches = np.where(spans.launches == UNKNOWN, LOWEST, spans.launches)
        ordered = tuple(np.maximum.accumulate(launches[mine]) if len(mine) else launches[mine] for mine in rows)
        return cls(rows=rows, launches=ordered, starts=spans.starts, ends=spans.ends)

    def last_before(self, lane: int, points: Nanoseconds) -> Rows:
        """The last span of a lane launched before each point, :data:`UNKNOWN` without one."""
        place = np.searchsorted(self.launches[lane], points, "left")
        return np.append(self.rows[lane], UNKNOWN)[place - 1]

    def first_after(self, lane: int, points: Nanoseconds) -> Rows:
        """The first span of a lane launched at each point or later, :data:`UNKNOWN` without one."""
        return np.append(self.rows[lane], UNKNOWN)[np.searchsorted(self.launches[lane], points, "left")]


def recorded_waits(trace: TraceFile, spans: Spans) -> Pairs:
    """Streams' waits that the profiler recorded: the first span that waits, and the last that it waits for.

    Where it does not say which call recorded the event (until 2023), the event is taken to have been recorded just
    before the wait, as ``torch.cuda.Stream.wait_stream`` does.
    """
    syncs, numbers = trace.syncs, lane_numbers(trace)
    rows = np.flatnonzero(syncs.kinds == STREAM_WAIT)
    if not len(rows):
        return rows, rows
    streams = Streams.of(spans)
    waiting, sources = (
        np.array([numbers.get(key, UNKNOWN) for key in zip(syncs.devices[rows].tolist(), of[rows].tolist())], np.int64)
        for of in (syncs.streams, syncs.sources)
    )
    begins = begins_by_correlation(trace, np.concatenate((syncs.correlations[rows], syncs.records[rows])))
    called, recorded = begins[: len(rows)], begins[len(rows) :]
    recorded = np.where(syncs.records[rows] < 0, called, recorded)
    usable = (waiting != UNKNOWN) & (sources != UNKNOWN) & (waiting != sources)
    usable &= (called != UNKNOWN) & (recorded != UNKNOWN)
    first, last = np.full(len(rows), UNKNOWN, np.int64), np.full(len(rows), UNKNOWN, np.int64)
    for lane in range(len(streams.rows)):
        mine, theirs = usable & (waiting == lane), usable & (sources == lane)
        first[mine] = streams.first_after(lane, called[mine])
        last[theirs] = streams.last_before(lane, recorded[theirs])
    known = (first != UNKNOWN) & (last != UNKNOWN)
    return first[known], last[known]


def lane_numbers(trace: TraceFile) -> dict[tuple[int, int], int]:
    """Lanes by device and stream."""
    return {
        (int(device), int(stream)): lane
        for lane, (device, stream) in enumerate(trace.lanes)
        if device.isdigit() and stream.isdigit()
    }


def begins_by_correlation(trace: TraceFile, correlations: npt.NDArray[np.int64]) -> Nanoseconds:
    """When the call with each correlation id began; :data:`UNKNOWN` without such a call."""
    host = trace.host
    rows = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0))
    rows = rows[np.isin(host.correlations[rows], correlations)]
    rows = rows[np.argsort(host.correlations[rows], kind="stable")]
    ids = np.append(host.correlations[rows], UNKNOWN)
    place = np.searchsorted(ids[:-1], correlations)
    return np.where(ids[place] == correlations, np.append(host.starts[rows], UNKNOWN)[place], UNKNOWN)


def find_calls(trace: TraceFile, launches: Launches, spans: Spans) -> HostCalls:
    """What the calls of a trace tell of waits, for its device events in the order of the spans."""
    host = trace.host
    calls = host.categories == LAUNCH
    long = host.ends - host.starts >= LONG_NS
    rows = np.flatnonzero(calls & (long | named(trace, BLOCKS)))
    rows = rows[np.argsort(host.starts[rows], kind="stable")]
    waiting, sources = recorded_waits(trace, spans)
    return HostCalls(
        threads=launches.threads, awaits=_awaits(trace, launches, np.flatnonzero(calls & named(trace, STREAM_WAITS))),
        starts=host.starts[rows], ends=host.ends[rows], callers=host.threads[rows], names=host.names[rows],
        waiting=waiting, sources=sources,
    )  # fmt: skip


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


def read_timeline(path: Path) -> Timeline:
    """Read one rank's trace (``.json`` or ``.json.gz``).

    Raises:
        TraceError: the file is missing, damaged, no trace, or holds no step.
    """
    timeline = timeline_of(read_trace(path))
    if timeline.windows[0].step is None:
        raise TraceError(f"{path}: holds no ProfilerStep; call profiler.step() after every training step")
    return timeline


def timeline_of(
    trace: TraceFile, options: WindowOptions | None = None, *, communication: Sequence["re.Pattern[str]"] = ()
) -> Timeline:
    """What the rank of this trace did, with windows by ``options`` in place of its steps.

    A trace without steps is one window, from its first span to its last.

    Device events with one of ``communication`` in their names communicate, besides those that are known to.

    Raises:
        TraceError: the trace holds nothing that could be analysed, or nothing that was asked for.
    """
    host_windows, step_rows = host_steps(trace) if options is None else chosen_windows(trace, options)
    labels = find_labels(trace)
    on_device = len(trace.device.starts) > 0
    launches = find_launches(trace) if on_device else None
    if launches is not None:
        spans = device_spans(trace, labels, host_windows, launches, communication)
    else:
        spans = cpu_spans(trace, labels, host_windows, main_thread(trace, step_rows))
    if not len(spans) and not host_windows:
        raise TraceError(
            f"{trace.path}: holds no kernels and copies, no gloo:* or emulated:* spans, no steps and no operators; "
            "record it with ProfilerActivity.CPU, and CUDA where there is a GPU"
        )
    lived = device_windows if options is None else device_windows_apart
    windows = lived(spans, host_windows) if on_device else host_windows
    collectives = find_collectives(trace, spans, labels, host_windows, launches)
    timeline = Timeline(
        rank=rank_of(trace),
        windows=windows or (Window(step=None, start=int(spans.starts.min()), end=int(spans.ends.max())),),
        host_windows=host_windows, spans=spans if on_device else _with_collectives(spans, collectives),
        collectives=collectives, labels=labels.as_labels(), on_device=on_device,
        calls=find_calls(trace, launches, spans) if launches is not None else None,
    )  # fmt: skip
    return timeline if options is None or options.pattern is not None else cut_to(timeline, trace, options)


def rank_of(trace: TraceFile) -> int | None:
    """The rank that the trace's metadata names."""
    info = trace.metadata.get("distributedInfo")
    return whole(info.get("rank")) if isinstance(info, dict) else None


def _with_collectives(spans: Spans, collectives: tuple[Collective, ...]) -> Spans:
    """Spans of a CPU's threads, with what only the operator that announced a collective knows: when, for which unit."""
    launches, units, steps = spans.launches.copy(), spans.units.copy(), spans.steps.copy()
    number = {name: place for place, name in enumerate(spans.unit_names)}
    for one in collectives:
        if one.announced:
            rows = list(one.rows)
            launches[rows] = UNKNOWN if one.launched is None else one.launched
            units[rows] = number.get(one.unit or "", UNKNOWN)
            steps[rows] = UNKNOWN if one.step is None else one.step
    return replace(spans, launches=launches, queued=launches, units=units, steps=np.asarray(steps, np.int32))
