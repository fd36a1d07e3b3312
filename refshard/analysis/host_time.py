"""What the host does with its time in the steps, by the innermost event on the threads that launch."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from refshard.analysis.figures import HostPart, HostTime, HostWork
from refshard.analysis.kineto import find_launches
from refshard.analysis.labels import Nesting, innermost_on, named, nested_order, when_named
from refshard.analysis.names import GRAPH_LAUNCHES, LAUNCHES, READS_INPUT, SYNCHRONISES
from refshard.events.table import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Ints, Kind, Mask, Nanoseconds, Rows, Timeline

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


def _rows(trace: TraceFile, *threads: int) -> Rows:
    """The events of these threads that last, without steps."""
    host, steps = trace.host, [code for code, name in enumerate(trace.names) if _STEPS.match(name)]
    found = np.isin(host.threads, threads) & (host.ends > host.starts) & ~np.isin(host.names, steps)
    return np.flatnonzero(found & np.isin(host.categories, (HOST, ANNOTATION, LAUNCH)))


@dataclass(frozen=True, slots=True)
class _Thread:
    """A thread's events, outer before inner; ``parents`` are places among them, :data:`UNKNOWN` for the outermost."""

    rows: Rows
    starts: Nanoseconds
    ends: Nanoseconds
    parents: Rows

    @classmethod
    def of(cls, trace: TraceFile, thread: int) -> "_Thread":
        host, rows = trace.host, _rows(trace, thread)
        rows = rows[nested_order(host.starts[rows], host.ends[rows])]
        starts, ends = host.starts[rows], host.ends[rows]
        return cls(rows=rows, starts=starts, ends=ends, parents=Nesting.of(starts, ends).parents())

    def own(self, lengths: Nanoseconds) -> Nanoseconds:
        """Each event's length without its children's."""
        inner = self.parents != UNKNOWN
        enclosed = np.bincount(self.parents[inner], weights=lengths[inner], minlength=len(lengths))
        return np.maximum(0, lengths - enclosed.astype(np.int64))

    def pieces(self, chosen: Mask) -> tuple[Nanoseconds, Nanoseconds, Rows]:
        """When the innermost event is a chosen one: starts, ends, and the rows of :attr:`TraceFile.host`."""
        enclosed = (self.parents != UNKNOWN) & chosen[self.parents]
        some = np.flatnonzero(chosen | enclosed)
        starts, ends = self.starts[some], self.ends[some]
        cuts = np.sort(np.concatenate((starts, ends)))  # not np.unique, which hashes
        cuts = cuts[np.append(True, cuts[1:] > cuts[:-1])] if len(cuts) else cuts
        place = Nesting.of(starts, ends).innermost(cuts[:-1])
        held = (place != UNKNOWN) & chosen[some[place]] if len(some) else place != UNKNOWN
        return cuts[:-1][held], cuts[1:][held], self.rows[some[place[held]]]


def dispatching(trace: TraceFile, threads: Ints) -> Intervals:
    """When a mode in Python dispatches operators on one of these threads, without the operators that it calls."""
    found = Intervals.of([])
    codes = [code for code, name in enumerate(trace.names) if _MODES.match(name)]
    for thread in np.unique(threads[threads != UNKNOWN]).tolist() if codes else ():
        events = _Thread.of(trace, thread)
        starts, ends, _ = events.pieces(np.isin(trace.host.names[events.rows], codes))
        found |= Intervals.union(starts, ends)
    return found


def host_time(trace: TraceFile, timeline: Timeline) -> HostTime | None:
    """The host's time in the steps; None of a trace without a device's events, or without operators and launches."""
    if not timeline.on_device:
        return None
    host, launches = trace.host, find_launches(trace)
    threads = np.unique(launches.threads[launches.threads != UNKNOWN]).tolist()
    rows = _rows(trace, *threads)
    if not len(rows) or not np.any(host.categories == HOST):
        return None
    extent = (int(host.starts[rows].min()), int(host.ends[rows].max()))
    windows, rows = Intervals.of([(one.start, one.end) for one in timeline.host_windows] or [extent]), rows[:0]
    kind_of = np.full(len(host.names), len(_KINDS), np.int8)
    for code, (_, category, pattern) in reversed(list(enumerate(_KINDS))):
        kind_of[(host.categories == category) & named(trace, pattern)] = code
    annotations = next(code for code, one in enumerate(_KINDS) if one[0] == "annotations")
    found, counts = defaultdict[HostWork, Counter[str]](Counter), Counter[HostWork]()

    def add(rows: Rows, times: Nanoseconds) -> None:
        spent = np.bincount(host.names[rows], weights=times, minlength=len(trace.names))
        kinds = np.zeros(len(trace.names), np.int8)
        kinds[host.names[rows]] = kind_of[rows]
        for code in np.flatnonzero(spent).tolist():
            name = _NUMBERED.sub("", trace.names[code]) or trace.names[code]
            found[_KINDS[kinds[code]][0]][name] += int(spent[code])

    def take(thread: int) -> tuple[tuple[Nanoseconds, Nanoseconds, Rows], Intervals]:
        events = _Thread.of(trace, thread)
        kinds = kind_of[events.rows]
        plain = kinds != annotations
        add(events.rows[plain], events.own(windows.within(events.starts, events.ends))[plain])
        inside = (events.own(events.ends - events.starts) > 0) & (windows.within(events.starts, events.starts + 1) > 0)
        for code, count in enumerate(np.bincount(kinds[inside], minlength=len(_KINDS)).tolist()[: len(_KINDS)]):
            counts[_KINDS[code][0]] += count
        return events.pieces(~plain), Intervals.union(events.starts, events.ends)

    taken = {thread: take(thread) for thread in threads}
    # While one thread computes, another stands in an annotation, or in nothing, and waits for it.
    busy = {thread: covered - Intervals.union(starts, ends) for thread, ((starts, ends, _), covered) in taken.items()}
    for thread, ((starts, ends, rows), _) in taken.items():
        free = windows
        for other in threads:
            free = free if other == thread else free - busy[other]
        add(rows, free.within(starts, ends))
    outside = windows
    for _, covered in taken.values():
        outside -= covered
    found["python"] = _lines(trace, outside, threads) or Counter({"": outside.length})
    return HostTime(
        steps=max(1, len(timeline.host_windows)), span_ns=windows.length, launches=counts["launches"],
        input_ns=(when_named(trace, READS_INPUT, HOST, ANNOTATION) & windows - timeline.busy(*Kind)).length,
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
