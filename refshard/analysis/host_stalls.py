"""Calls of the host that make the GPU wait (synchronise, allocate, load modules), and the idle time they cause."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import HostStall, HostStalls, Stall
from refshard.analysis.kineto import Launches, find_launches
from refshard.analysis.labels import column_at, find_labels, innermost_of, innermost_on, named, outermost_of
from refshard.analysis.names import ALLOCATES, COPIES, GRAPH_LAUNCHES, LAUNCHES, LOADS, LONG_NS, MAY_LOAD, SYNCHRONISES
from refshard.analysis.overlap import NEVER, Gaps, idle_gaps
from refshard.analysis.windows import bounds, step_at
from refshard.events.table import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.events.timeline import (
    UNKNOWN,
    Intervals,
    Ints,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    grouped,
    ranges,
    sums,
)

TIMES_THE_MEDIAN = 20
"""A launch is long if it takes :data:`LONG_NS`, and this many times the median of all launches."""
STALLS = tuple(Stall)
"""Kinds by their code in :attr:`Calls.kinds`."""

_STEPS = re.compile(r"^ProfilerStep#")
_BY_OPERATOR = {
    Stall.ITEM: ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
    Stall.SHAPE: ("aten::nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
                  "aten::masked_select", "aten::repeat_interleave", "aten::bincount"),
    Stall.COPY: ("aten::copy_", "aten::_to_copy", "aten::to"),
}  # fmt: skip
"""What a wait or a copy is for, by the innermost operator around it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Calls of one trace, ordered by thread and start, none within another.

    ``rows`` are those of :class:`~refshard.events.table.HostEvents`. ``kinds`` index :data:`STALLS`. ``names``,
    ``operators``, ``annotations`` and ``copies`` index :attr:`TraceFile.names`, ``frames`` the names of its frames,
    ``units`` :attr:`unit_names`; :data:`UNKNOWN` if absent. ``occurrences`` are alike for the calls that one
    operator makes for one purpose.
    """

    rows: Rows
    starts: Nanoseconds
    ends: Nanoseconds
    threads: Ints
    kinds: npt.NDArray[np.int8]
    names: Ints
    operators: Ints
    annotations: Ints
    frames: Ints
    units: Ints
    copies: Ints
    occurrences: Rows
    unit_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.starts)


def find_calls(trace: TraceFile, spans: Spans, launches: Launches, starved: Intervals) -> Calls:
    """The calls that may hold the GPU up. ``starved`` is when nothing runs and nothing is queued."""
    host = trace.host
    every = np.flatnonzero(host.categories == LAUNCH)
    lengths, of_calls = host.ends[every] - host.starts[every], host.names[every]
    # For each call the copy that it launched, if that touches pageable memory, and if the call returned only after it.
    copies, (pageable, awaited) = np.full(len(every), UNKNOWN, np.int32), np.zeros((2, len(every)), np.bool_)
    is_memcpy = np.array([name.startswith("Memcpy") for name in trace.names] or [False])
    of_copies = np.flatnonzero(is_memcpy[spans.names] & (launches.calls != UNKNOWN))
    of_copies = of_copies[host.categories[launches.calls[of_copies]] == LAUNCH]
    callers = np.searchsorted(every, launches.calls[of_copies])
    copies[callers] = spans.names[of_copies]
    pageable[callers] = np.array(["Pageable" in name for name in trace.names] or [False])[spans.names[of_copies]]
    awaited[callers] = host.ends[every[callers]] >= spans.ends[of_copies]
    is_launch, is_copy = named(trace, LAUNCHES, of_calls), named(trace, COPIES, of_calls)
    is_long = lengths > LONG_NS
    if is_launch.any():
        is_long &= ~is_launch | (lengths > TIMES_THE_MEDIAN * np.median(lengths[is_launch]))
    starving = np.zeros(len(every), np.bool_)
    starving[is_long] = starved.within(host.starts[every[is_long]], host.ends[every[is_long]]) > 0
    conditions = (
        (named(trace, SYNCHRONISES, of_calls), Stall.SYNC), (named(trace, ALLOCATES, of_calls), Stall.ALLOCATOR),
        (named(trace, LOADS, of_calls) | (is_long & named(trace, MAY_LOAD, of_calls)), Stall.LOADING),
        (is_copy & (~is_launch | (pageable & (is_long | awaited))), Stall.COPY),
        (is_long & is_launch & starving, Stall.LOADING), (is_long & is_launch, Stall.QUEUE),
        (is_long & ~named(trace, GRAPH_LAUNCHES, of_calls), Stall.OTHER),
    )  # fmt: skip
    codes = [STALLS.index(kind) for _, kind in conditions]
    kinds = np.select([condition for condition, _ in conditions], codes, UNKNOWN).astype(np.int8)
    rows = every[kinds != UNKNOWN]
    by_thread = [outermost_of(host, rows[host.threads[rows] == one]) for one in np.unique(host.threads[rows]).tolist()]
    rows = np.concatenate([rows[:0], *by_thread])
    threads, starts, place = host.threads[rows], host.starts[rows], np.searchsorted(every, rows)
    kinds, copies = kinds[place], copies[place]
    is_step = named(trace, _STEPS)
    around = {
        category: innermost_of(trace, np.flatnonzero((host.categories == category) & ~is_step), rows)
        for category in (HOST, ANNOTATION)
    }
    operators = column_at(host.names, around[HOST])
    waits = np.isin(kinds, [STALLS.index(kind) for kind in (Stall.SYNC, Stall.COPY)])
    for kind, names in _BY_OPERATOR.items():  # what a wait or a copy is for
        is_such = np.isin(operators, [code for code, name in enumerate(trace.names) if name in names])
        kinds[waits & is_such] = STALLS.index(kind)
    frames, labels = trace.frames, find_labels(trace)
    frame = innermost_on(frames.threads, frames.starts, frames.ends, threads, starts)
    merged = np.isin(kinds, [STALLS.index(kind) for kind in _BY_OPERATOR]) & (around[HOST] != UNKNOWN)
    return Calls(
        rows=rows, starts=starts, ends=host.ends[rows], threads=threads, kinds=kinds, names=host.names[rows],
        operators=operators, annotations=column_at(host.names, around[ANNOTATION]),
        frames=column_at(frames.names, frame), units=labels.of_work(threads, starts)[0].astype(np.int32),
        copies=copies, occurrences=np.where(merged, around[HOST], rows), unit_names=labels.unit_names,
    )  # fmt: skip


def find_host_stalls(trace: TraceFile, timeline: Timeline) -> HostStalls | None:
    """What holds the GPU up in this trace; None for a trace without a GPU's events."""
    if not timeline.on_device:
        return None
    if not np.any(trace.host.categories == LAUNCH):
        return HostStalls(places=None, reason="the trace holds no calls of the CUDA or HIP runtime")
    launches = find_launches(trace)
    if not np.any(launches.calls != UNKNOWN):
        return HostStalls(places=None, reason="no call of the trace has the correlation id of a kernel")
    starts, ends = bounds(timeline.windows)
    # Calls before the first kernel and after the last find the GPU idle too.
    first, last = min(starts.min(), trace.host.starts.min()), max(ends.max(), trace.host.ends.max())
    gaps = idle_gaps(timeline, int(first), int(last))
    # Nothing runs, and the call that launches what runs next has not returned.
    queued = np.where(gaps.followers == UNKNOWN, NEVER, timeline.spans.queued[gaps.followers])
    starved = Intervals(gaps.starts[queued > gaps.starts], np.minimum(gaps.ends, queued)[queued > gaps.starts])
    calls = find_calls(trace, timeline.spans, launches, starved)
    windows = Intervals.union(starts, ends)
    idle, followed = idle_caused(timeline.spans.starts, gaps, launches, calls, windows)
    has_steps = timeline.windows[0].step is not None
    counted = step_at(calls.starts, timeline.host_windows) != UNKNOWN if has_steps else np.ones(len(calls), np.bool_)
    return HostStalls(
        places=_places(trace, calls, np.flatnonzero(counted), idle, followed),
        steps=len(timeline.windows) if has_steps else None,
        span_ns=windows.length,
        idle_ns=int(windows.within(gaps.starts, gaps.ends).sum()),
    )


def idle_caused(
    kernels: Nanoseconds, gaps: Gaps, launches: Launches, calls: Calls, windows: Intervals
) -> tuple[Nanoseconds, Nanoseconds]:
    """Idle time within ``windows`` that each call causes, and all that follows it; ``kernels`` are the spans' starts.

    A gap that ends with the first span of a launch, which was not queued yet when the gap began, may be due to the
    calls that the launching thread began since its previous launch, that one and this one included. Each nanosecond of
    the gap follows the call that began last. Without the calls the launch would have come earlier by their durations:
    they cause so much of the gap's end, and share it in proportion. The duration of a call that launches counts for the
    gap before its own span as far as the call stands in that gap, the rest for the gap after.
    """
    caused, followed = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64)
    first_span = np.full(int(calls.rows.max(initial=-1)) + 1, NEVER, np.int64)  # that each host event launched
    rows = np.flatnonzero((launches.calls != UNKNOWN) & (launches.calls < len(first_span)))
    np.minimum.at(first_span, launches.calls[rows], kernels[rows])
    own = first_span[calls.rows]
    until_own = np.maximum(calls.starts, np.where(own == NEVER, calls.starts, np.minimum(own, calls.ends)))
    before_own = Intervals(gaps.starts, gaps.ends).within(calls.starts, until_own)
    follower = gaps.followers
    ended = np.flatnonzero((follower != UNKNOWN) & (gaps.ends > gaps.starts))
    _, first = np.unique(launches.calls, return_index=True)
    ended = ended[(launches.calls[follower[ended]] != UNKNOWN) & np.isin(follower[ended], first)]
    ended = ended[launches.queued[follower[ended]] > gaps.starts[ended]]
    for thread in np.unique(calls.threads).tolist():
        mine = ended[launches.threads[follower[ended]] == thread]
        launch, points = launches.points[follower[mine]], np.unique(launches.points[launches.threads == thread])
        before = np.searchsorted(points, launch, side="left") - 1
        previous = np.where(before < 0, -NEVER, points[before] if len(points) else 0)
        low, high = np.searchsorted(calls.threads, (thread, thread + 1)).tolist()
        from_ = low + np.searchsorted(calls.starts[low:high], previous, side="left")
        to = low + np.searchsorted(calls.starts[low:high], launch, side="right")
        place, call = ranges(from_, to)
        start, end = gaps.starts[mine][place], gaps.ends[mine][place]
        begin = np.maximum(start, calls.starts[call])
        until = np.where(
            call == to[place] - 1, end, np.minimum(end, calls.starts[np.minimum(call + 1, len(calls) - 1)])
        )
        followed_here = np.maximum(0, until - begin)
        np.add.at(followed, call, np.where(followed_here > 0, windows.within(begin, begin + followed_here), 0))
        launches_itself = calls.rows[call] == launches.calls[follower[mine]][place]
        delay = np.where(launches_itself, before_own[call], (calls.ends - calls.starts - before_own)[call])
        total = sums(place, delay, len(mine))
        idle = np.minimum(total, sums(place, followed_here, len(mine)))
        idle = windows.within(gaps.ends[mine] - idle, gaps.ends[mine])
        np.add.at(caused, call, _shares(place, delay, total, idle))
    return caused, followed


def _shares(place: Rows, parts: Nanoseconds, totals: Nanoseconds, amounts: Nanoseconds) -> Nanoseconds:
    """``amounts[place]`` divided in proportion to ``parts``, which add up to ``totals``; whole, and with nothing lost.

    ``place`` is ordered.
    """
    reached = np.cumsum(parts)
    before = (np.cumsum(totals) - totals)[place]
    scale = np.where(totals > 0, amounts / np.maximum(totals, 1), 0.0)[place]
    up_to = np.rint((reached - before) * scale).astype(np.int64)
    from_ = np.rint((reached - parts - before) * scale).astype(np.int64)
    return np.asarray(up_to - from_, np.int64)


def _places(
    trace: TraceFile, calls: Calls, rows: Rows, idle: Nanoseconds, followed: Nanoseconds
) -> tuple[HostStall, ...]:
    """Sums over the calls of each kind and place."""
    known = calls.frames[rows] != UNKNOWN
    units = np.where(known, UNKNOWN, calls.units[rows])
    annotations = np.where(known | (units != UNKNOWN), UNKNOWN, calls.annotations[rows])
    operators = calls.operators[rows]
    threads = np.where(known | (operators != UNKNOWN) | (units != UNKNOWN), UNKNOWN, calls.threads[rows])
    firsts, group = grouped(calls.kinds[rows], calls.frames[rows], operators, units, annotations, threads)

    def text(table: Sequence[str], code: int) -> str | None:
        return None if code == UNKNOWN else table[code]

    found = []
    for place in np.argsort(firsts).tolist():
        mine = rows[group == place]
        row, lengths, copies = int(mine[0]), (calls.ends - calls.starts)[mine], calls.copies[mine]
        found.append(
            HostStall(
                kind=STALLS[calls.kinds[row]],
                call=trace.names[int(np.argmax(np.bincount(calls.names[mine], weights=lengths)))],
                line=text(trace.frames.name_table, calls.frames[row]), operator=text(trace.names, calls.operators[row]),
                unit=text(calls.unit_names, calls.units[row]) or text(trace.names, calls.annotations[row]),
                thread="/".join(trace.threads[int(calls.threads[row])]),
                copied=next((trace.names[code] for code in copies.tolist() if code != UNKNOWN), None),
                count=len(np.unique(calls.occurrences[mine])), host_ns=int(lengths.sum()),
                idle_ns=int(idle[mine].sum()), followed_ns=int(followed[mine].sum()),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.idle_ns, -one.host_ns, one.call)))
