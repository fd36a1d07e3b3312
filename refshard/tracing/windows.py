"""Windows other than training steps: annotations that a pattern matches, or a range of time.

Inference has no ``ProfilerStep``; engines annotate batches instead, such as ``step[DECODE bs=32]``.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from refshard.errors import SpecError, TraceError
from refshard.events.table import ANNOTATION, HOST, TraceFile
from refshard.events.timeline import Kind, Spans, Timeline, Window
from refshard.quantities import format_ns, format_percent
from refshard.tracing.annotations import frequent
from refshard.tracing.figures import StepFigures, TraceWarning, WindowFigures, WindowGroup
from refshard.tracing.steps import NEVER, extents, host_steps, outermost, step_at

_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3}
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(s|ms|us)")
_RANGE = re.compile(r"([\d.]*\d[a-z]*)?\.\.([\d.]*\d[a-z]*)?")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user wants to see: annotations whose names ``pattern`` matches, or else ``[start_ns, end_ns)``.

    Times count from the trace's first event; None for its start or end. ``text`` is what the user wrote.
    """

    text: str
    pattern: "re.Pattern[str] | None" = None
    start_ns: int | None = None
    end_ns: int | None = None


def parse_window(text: str) -> Asked:
    """A pattern, or a range such as ``1.5s..2s``, ``800ms..`` or ``..20us``.

    >>> parse_window("1.5s..2s").end_ns
    2000000000

    Raises:
        SpecError: it is neither.
    """
    if match := _RANGE.fullmatch(text.strip()):
        start, end = (None if part is None else _nanoseconds(part, text) for part in match.groups())
        if start is not None or end is not None:
            if end is not None and end <= (start or 0):
                raise SpecError(f"window: a range must end after it starts, got {text}")
            return Asked(text=text, start_ns=start, end_ns=end)
    try:
        return Asked(text=text, pattern=re.compile(text))
    except re.error as error:
        raise SpecError(
            f"window: {text!r} is no regular expression ({error}); put a backslash before ( [ * + ? . to match them"
        ) from None


def _nanoseconds(part: str, text: str) -> int:
    match = _TIME.fullmatch(part)
    if match is None:
        raise SpecError(f"window: a range needs times with unit s, ms or us, such as 1.5s..2s; got {text}")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def asked_windows(trace: TraceFile, asked: Asked) -> tuple[tuple[Window, ...], npt.NDArray[np.int64]]:
    """The annotations that match, numbered in order of time, and their rows of :attr:`TraceFile.host`.

    A match within another is left out; of several threads the one with most matches counts. Without annotations that
    match, operators may. A range of time has no such windows: see :func:`cut_to`.

    Raises:
        TraceError: nothing matches.
    """
    if asked.pattern is None:
        return (), host_steps(trace)[1]
    rows = outermost(trace, _matches(trace, asked.pattern))
    if not len(rows):
        raise TraceError(f"{trace.path}: --window {asked.text!r} matches no annotation; {frequent(trace)}")
    host = trace.host
    columns = (host.starts[rows].tolist(), host.ends[rows].tolist(), host.names[rows].tolist())
    windows = tuple(
        Window(step=number, start=start, end=end, name=trace.names[code])
        for number, (start, end, code) in enumerate(zip(*columns))
    )
    return windows, rows


def _matches(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.int64]:
    host = trace.host
    named = np.isin(host.names, [code for code, name in enumerate(trace.names) if pattern.search(name)])
    for category in (ANNOTATION, HOST):
        rows = np.flatnonzero(named & (host.categories == category))
        if len(rows):
            return rows
    return np.empty(0, np.int64)


def device_windows_apart(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """Windows as the device lives them, with what lies between two of them in none.

    A kernel belongs to the window that launched it. A window begins with the wait for its first kernel: when the host
    has announced it and the lane that computes most has ended what came before. It ends with the last that it launched,
    on any lane, but on other lanes only until the next one's first event. One that launched nothing is left out.
    """
    (first, last), (_, last_on_main) = extents(spans, host_windows)
    announced = np.array([window.start for window in host_windows], np.int64)
    begins = np.minimum(first, np.maximum(announced, _busy_before(spans, first)))
    next_first = np.append(np.minimum.accumulate(first[::-1])[::-1][1:], NEVER[1])
    ends = np.maximum(last_on_main, np.minimum(last, next_first))
    windows: list[Window] = []
    for number in np.flatnonzero(last != NEVER[0]).tolist():
        start = max(int(begins[number]), windows[-1].end if windows else NEVER[0])
        windows.append(replace(host_windows[number], start=start, end=max(start, int(ends[number]))))
    return tuple(windows)


def _busy_before(spans: Spans, points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When the lane that computes most ended what it began before each point."""
    on_main = spans.lanes == spans.main_lane()
    reach = np.concatenate(([NEVER[0]], np.maximum.accumulate(spans.ends[on_main])))
    return np.asarray(reach[np.searchsorted(spans.starts[on_main], points, side="left")], np.int64)


def cut_to(timeline: Timeline, trace: TraceFile, asked: Asked) -> Timeline:
    """The timeline with the range of time as its only window; a span belongs to it if it starts there.

    Raises:
        TraceError: nothing of the trace lies in the range.
    """
    tables = [events for events in (trace.host, trace.device) if len(events.starts)]
    origin = min(int(events.starts.min()) for events in tables)
    close = max(int(events.ends.max()) for events in tables)
    start, end = origin + (asked.start_ns or 0), close if asked.end_ns is None else origin + asked.end_ns
    if start >= close:
        raise TraceError(
            f"{trace.path}: --window {asked.text} lies after the trace's end; the trace is {format_ns(close - origin)} "
            "long, and times count from its first event"
        )
    windows = (Window(step=0, start=start, end=min(end, close), name=asked.text),)
    spans = replace(timeline.spans, steps=step_at(timeline.spans.starts, windows))
    collectives = tuple(
        replace(one, step=0 if one.start is not None and start <= one.start < end else None)
        for one in timeline.collectives
    )
    return replace(timeline, windows=windows, host_windows=windows, spans=spans, collectives=collectives)


def window_figures(asked: Asked, steps: Sequence[StepFigures]) -> WindowFigures:
    """Sums over the windows of each kind."""
    members: dict[str, list[StepFigures]] = defaultdict(list)
    for step in steps:
        members[_kind(asked, step.name or "")].append(step)
    return WindowFigures(asked=asked.text, groups=tuple(_group(kind, found) for kind, found in members.items()))


def _kind(asked: Asked, name: str) -> str:
    """What the parentheses of the pattern matched, or else the name without its numbers: batches differ in these."""
    match = None if asked.pattern is None else asked.pattern.search(name)
    if match is None:
        return name
    return " ".join(part for part in match.groups() if part) or _NUMBER.sub("#", name)


def _group(kind: str, members: Sequence[StepFigures]) -> WindowGroup:
    names = {step.name for step in members}
    parts = [step.breakdown for step in members]
    return WindowGroup(
        name=(names.pop() or kind) if len(names) == 1 and "#" in kind else kind,
        count=len(parts),
        span_ns=sum(part.span_ns for part in parts),
        shortest_ns=min(part.span_ns for part in parts),
        longest_ns=max(part.span_ns for part in parts),
        compute_ns=sum(part.compute_ns for part in parts),
        comm_ns=sum(part.comm_ns for part in parts),
        exposed_ns=sum(part.exposed_ns for part in parts),
        idle_ns=sum(part.idle_ns for part in parts),
    )


def window_warnings(trace: TraceFile, timeline: Timeline, asked: Asked | None) -> Iterator[TraceWarning]:
    """Matches that are no window, and what ran outside of all windows that a pattern chose."""
    if asked is None or asked.pattern is None:
        return
    if unused := len(_matches(trace, asked.pattern)) - len(timeline.host_windows):
        yield TraceWarning(
            code="windows_overlap",
            message=f"{unused} annotations that --window matches lie within others or on other threads and are left "
            "out; a narrower pattern chooses between them",
            count=unused,
        )
    lived = {window.step for window in timeline.windows}
    if idle := sum(window.step not in lived for window in timeline.host_windows):
        yield TraceWarning(
            code="windows_without_work",
            message=f"{idle} windows launched nothing on the device and are left out",
            count=idle,
        )
    busy = timeline.busy(*Kind)
    starts = np.array([window.start for window in timeline.windows], np.int64)
    ends = np.array([window.end for window in timeline.windows], np.int64)
    outside = busy.length - int(busy.within(starts, ends).sum())
    if outside:
        yield TraceWarning(
            code="outside_windows",
            message=f"{format_ns(outside)} of what ran ({format_percent(outside / busy.length)}) lies outside of all "
            "windows, and in no window's figures",
            ns=outside,
        )
