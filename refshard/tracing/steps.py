"""The steps of a trace: as the host announced them, and as the device lived them."""

import re

import numpy as np
import numpy.typing as npt

from refshard.events.table import ANNOTATION, HOST, TraceFile
from refshard.events.timeline import UNKNOWN, Spans, Window

_STEP = re.compile(r"^ProfilerStep#(\d{1,9})$")


def host_steps(trace: TraceFile) -> tuple[tuple[Window, ...], npt.NDArray[np.int64]]:
    """The steps that the host announced, in order of time, and their rows of :attr:`TraceFile.host`.

    A trace of a GPU repeats the annotation on the device's side; the host's is the step. In 2021 it was an operator. Of
    several threads that announce steps the one with most of them counts, and a step within another does not. Where a
    number comes twice, steps are numbered from 0.
    """
    host = trace.host
    numbers = {code: int(match[1]) for code, name in enumerate(trace.names) if (match := _STEP.match(name))}
    rows = np.flatnonzero(np.isin(host.names, list(numbers)) & np.isin(host.categories, (ANNOTATION, HOST)))
    rows = outermost(trace, rows)
    found = [numbers[code] for code in host.names[rows].tolist()]
    if len(set(found)) < len(found):
        found = list(range(len(found)))
    windows = tuple(
        Window(step=number, start=start, end=end)
        for number, start, end in zip(found, host.starts[rows].tolist(), host.ends[rows].tolist())
    )
    return windows, rows


def outermost(trace: TraceFile, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of the thread that has most of them, in order of time, without those that begin within another."""
    host = trace.host
    if not len(rows):
        return rows
    threads, counts = np.unique(host.threads[rows], return_counts=True)
    rows = rows[host.threads[rows] == threads[np.argmax(counts)]]
    rows = rows[np.lexsort((-host.ends[rows], host.starts[rows]))]
    reach = np.maximum.accumulate(host.ends[rows])
    follows = np.ones(len(rows), np.bool_)
    follows[1:] = host.starts[rows][1:] >= reach[:-1]
    return np.asarray(rows[follows], np.int64)


def left_out(trace: TraceFile, windows: tuple[Window, ...]) -> tuple[int, bool]:
    """How many annotations of steps are none of ``windows``, and whether these bear numbers of their own."""
    host = trace.host
    codes = [code for code, name in enumerate(trace.names) if _STEP.match(name)]
    announced = np.isin(host.names, codes) & np.isin(host.categories, (ANNOTATION, HOST))
    names = {f"ProfilerStep#{window.step}" for window in windows}
    return int(announced.sum()) - len(windows), not names <= {trace.names[code] for code in codes}


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
    (first, last), (first_on_main, last_on_main) = extents(spans, host_windows)
    # One that has nothing on the main lane ends before the next begins there.
    latest = np.minimum.accumulate(first_on_main[::-1])[::-1]
    ends = np.where(last_on_main == NEVER[0], np.minimum(last, latest), last_on_main)
    windows: list[Window] = []
    for number in np.flatnonzero(last != NEVER[0]).tolist():
        start = windows[-1].end if windows else int(first[number])
        windows.append(Window(step=host_windows[number].step, start=start, end=max(start, int(ends[number]))))
    if windows:
        final = windows[-1]
        windows[-1] = Window(step=final.step, start=final.start, end=max(final.end, int(last.max())))
    return tuple(windows)


Extremes = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
NEVER = (int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max))


def extents(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Extremes, Extremes]:
    """First start and last end of what each window launched: on all lanes, and on the lane that computes most.

    The greatest and the least number where a window launched nothing there.
    """
    numbers = np.array([UNKNOWN if window.step is None else window.step for window in host_windows], np.int32)
    order = np.argsort(numbers, kind="stable")
    mine = np.isin(spans.steps, numbers) & (spans.steps != UNKNOWN)
    place = order[np.searchsorted(numbers[order], spans.steps[mine])]
    on_main = spans.lanes[mine] == spans.main_lane()
    starts, ends = spans.starts[mine], spans.ends[mine]
    return (
        _extremes(len(numbers), place, starts, ends),
        _extremes(len(numbers), place[on_main], starts[on_main], ends[on_main]),
    )


def _extremes(
    count: int, place: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Extremes:
    first, last = np.full(count, NEVER[1]), np.full(count, NEVER[0])
    np.minimum.at(first, place, starts)
    np.maximum.at(last, place, ends)
    return first, last
