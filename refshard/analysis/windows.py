"""The windows of time that figures cover: the steps, as the host announced them and as the device ran them; or, if the
user chose, annotations that match a pattern, or a range of time.

Inference has no ``ProfilerStep``; engines annotate batches instead, such as ``step[DECODE bs=32]``.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np

from refshard.analysis.figures import StepFigures, TraceWarning, WindowFigures, WindowGroup
from refshard.analysis.labels import meaning_of
from refshard.errors import SpecError, TraceError
from refshard.events.table import ANNOTATION, EMULATED, GLOO, HOST, LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Ints, Kind, Nanoseconds, Rows, Spans, Timeline, Window
from refshard.quantities import format_ns, format_percent

_STEP = re.compile(r"^ProfilerStep#(\d{1,9})$")


def host_steps(trace: TraceFile) -> tuple[tuple[Window, ...], Rows]:
    """The steps that the host announced, in order of time, and their rows of :attr:`TraceFile.host`.

    A trace of a GPU repeats the annotation on the device's side; the host's is the step. In 2021 it was an operator. Of
    several threads that announce steps the one with most of them counts, and a step within another does not. Where a
    number comes twice, steps are numbered from 0. Where no thread announces any, they are inferred: see
    :func:`inferred_steps`.
    """
    if (inferred := inferred_steps(trace)) is not None:
        return inferred.windows, inferred.rows
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Steps that nothing announced, what they were found by, and the rows of :attr:`TraceFile.host` that tell."""

    windows: tuple[Window, ...]
    by: str
    rows: Rows


_MARKS = (("Optimizer.step#", "ends"), ("Optimizer.zero_grad#", "starts"))
"""torch's annotations that come once a step, and whether a step begins where they start or after they end."""
_LEAST_WORK, _MOST_WORK = 0.9, 1.5
"""What lies before the first boundary, or after the last, is a step if it launches so many times as much as others."""
_SAME_STEP = 0.1
"""Marks between which the host launches less than this share of the most between two belong to one step."""


def inferred_steps(trace: TraceFile) -> Inferred | None:
    """The steps of a trace without ``ProfilerStep``; None if it has such, or if nothing repeats.

    They are found by the optimizer's steps or its ``zero_grad``, and else by the sequence of kernels on the stream with
    most of them. An incomplete step at the start or the end is left out.
    """
    host = trace.host
    if any(_STEP.match(name) for name in trace.names):
        return None
    is_call = host.categories == LAUNCH
    points = np.sort(host.starts[is_call if is_call.any() else host.categories == HOST])
    points = points if len(points) else np.sort(trace.device.starts)
    for mark, side in _MARKS:
        codes = [code for code, name in enumerate(trace.names) if name.startswith(mark)]
        rows = np.flatnonzero(np.isin(host.names, codes) & np.isin(host.categories, (ANNOTATION, HOST)))
        rows = outermost(trace, rows)
        # Work before each mark, since the one before; several optimizers of one step have little between them.
        until = np.searchsorted(points, host.starts[rows])
        work = until - np.append(0, np.searchsorted(points, host.ends[rows]))[: len(rows)]
        starts_step = work >= _SAME_STEP * work.max(initial=1)
        kept = rows[starts_step if side == "starts" else np.append(starts_step[1:], True)] if len(rows) else rows
        if len(kept) > 1 and (windows := _between(getattr(host, side)[kept], points)):
            names = list(dict.fromkeys(trace.names[code] for code in host.names[rows].tolist()))
            verb = "begin" if side == "starts" else "end"
            return Inferred(windows=windows, by=f"each {verb}s with {' and '.join(names)}", rows=kept)
    lanes = trace.device.lanes
    mine = np.flatnonzero(lanes == np.argmax(np.bincount(lanes))) if len(lanes) else lanes
    mine = mine[np.argsort(trace.device.starts[mine], kind="stable")]
    period = repeats_after(trace.device.names[mine])
    if not period:
        return None
    firsts = mine[::period]
    begins = trace.device.starts[firsts]
    if is_call.any():  # the host's time, where it launched these
        calls = np.flatnonzero(is_call & np.isin(host.correlations, trace.device.correlations[firsts]))
        begins = np.sort(host.starts[calls])
    windows = _between(begins, points) if len(begins) == len(firsts) else ()
    by = f"a sequence of {period:,} kernels repeats on one stream"
    return Inferred(windows=windows, by=by, rows=np.empty(0, np.int64)) if windows else None


def _between(boundaries: Nanoseconds, points: Nanoseconds) -> tuple[Window, ...]:
    """The windows between boundaries; the first and the last point bound one more each, if as much lies in it."""
    edges = np.unique(np.concatenate((points[:1], boundaries, points[-1:] + 1)))
    work = np.diff(np.searchsorted(points, edges))
    inner = np.median(work[1:-1]) if len(work) > 2 else work.max(initial=0)
    fits = (work >= _LEAST_WORK * inner) & (work <= _MOST_WORK * inner)
    fits[1:-1] = True
    pairs = [(start, end) for start, end, fit in zip(edges[:-1].tolist(), edges[1:].tolist(), fits) if fit]
    return tuple(Window(step=number, start=start, end=end) for number, (start, end) in enumerate(pairs))


_LEAST_PERIOD = 100
"""Shorter sequences are layers, not steps."""
_CANDIDATES = 20


def repeats_after(names: Ints) -> int:
    """After how many kernels their sequence repeats, up to its end and at least once; 0 if it does not.

    Layers repeat too, but not where forward turns into backward: over the whole sequence, names that differ from those
    one period later must be fewer than a quarter of a period. Nor is a number of layers a step: a forward pass that
    repeats as well after one of them has none.
    """
    most = len(names) // 2
    if most < _LEAST_PERIOD:
        return 0
    # How much of the sequence agrees with itself after each lag, by the product of random signs.
    signs = np.random.default_rng(0).choice((-1.0, 1.0), int(names.max()) + 1)[names]
    size = 2 ** int(2 * len(names) - 1).bit_length()
    alike = np.fft.irfft(np.abs(np.fft.rfft(signs, size)) ** 2, size)[: most + 1] / (len(names) - np.arange(most + 1))
    lags = np.argsort(-alike[1:], kind="stable")[:_CANDIDATES] + 1
    different = {lag: int((names[lag:] != names[:-lag]).sum()) for lag in lags.tolist()}
    fits = [lag for lag, count in different.items() if 4 * count < lag]
    least = min((different[lag] / (len(names) - lag) for lag in fits), default=0.0)
    found = min((lag for lag in fits if different[lag] / (len(names) - lag) <= least + 0.002), default=0)
    if found < _LEAST_PERIOD:
        return 0
    layer = int(np.argmax(alike[1:_LEAST_PERIOD])) + 1
    is_layers = float((names[layer:] != names[:-layer]).mean()) <= different[found] / (len(names) - found)
    return 0 if is_layers else found


def outermost(trace: TraceFile, rows: Rows) -> Rows:
    """The windows of the thread with most of them, in order of time, without nested ones."""
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
    """How many annotations of steps are not in ``windows``, and whether these have their own numbers."""
    host = trace.host
    codes = [code for code, name in enumerate(trace.names) if _STEP.match(name)]
    if not codes:
        return 0, False
    announced = np.isin(host.names, codes) & np.isin(host.categories, (ANNOTATION, HOST))
    names = {f"ProfilerStep#{window.step}" for window in windows}
    return int(announced.sum()) - len(windows), not names <= {trace.names[code] for code in codes}


def bounds(windows: Sequence[Window]) -> tuple[Nanoseconds, Nanoseconds]:
    """The starts and the ends of some windows."""
    pairs = np.array([(window.start, window.end) for window in windows], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def step_at(points: Rows, windows: tuple[Window, ...]) -> Ints:
    """The step in whose window each point lies; windows are disjoint and in order."""
    if not windows:
        return np.full(len(points), UNKNOWN, np.int32)
    starts, ends = bounds(windows)
    index = np.searchsorted(starts, points, side="right") - 1
    numbers = np.array([UNKNOWN if window.step is None else window.step for window in windows], np.int32)
    return np.where((index >= 0) & (points < ends[index]), numbers[index], UNKNOWN).astype(np.int32)


def device_windows(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """The steps as the device lives them: one follows the other, with the wait for its first kernel in it.

    A kernel belongs to the step that launched it. The lane that computes most runs them in order, so a step ends there
    with the last that it launched; the first step begins with its first device event, or when that lane is done with
    what was launched before, and the last ends with its last one on any lane. A step that launched nothing has no
    window.
    """
    (first, last), (first_on_main, last_on_main) = extents(spans, host_windows)
    # One that has nothing on the main lane ends before the next begins there.
    latest = np.minimum.accumulate(first_on_main[::-1])[::-1]
    ends = np.where(last_on_main == NEVER[0], np.minimum(last, latest), last_on_main)
    windows: list[Window] = []
    for number in np.flatnonzero(last != NEVER[0]).tolist():
        start = (
            windows[-1].end if windows else max(int(first[number]), _earlier_work(spans, int(first_on_main[number])))
        )
        windows.append(Window(step=host_windows[number].step, start=start, end=max(start, int(ends[number]))))
    if windows:
        final = windows[-1]
        windows[-1] = Window(step=final.step, start=final.start, end=max(final.end, int(last.max())))
    return tuple(windows)


def recorded_windows(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """:func:`device_windows` of a trace. A step that is alone, with nothing before it, begins when the host says: no
    other has a wait for its first kernel in it.
    """
    windows = device_windows(spans, host_windows)
    if len(windows) != 1 or int(spans.starts.min()) < windows[0].start:
        return windows
    begun = next(one.start for one in host_windows if one.step == windows[0].step)
    return (replace(windows[0], start=min(windows[0].start, begun)),)


def _earlier_work(spans: Spans, until: int) -> int:
    """The end of what began on the lane that computes most before ``until`` and no step launched."""
    earlier = (spans.steps == UNKNOWN) & (spans.lanes == spans.main_lane()) & (spans.starts < until)
    return int(spans.ends[earlier].max(initial=NEVER[0]))


Extremes = tuple[Rows, Rows]
NEVER = (int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max))


def extents(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Extremes, Extremes]:
    """First start and last end of what each window launched: on all lanes, and on the lane that computes most.

    The greatest and the least number where a window launched nothing there.
    """
    numbers = np.array([UNKNOWN if window.step is None else window.step for window in host_windows], np.int32)
    order = np.argsort(numbers, kind="stable")
    mine = np.flatnonzero(np.isin(spans.steps, numbers) & (spans.steps != UNKNOWN))
    found = []
    for rows in (mine, mine[spans.lanes[mine] == spans.main_lane()]):
        place = order[np.searchsorted(numbers[order], spans.steps[rows])]
        first, last = np.full(len(numbers), NEVER[1]), np.full(len(numbers), NEVER[0])
        np.minimum.at(first, place, spans.starts[rows])
        np.maximum.at(last, place, spans.ends[rows])
        found.append((first, last))
    return found[0], found[1]


_HEAD = re.compile(r"[^\w']*[A-Za-z_]+")
"""What a pattern can start with: the first word, with what stands before it."""
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_NOT_SUGGESTED = re.compile(
    rf"ProfilerStep|nccl|FSDP::|FullyShardedDataParallel|{GLOO}|{EMULATED}|## Call Compiled|Torch-Compiled"
    r"|record_param_comms|enumerate\(DataLoader"
)
"""Repeated within a step, or around none."""
_LEAST_SHARE = 0.1
"""Annotations that take a smaller part of the host's time are no steps."""
_MOST_NAMED = 8


def suggestion(trace: TraceFile) -> str:
    """A pattern for the repeated annotations that take most time, in a clause; empty where there are none."""
    counts, lengths = Counter[str](), Counter[str]()
    for name, count, ns in _annotations(trace):
        if (head := _HEAD.match(name)) and not _NOT_SUGGESTED.match(name) and meaning_of(name) is None:
            counts[head[0]] += count
            lengths[head[0]] += ns
    least = _LEAST_SHARE * (int(trace.host.ends.max()) - int(trace.host.starts.min())) if lengths else 0
    repeated = [head for head, ns in lengths.most_common() if counts[head] > 1 and ns >= least]
    if not repeated:
        return ""
    pattern = "^" + _SPECIAL.sub(r"\\\g<0>", repeated[0])
    return f"; or use --window '{pattern}', which takes its {counts[repeated[0]]} annotations as windows"


def frequent(trace: TraceFile) -> str:
    """The most frequent annotations, numbers aside."""
    counts, names = Counter[str](), defaultdict[str, set[str]](set)
    for name, count, _ in _annotations(trace):
        counts[_NUMBER.sub("#", name)] += count
        names[_NUMBER.sub("#", name)].add(name)
    if not counts:
        return "the trace has no annotations; a range of time such as 1.5s..2s needs none"
    most = counts.most_common(_MOST_NAMED)
    found = [f"{min(names[kind]) if len(names[kind]) == 1 else kind} ({count})" for kind, count in most]
    return f"the most frequent are: {', '.join(found)}"


def _annotations(trace: TraceFile) -> Iterable[tuple[str, int, int]]:
    """Name, number and total length of every annotation."""
    host, rows = trace.host, trace.host.categories == ANNOTATION
    counts = np.bincount(host.names[rows], minlength=1)
    lengths = np.bincount(host.names[rows], weights=(host.ends - host.starts)[rows], minlength=1)
    for code in np.flatnonzero(counts).tolist():
        yield trace.names[code], int(counts[code]), int(lengths[code])


_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3}
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(s|ms|us)")
_RANGE = re.compile(r"([\d.]*\d[a-z]*)?\.\.([\d.]*\d[a-z]*)?")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """What a user wants to see: annotations whose names ``pattern`` matches, or else ``[start_ns, end_ns)``.

    Times count from the trace's first event; None for its start or end. ``text`` is what the user wrote.
    """

    text: str
    pattern: "re.Pattern[str] | None" = None
    start_ns: int | None = None
    end_ns: int | None = None


def parse_window(text: str) -> WindowOptions:
    """A pattern, or a range such as ``1.5s..2s``, ``800ms..`` or ``..20us``.

    >>> parse_window("1.5s..2s").end_ns
    2000000000

    Raises:
        SpecError: it is neither.
    """
    if match := _RANGE.fullmatch(text.strip()):
        bounds: list[int | None] = []
        for part in match.groups():
            time = None if part is None else _TIME.fullmatch(part)
            if part is not None and time is None:
                raise SpecError(f"window: a range needs times with unit s, ms or us, such as 1.5s..2s; got {text}")
            bounds.append(None if time is None else int(Decimal(time[1]) * _UNITS[time[2]]))
        start, end = bounds
        if start is not None or end is not None:
            if end is not None and end <= (start or 0):
                raise SpecError(f"window: a range must end after it starts, got {text}")
            return WindowOptions(text=text, start_ns=start, end_ns=end)
    try:
        return WindowOptions(text=text, pattern=re.compile(text))
    except re.error as error:
        hint = "put a backslash before ( [ * + ? . to match them"
        raise SpecError(f"window: {text!r} is no regular expression ({error}); {hint}") from None


def chosen_windows(trace: TraceFile, options: WindowOptions) -> tuple[tuple[Window, ...], Rows]:
    """The annotations that match, numbered in order of time, and their rows of :attr:`TraceFile.host`.

    A match within another is left out; of several threads the one with most matches counts. Without annotations that
    match, operators may. A range of time has no such windows: see :func:`cut_to`.

    Raises:
        TraceError: nothing matches.
    """
    if options.pattern is None:
        return (), host_steps(trace)[1]
    rows = outermost(trace, _matches(trace, options.pattern))
    if not len(rows):
        raise TraceError(f"{trace.path}: --window {options.text!r} matches no annotation; {frequent(trace)}")
    host = trace.host
    columns = (host.starts[rows].tolist(), host.ends[rows].tolist(), host.names[rows].tolist())
    windows = tuple(
        Window(step=number, start=start, end=end, name=trace.names[code])
        for number, (start, end, code) in enumerate(zip(*columns))
    )
    return windows, rows


def _matches(trace: TraceFile, pattern: "re.Pattern[str]") -> Rows:
    host = trace.host
    named = np.isin(host.names, [code for code, name in enumerate(trace.names) if pattern.search(name)])
    rows = np.flatnonzero(named & (host.categories == ANNOTATION))
    return rows if len(rows) else np.flatnonzero(named & (host.categories == HOST))


def device_windows_apart(spans: Spans, host_windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """Windows as the device lives them, with what lies between two of them in none.

    A kernel belongs to the window that launched it. A window begins with the wait for its first kernel: when the host
    has announced it and the lane that computes most has ended what came before. It ends with the last that it launched,
    on any lane, but on other lanes only until the next one's first event. One that launched nothing is left out.
    """
    (first, last), (_, last_on_main) = extents(spans, host_windows)
    announced, _ = bounds(host_windows)
    on_main = spans.lanes == spans.main_lane()
    reach = np.concatenate(([NEVER[0]], np.maximum.accumulate(spans.ends[on_main])))
    busy_before = reach[np.searchsorted(spans.starts[on_main], first, side="left")]
    begins = np.minimum(first, np.maximum(announced, busy_before))
    next_first = np.append(np.minimum.accumulate(first[::-1])[::-1][1:], NEVER[1])
    ends = np.maximum(last_on_main, np.minimum(last, next_first))
    windows: list[Window] = []
    for number in np.flatnonzero(last != NEVER[0]).tolist():
        start = max(int(begins[number]), windows[-1].end if windows else NEVER[0])
        windows.append(replace(host_windows[number], start=start, end=max(start, int(ends[number]))))
    return tuple(windows)


def cut_to(timeline: Timeline, trace: TraceFile, options: WindowOptions) -> Timeline:
    """The timeline with the range of time as its only window; a span belongs to it if it starts there.

    Raises:
        TraceError: nothing of the trace lies in the range.
    """
    tables = [events for events in (trace.host, trace.device) if len(events.starts)]
    origin = min(int(events.starts.min()) for events in tables)
    close = max(int(events.ends.max()) for events in tables)
    start, end = origin + (options.start_ns or 0), close if options.end_ns is None else origin + options.end_ns
    if start >= close:
        raise TraceError(
            f"{trace.path}: --window {options.text} lies after the trace's end; the trace is "
            f"{format_ns(close - origin)} long, and times count from its first event"
        )
    windows = (Window(step=0, start=start, end=min(end, close), name=options.text),)
    spans = replace(timeline.spans, steps=step_at(timeline.spans.starts, windows))
    collectives = tuple(
        replace(one, step=0 if one.start is not None and start <= one.start < end else None)
        for one in timeline.collectives
    )
    return replace(timeline, windows=windows, host_windows=windows, spans=spans, collectives=collectives)


def window_figures(options: WindowOptions, steps: Sequence[StepFigures]) -> WindowFigures:
    """Sums over the windows of each kind.

    A kind is what the pattern's parentheses matched, or else the name without its numbers: batches differ in these.
    """
    members: dict[str, list[StepFigures]] = defaultdict(list)
    for step in steps:
        kind = step.name or ""
        if options.pattern is not None and (match := options.pattern.search(kind)):
            kind = " ".join(part for part in match.groups() if part) or _NUMBER.sub("#", kind)
        members[kind].append(step)
    groups = []
    for kind, own in members.items():
        names, parts = {step.name for step in own}, [step.breakdown for step in own]
        totals = {key: sum(getattr(part, key) for part in parts) for key in _SUMMED}
        lengths = [part.span_ns for part in parts]
        name = (names.pop() or kind) if len(names) == 1 and "#" in kind else kind
        groups.append(
            WindowGroup(name=name, count=len(parts), shortest_ns=min(lengths), longest_ns=max(lengths), **totals)
        )
    return WindowFigures(window=options.text, groups=tuple(groups))


_SUMMED = ("span_ns", "compute_ns", "comm_ns", "exposed_ns", "idle_ns")


def window_warnings(trace: TraceFile, timeline: Timeline, options: WindowOptions | None) -> Iterator[TraceWarning]:
    """Matches that are no window, and what ran outside of all windows that a pattern chose."""
    if options is None or options.pattern is None:
        return
    if unused := len(_matches(trace, options.pattern)) - len(timeline.host_windows):
        text = f"{unused} annotations that --window matches lie within others or on other threads and are left out; "
        text += "a narrower pattern chooses between them"
        yield TraceWarning(code="windows_overlap", message=text, count=unused)
    lived = {window.step for window in timeline.windows}
    if idle := sum(window.step not in lived for window in timeline.host_windows):
        text = f"{idle} windows launched nothing on the device and are left out"
        yield TraceWarning(code="windows_without_work", message=text, count=idle)
    busy = timeline.busy(*Kind)
    if outside := busy.length - int(busy.within(*bounds(timeline.windows)).sum()):
        text = (
            f"{format_ns(outside)} of what ran ({format_percent(outside / busy.length)}) lies outside of all windows, "
        )
        yield TraceWarning(code="outside_windows", message=text + "and in no window's figures", ns=outside)
