"""A Kineto trace file of one rank becomes a :class:`~refshard.events.timeline.Timeline`.

What a span is spent on follows the definitions in ``docs/explanation/metrics.md``. A trace with device events
(kernels, copies) is read by those; one without is a CPU trace.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from refshard.errors import TraceError
from refshard.events.reader import read_trace
from refshard.events.table import TraceFile, whole
from refshard.events.timeline import UNKNOWN, Collective, Spans, Timeline, Window
from refshard.tracing.cpu import cpu_spans, main_thread
from refshard.tracing.device import device_spans, find_launches
from refshard.tracing.host.calls import find_calls
from refshard.tracing.issued import find_collectives
from refshard.tracing.labels import find_labels
from refshard.tracing.steps import device_windows, host_steps
from refshard.tracing.windows import Asked, asked_windows, cut_to, device_windows_apart


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
    trace: TraceFile, asked: Asked | None = None, *, communication: Sequence["re.Pattern[str]"] = ()
) -> Timeline:
    """What the rank of this trace did, with windows ``asked`` for in place of its steps.

    A trace without steps is one window, from its first span to its last.

    Device events with one of ``communication`` in their names communicate, besides those that are known to.

    Raises:
        TraceError: the trace holds nothing that could be analysed, or nothing that was asked for.
    """
    host_windows, step_rows = host_steps(trace) if asked is None else asked_windows(trace, asked)
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
    lived = device_windows if asked is None else device_windows_apart
    windows = lived(spans, host_windows) if on_device else host_windows
    collectives = find_collectives(trace, spans, labels, host_windows, launches)
    timeline = Timeline(
        rank=rank_of(trace),
        windows=windows or (Window(step=None, start=int(spans.starts.min()), end=int(spans.ends.max())),),
        host_windows=host_windows,
        spans=spans if on_device else _with_collectives(spans, collectives),
        collectives=collectives,
        labels=labels.as_labels(),
        on_device=on_device,
        calls=find_calls(trace, launches, spans) if launches is not None else None,
    )
    return timeline if asked is None or asked.pattern is not None else cut_to(timeline, trace, asked)


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
