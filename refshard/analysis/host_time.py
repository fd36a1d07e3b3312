"""What the host does with its time in the steps, by the innermost event on the threads that launch."""

import re
from collections import Counter, defaultdict

import numpy as np

from refshard.analysis.figures import HostPart, HostTime, HostWork
from refshard.analysis.kineto import find_launches
from refshard.analysis.labels import Nesting, innermost_on, nested_order
from refshard.analysis.names import GRAPH_LAUNCHES, LAUNCHES, SYNCHRONISES
from refshard.events.table import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Ints, Nanoseconds, Rows, Timeline

_STEPS = re.compile(r"^ProfilerStep#")
_MODES, _SUBCLASSES = re.compile(r"^PythonDispatchMode"), re.compile(r"^Python(?:Subclass|TLSSnapshot)")
"""torch's names for calls into ``__torch_dispatch__``, of modes and of tensor subclasses."""
_KINDS: tuple[tuple[HostWork, int, "re.Pattern[str]"], ...] = (
    ("launches", LAUNCH, re.compile(f"{LAUNCHES.pattern}|{GRAPH_LAUNCHES.pattern}")),
    ("waits", LAUNCH, SYNCHRONISES), ("calls", LAUNCH, re.compile("")),
    ("modes", HOST, _MODES), ("subclasses", HOST, _SUBCLASSES),
    ("autograd", HOST, re.compile(r"^autograd::|^torch::autograd|Backward\d*$|^AccumulateGrad")),
    ("operators", HOST, re.compile("")), ("annotations", ANNOTATION, re.compile("")),
)  # fmt: skip
_NUMBERED = re.compile(r" ?\(.*\)$| for .*$|\d+$")
_MOST_NAMED = 5


def host_pieces(trace: TraceFile, thread: int) -> tuple[Nanoseconds, Nanoseconds, Rows]:
    """A thread's time in pieces: where each starts and ends, and the row of :attr:`TraceFile.host` of its innermost
    event, :data:`UNKNOWN` where none holds.
    """
    host, steps = trace.host, [code for code, name in enumerate(trace.names) if _STEPS.match(name)]
    mine = (host.threads == thread) & (host.ends > host.starts) & np.isin(host.categories, (HOST, ANNOTATION, LAUNCH))
    rows = np.flatnonzero(mine & ~np.isin(host.names, steps))
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    cuts = np.sort(np.concatenate((host.starts[rows], host.ends[rows])))  # not np.unique, which hashes
    cuts = cuts[np.append(True, cuts[1:] > cuts[:-1])] if len(cuts) else cuts
    place = Nesting.of(host.starts[rows], host.ends[rows]).innermost(cuts[:-1])
    return cuts[:-1], cuts[1:], np.where(place == UNKNOWN, UNKNOWN, np.append(rows, UNKNOWN)[place])


def dispatching(trace: TraceFile, threads: Ints) -> Intervals:
    """When a mode in Python dispatches operators on one of these threads, without the operators that it calls."""
    found = Intervals.of([])
    codes = [code for code, name in enumerate(trace.names) if _MODES.match(name)]
    for thread in np.unique(threads[threads != UNKNOWN]).tolist() if codes else ():
        starts, ends, rows = host_pieces(trace, thread)
        mine = (rows != UNKNOWN) & np.isin(trace.host.names[rows], codes)
        found |= Intervals.union(starts[mine], ends[mine])
    return found


def host_time(trace: TraceFile, timeline: Timeline) -> HostTime | None:
    """The host's time in the steps; None of a trace without a device's events, or without operators and launches."""
    if not timeline.on_device:
        return None
    host, launches = trace.host, find_launches(trace)
    threads = np.unique(launches.threads[launches.threads != UNKNOWN]).tolist()
    pieces = {thread: own for thread in threads if len((own := host_pieces(trace, thread))[0])}
    if not pieces or not np.any(host.categories == HOST):
        return None
    first = min(int(starts.min()) for starts, _, _ in pieces.values())
    last = max(int(ends.max()) for _, ends, _ in pieces.values())
    windows = Intervals.of([(one.start, one.end) for one in timeline.host_windows] or [(first, last)])
    kind_of = np.full(len(host.names), len(_KINDS), np.int64)
    for code, (_, category, pattern) in reversed(list(enumerate(_KINDS))):
        named = np.array([bool(pattern.search(name)) for name in trace.names], np.bool_)
        kind_of[(host.categories == category) & named[host.names]] = code
    annotations = next(code for code, one in enumerate(_KINDS) if one[0] == "annotations")
    # While one thread computes, another stands in an annotation, or in nothing, and waits for it.
    busy = {thread: Intervals.union(*(of[rows != UNKNOWN][kind_of[rows[rows != UNKNOWN]] != annotations]
                                      for of in (starts, ends)))
            for thread, (starts, ends, rows) in pieces.items()}  # fmt: skip
    found = defaultdict[HostWork, Counter[str]](Counter)
    counts, covered = Counter[HostWork](), Intervals.of([])
    for thread, (starts, ends, rows) in pieces.items():
        known = rows != UNKNOWN
        starts, ends, rows = starts[known], ends[known], rows[known]
        covered |= Intervals.union(starts, ends)
        free = windows
        for other in pieces:
            free = free if other == thread else free - busy[other]
        is_note = kind_of[rows] == annotations
        ns = np.where(is_note, free.within(starts, ends), windows.within(starts, ends))
        names = np.bincount(host.names[rows], weights=ns, minlength=1)
        kinds = dict(zip(host.names[rows].tolist(), kind_of[rows].tolist()))
        for code in np.flatnonzero(names).tolist():
            found[_KINDS[kinds[code]][0]][_NUMBERED.sub("", trace.names[code]) or trace.names[code]] += int(names[code])
        seen = np.zeros(len(host.names), np.bool_)
        seen[rows] = True
        inside = np.flatnonzero(seen)
        inside = inside[windows.within(host.starts[inside], host.starts[inside] + 1) > 0]
        for code, count in enumerate(np.bincount(kind_of[inside], minlength=len(_KINDS)).tolist()[: len(_KINDS)]):
            counts[_KINDS[code][0]] += count
    outside = windows - covered
    found["python"] = _lines(trace, outside, threads) or Counter({"": outside.length})
    return HostTime(
        steps=max(1, len(timeline.host_windows)), span_ns=windows.length, launches=counts["launches"],
        parts=tuple(
            HostPart(kind=kind, ns=names.total(), count=counts[kind], most=tuple(names.most_common(_MOST_NAMED)))
            for kind, names in sorted(found.items(), key=lambda item: -item[1].total())
            if names.total()
        ),
    )  # fmt: skip


def _lines(trace: TraceFile, outside: Intervals, threads: list[int]) -> Counter[str]:
    """The time outside of operators by the user's innermost Python function, where the trace has them."""
    found, frames = Counter[str](), trace.frames
    if not len(frames.starts):
        return found
    lengths = outside.ends - outside.starts
    points, place = (outside.starts + outside.ends) // 2, np.full(len(lengths), UNKNOWN, np.int64)
    for thread in threads:
        at = np.full(len(points), thread, np.int32)
        here = innermost_on(frames.threads, frames.starts, frames.ends, at, points)
        place = np.where(place == UNKNOWN, here, place)
    for row, ns in zip(place.tolist(), lengths.tolist()):
        found["" if row == UNKNOWN else frames.name_table[frames.names[row]]] += ns
    return found
