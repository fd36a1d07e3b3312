"""The steps of a trace: as the host announced them, and as the device lived them."""

import re

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Kind, Spans, Window
from refshard.tracing.events import ANNOTATION, HOST, TraceFile

_STEP = re.compile(r"^ProfilerStep#(\d+)$")


def host_steps(trace: TraceFile) -> tuple[tuple[Window, ...], npt.NDArray[np.int64]]:
    """The steps that the host announced, in order of time, and their rows of :attr:`TraceFile.host`.

    A trace of a GPU repeats the annotation on the device's side; the host's is the step. In 2021 it was an operator.
    """
    host = trace.host
    numbers = {code: int(match[1]) for code, name in enumerate(trace.names) if (match := _STEP.match(name))}
    rows = np.flatnonzero(np.isin(host.names, list(numbers)) & np.isin(host.categories, (ANNOTATION, HOST)))
    rows = rows[np.argsort(host.starts[rows], kind="stable")]
    windows = tuple(
        Window(step=numbers[code], start=start, end=end)
        for code, start, end in zip(host.names[rows].tolist(), host.starts[rows].tolist(), host.ends[rows].tolist())
    )
    return windows, rows


def step_at(points: npt.NDArray[np.int64], windows: tuple[Window, ...]) -> npt.NDArray[np.int32]:
    """The step in whose window each point lies; windows are disjoint and in order."""
    if not windows:
        return np.full(len(points), UNKNOWN, np.int32)
    index = np.searchsorted([window.start for window in windows], points, side="right") - 1
    numbers = np.array([UNKNOWN if window.step is None else window.step for window in windows], np.int32)
    ends = np.array([window.end for window in windows], np.int64)
    return np.where((index >= 0) & (points < ends[index]), numbers[index], UNKNOWN).astype(np.int32)


def device_windows(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """The steps as the device lives them: one follows the other, with the wait for its first kernel in it.

    A kernel belongs to the step that launched it. The lane that computes most runs them in order, so a step ends there
    with the last that it launched; the first step begins with its first device event, and the last ends with its last
    one on any lane. A step that launched nothing has no window.
    """
    numbers = np.array([UNKNOWN if window.step is None else window.step for window in host_windows], np.int32)
    order = np.argsort(numbers, kind="stable")
    mine = np.isin(spans.steps, numbers) & (spans.steps != UNKNOWN)
    place = order[np.searchsorted(numbers[order], spans.steps[mine])]
    on_main = spans.lanes[mine] == main_lane(spans)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last, last_on_main = np.full(len(numbers), UNKNOWN, np.int64), np.full(len(numbers), UNKNOWN, np.int64)
    np.minimum.at(first, place, spans.starts[mine])
    np.maximum.at(last, place, spans.ends[mine])
    np.maximum.at(last_on_main, place[on_main], spans.ends[mine][on_main])
    windows: list[Window] = []
    for number in np.flatnonzero(last != UNKNOWN).tolist():
        start = windows[-1].end if windows else int(first[number])
        end = int(last_on_main[number] if last_on_main[number] != UNKNOWN else last[number])
        windows.append(Window(step=host_windows[number].step, start=start, end=max(start, end)))
    if windows:
        final = windows[-1]
        windows[-1] = Window(step=final.step, start=final.start, end=max(final.end, int(last.max())))
    return tuple(windows)


def main_lane(spans: Spans) -> int:
    """The lane that computes most; without compute, the busiest one; :data:`UNKNOWN` without spans."""
    if not len(spans):
        return UNKNOWN
    computes = spans.of_kind(Kind.COMPUTE)
    rows = computes if computes.any() else np.ones(len(spans), np.bool_)
    busy = np.bincount(spans.lanes[rows], weights=(spans.ends - spans.starts)[rows])
    return int(np.argmax(busy))
