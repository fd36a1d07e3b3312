"""Where the time of a window goes: its classes, exposed communication, lone copies, and idle time by cause."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import Breakdown, Cause, IdleFigures, LoneCopy
from refshard.analysis.windows import bounds
from refshard.errors import TraceError
from refshard.events.timeline import (
    UNKNOWN,
    HostCalls,
    Intervals,
    Kind,
    Mask,
    Meaning,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    ranges,
    rows_of,
    sums,
)

NEVER = int(np.iinfo(np.int64).max)
"""The launch of a span that no span on its lane is known to have been launched after, and of one that never comes."""
LATENCIES = 1.5
"""A span that starts within this many launch latencies of its launch waited for nothing else."""
SHORTEST_NS, LONGEST_NS, DISTANCES = 2_000, 10_000, 3
"""Largest gap between queued kernels: this many times the lower quartile of their gaps, within these bounds."""
LONGEST_WAIT_NS = 100_000
"""A stream that waits for another's work goes on within this time after that work has ended."""


CAUSES = tuple(Cause)
"""Causes by their code in :attr:`Gaps.causes`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """Maximal intervals ``[starts[i], ends[i])`` in which nothing runs, in order.

    ``followers`` are the rows that begin where the gap ends; of several the one launched first, of these the one on the
    first lane; :data:`UNKNOWN` where nothing comes any more. ``before`` are the rows that end where it begins, of
    several the one that the follower is known to have waited for, or else one on its lane. ``causes`` are codes of
    :data:`CAUSES`. ``calls`` are rows of :class:`HostCalls`: the call that the launching thread stood in for longest;
    :data:`UNKNOWN` for none.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    followers: Rows
    before: Rows
    causes: npt.NDArray[np.int8]
    calls: Rows

    def split(self, starts: Nanoseconds, ends: Nanoseconds) -> "Gaps":
        """The gaps' parts in each of the sorted, disjoint windows."""
        first = np.searchsorted(self.ends, starts, side="right")
        windows, rows = ranges(first, np.where(starts < ends, np.searchsorted(self.starts, ends, side="left"), first))
        cut = self.of(rows)
        starts, ends = np.maximum(cut.starts, starts[windows]), np.minimum(cut.ends, ends[windows])
        return replace(cut, starts=starts, ends=ends)

    def of(self, rows: Mask | Rows) -> "Gaps":
        """Some of them."""
        return rows_of(self, rows)

    def caused_by(self, *causes: Cause) -> Mask:
        """Which have one of these causes."""
        return np.isin(self.causes, [CAUSES.index(cause) for cause in causes])


def knows_launches(spans: Spans) -> bool:
    """Whether the trace has the launch time of any span."""
    return bool(np.any(spans.launches != UNKNOWN))


def latest_launches(spans: Spans, times: Nanoseconds | None = None) -> Nanoseconds:
    """When each span was launched (or another of its ``times``), or, where that is unknown, at the latest;
    :data:`NEVER` where nothing bounds it.

    A lane runs in the order of launches, so a span was launched no later than the next one on its lane.
    """
    times = spans.launches if times is None else times
    order = np.argsort(spans.lanes, kind="stable")
    launches, lanes = np.where(times == UNKNOWN, NEVER, times)[order], spans.lanes[order]
    known = np.where(launches == NEVER, len(order), np.arange(len(order)))
    following = np.minimum.accumulate(known[::-1])[::-1]
    bounded = following < len(order)
    bounded[bounded] = lanes[following[bounded]] == lanes[bounded]
    launches[bounded] = launches[following[bounded]]
    found = np.empty(len(order), np.int64)
    found[order] = launches
    return found


def idle_gaps(timeline: Timeline, start: int, end: int) -> Gaps:
    """The gaps between all spans; before them since ``start``, after them to ``end``, each with its cause.

    Spans of no length neither end a gap nor divide it. Without any launch every cause is unknown.
    """
    spans, busy = timeline.spans, timeline.busy(*Kind)
    starts = np.concatenate(([min([start, *busy.starts[:1].tolist()])], busy.ends)).astype(np.int64)
    ends = np.concatenate((busy.starts, [max([end, *busy.ends[-1:].tolist()])])).astype(np.int64)
    launches = latest_launches(spans)
    lasting = np.flatnonzero(spans.ends > spans.starts)
    order = lasting[np.lexsort((spans.lanes[lasting], launches[lasting], spans.starts[lasting]))]
    followers = np.full(len(ends), UNKNOWN, np.int64)
    followers[:-1] = order[np.searchsorted(spans.starts[order], ends[:-1], side="left")]
    # A row that ends as the gap begins, one on the follower's lane if there is any.
    order = lasting[np.lexsort((spans.lanes[lasting], spans.ends[lasting]))]
    first, last = (np.searchsorted(spans.ends[order], starts, side=side) for side in ("left", "right"))
    before = np.where(first < last, np.append(order, UNKNOWN)[np.minimum(first, len(order))], UNKNOWN)
    for gap in np.flatnonzero((last - first > 1) & (followers != UNKNOWN)).tolist():  # streams rarely end together
        ending = order[first[gap] : last[gap]]
        same = ending[spans.lanes[ending] == spans.lanes[followers[gap]]]
        before[gap] = same[0] if len(same) else before[gap]
    found = Gaps(
        starts=starts, ends=ends, followers=followers, before=before,
        causes=np.full(len(ends), CAUSES.index(Cause.UNKNOWN), np.int8), calls=np.full(len(ends), UNKNOWN, np.int64),
    )  # fmt: skip
    return _explained(found, timeline, launches) if knows_launches(spans) else found


def ended_by_launch(starts: Nanoseconds, ends: Nanoseconds, queued: Nanoseconds, soon: float = 0) -> Mask:
    """Which gaps the launch ended that was ``queued`` in them: it took half of the gap or more, or its follower started
    ``soon`` after it, or within :data:`LONGEST_NS`. Otherwise something else held the follower back.
    """
    late = np.maximum(queued - starts, 0)
    return np.asarray((late > 0) & (ends - queued <= np.maximum(late, max(LONGEST_NS, soon))), np.bool_)


def _explained(gaps: Gaps, timeline: Timeline, launches: Nanoseconds) -> Gaps:
    """The gaps with their causes; ``launches`` are the latest that each span can have been launched at."""
    spans, calls = timeline.spans, timeline.calls
    lengths, comes = gaps.ends - gaps.starts, gaps.followers != UNKNOWN
    launched = np.where(comes, launches[gaps.followers], NEVER)
    queued = np.where(comes, latest_launches(spans, spans.queued)[gaps.followers], NEVER)
    late = launched > gaps.starts
    measured = late & comes & (launched <= gaps.ends)
    measured[:1] = False  # before the first gap no queue is known
    latency = float(np.median((gaps.ends - launched)[measured])) if measured.any() else 0.0
    soon = LATENCIES * latency
    empty = ended_by_launch(gaps.starts, gaps.ends, queued, soon) | (gaps.ends - launched <= soon)
    ordered = comes & (gaps.before != UNKNOWN) & (spans.lanes[gaps.before] == spans.lanes[gaps.followers])
    queued_apart = lengths[ordered & ~empty]
    usual = DISTANCES * float(np.percentile(queued_apart, 25)) if len(queued_apart) else 0.0
    near = lengths <= min(max(usual, SHORTEST_NS), LONGEST_NS)
    depends, before = _dependencies(gaps, timeline, near & ~ordered & (gaps.before != UNKNOWN))
    depends &= lengths <= LONGEST_WAIT_NS
    blocked, call = _blocked(gaps, np.minimum(queued, gaps.ends), calls)
    causes = np.select(
        (empty & blocked, empty, ordered & near, depends),
        [CAUSES.index(c) for c in (Cause.CALL, Cause.LAUNCH, Cause.BACK_TO_BACK, Cause.DEPENDENCY)],
        CAUSES.index(Cause.UNKNOWN),
    )
    calls_of = np.where(empty & blocked, call, UNKNOWN)
    return replace(gaps, before=before, causes=causes.astype(np.int8), calls=calls_of)


def _dependencies(gaps: Gaps, timeline: Timeline, near: Mask) -> tuple[Mask, Rows]:
    """Which followers waited for an event of another lane, and the gaps' ``before`` with the spans waited for.

    Where waits of streams are recorded, a follower waited if one of its is for a span that ended as the gap began; or,
    as an event may be one that waited for another, if it has any and started ``near`` the end of another lane's span.
    Elsewhere it did if its thread made a stream wait; every span that started ``near`` such an end counts as waiting.
    """
    spans, calls, comes = timeline.spans, timeline.calls, gaps.followers != UNKNOWN
    if calls is None or not len(calls.waiting):
        known = np.zeros(len(comes), np.bool_) if calls is None else comes & calls.awaits[gaps.followers]
        return known | near, gaps.before
    waits = np.append(np.zeros(len(spans), np.bool_), False)
    waits[calls.waiting] = True
    gap_of = np.full(len(spans), UNKNOWN, np.int64)
    gap_of[gaps.followers[comes]] = np.flatnonzero(comes)
    gap = gap_of[calls.waiting]
    ended = (gap != UNKNOWN) & (spans.ends[calls.sources] == gaps.starts[gap])
    found, before = waits[gaps.followers] & near, gaps.before.copy()
    found[gap[ended]], before[gap[ended]] = True, calls.sources[ended]
    return found, before


def _blocked(gaps: Gaps, until: Nanoseconds, calls: HostCalls | None) -> tuple[Mask, Rows]:
    """In which gaps blocking calls of the launching thread take half of the gap or more, up to the launch, and the
    longest of them.
    """
    blocked, longest = np.zeros(len(gaps.starts), np.bool_), np.full(len(gaps.starts), UNKNOWN, np.int64)
    if calls is None or not len(calls.starts):
        return blocked, longest
    threads = np.where(gaps.followers != UNKNOWN, calls.threads[gaps.followers], UNKNOWN)
    for thread in np.unique(calls.callers):
        mine, rows = np.flatnonzero(threads == thread), np.flatnonzero(calls.callers == thread)
        starts, ends = gaps.starts[mine], np.maximum(gaps.starts[mine], until[mine])
        stood = Intervals.union(calls.starts[rows], calls.ends[rows]).within(starts, ends)
        held = 2 * stood >= np.maximum(1, gaps.ends[mine] - starts)
        blocked[mine] = held
        # Calls of one thread follow one another: the one before the gap may reach into it.
        first = np.maximum(0, np.searchsorted(calls.starts[rows], starts[held], side="right") - 1)
        last = np.searchsorted(calls.starts[rows], ends[held], side="left")
        for gap, some in zip(mine[held].tolist(), map(slice, first.tolist(), last.tolist())):
            near = rows[some]
            shared = np.minimum(calls.ends[near], until[gap]) - np.maximum(calls.starts[near], gaps.starts[gap])
            longest[gap] = near[np.argmax(shared)]
    return blocked, longest


def idle_figures(timeline: Timeline) -> tuple[IdleFigures, ...]:
    """The gaps in the windows of a timeline, the longest first; empty where no launch is known."""
    spans, calls = timeline.spans, timeline.calls
    if not len(spans) or not knows_launches(spans):
        return ()
    starts, ends = bounds(timeline.windows)
    every = idle_gaps(timeline, int(starts.min()), int(ends.max())).split(starts, ends)
    found, count = [], len(spans.lane_names) + 1
    for cause in Cause:
        gaps = every.of(every.caused_by(cause) & (every.ends > every.starts))
        keys = np.append(spans.operators, UNKNOWN)[gaps.followers].astype(np.int64)
        if cause is Cause.BACK_TO_BACK:
            keys[:] = 0
        elif cause is Cause.CALL and calls is not None:
            keys = calls.names[gaps.calls].astype(np.int64)
        elif cause is Cause.DEPENDENCY:
            lanes = np.append(spans.lanes, UNKNOWN).astype(np.int64)
            keys = (lanes[gaps.followers] + 1) * count + lanes[gaps.before] + 1
        lengths, (keys, place, counts) = (
            gaps.ends - gaps.starts,
            np.unique(keys, return_inverse=True, return_counts=True),
        )
        longest = np.zeros(len(keys), np.int64)
        np.maximum.at(longest, place, lengths)
        rows = (keys.tolist(), sums(place, lengths, len(keys)).tolist(), counts.tolist(), longest.tolist())
        for key, ns, number, most in zip(*rows):
            what = ""
            if cause is Cause.DEPENDENCY:
                waiting, other = (place - 1 for place in divmod(key, count))
                names = [spans.lane_names[lane] if lane >= 0 else "an unknown stream" for lane in (waiting, other)]
                what = f"{names[0]} waits for {'an event' if waiting == other else names[1]}"
            elif cause is not Cause.BACK_TO_BACK:
                what = spans.name_table[key] if key >= 0 else "nothing runs any more"
            found.append(IdleFigures(cause=cause, what=what, ns=ns, count=number, longest_ns=most))
    return tuple(sorted(found, key=lambda one: (-one.ns, one.cause, one.what)))


def lone(timeline: Timeline) -> Intervals:
    """When copies and fills run and nothing else does.

    Copies into and out of the buffers of collectives count as something else: they have figures of their own.
    """
    spans, copies = timeline.spans, _copies(timeline.spans)
    return spans.covered(copies) - spans.covered(~copies) if copies.any() else Intervals.of([])


def _copies(spans: Spans) -> Mask:
    return np.asarray(spans.of_kind(Kind.COPY) & (spans.under & (Meaning.COPY_IN | Meaning.COPY_OUT) == 0))


def lone_copies(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[LoneCopy, ...]:
    """The copies of the windows ``[starts[i], ends[i])`` by name, those with most time alone first."""
    spans, alone = timeline.spans, lone(timeline) & Intervals.union(starts, ends)
    rows = np.flatnonzero(_copies(spans))
    each = alone.within(spans.starts[rows], spans.ends[rows])
    rows, each = rows[each > 0], each[each > 0]
    names, group, counts = np.unique(spans.names[rows], return_inverse=True, return_counts=True)
    total = sums(group, each, len(names))
    return tuple(
        LoneCopy(name=spans.name_table[names[place]], ns=int(total[place]), count=int(counts[place]))
        for place in np.argsort(-total, kind="stable").tolist()
    )


def exposed_communication(timeline: Timeline) -> Intervals:
    """When communication runs and no compute does."""
    return timeline.busy(Kind.COMM) - timeline.busy(Kind.COMPUTE)


def breakdowns(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[Breakdown, ...]:
    """Where the time of each window ``[starts[i], ends[i])`` goes; windows may overlap each other.

    Exposed communication is U(comm) without U(compute), and ``exposed_any`` without U of all other kinds. Idle is all
    of the window in which nothing runs, split by the causes of its gaps.
    """
    busy = timeline.busy(*Kind)
    of_kind = {kind: timeline.busy(kind) for kind in Kind}
    inside = {kind: union.within(starts, ends) for kind, union in of_kind.items()}
    others = timeline.busy(*(kind for kind in Kind if kind is not Kind.COMM))
    exposed = exposed_communication(timeline).within(starts, ends)
    # |comm without others| = |comm or others| - |others|, which needs no set difference.
    exposed_any = busy.within(starts, ends) - others.within(starts, ends)
    columns = {
        "span_ns": ends - starts, "busy_ns": busy.within(starts, ends), **{f"{kind}_ns": inside[kind] for kind in Kind},
        "exposed_ns": exposed, "exposed_any_ns": exposed_any, "idle_ns": ends - starts - busy.within(starts, ends),
        "lone_copy_ns": lone(timeline).within(starts, ends),
    }  # fmt: skip
    causes = {cause: f"idle_{cause}_ns" for cause in Cause if cause is not Cause.UNKNOWN}
    if len(starts) and knows_launches(timeline.spans):
        gaps = idle_gaps(timeline, int(starts.min()), int(ends.max()))
        for cause, name in causes.items():
            mine = gaps.caused_by(cause)
            columns[name] = Intervals(gaps.starts[mine], gaps.ends[mine]).within(starts, ends)
    found = []
    for row in zip(*(column.tolist() for column in columns.values())):
        parts: dict[str, Any] = {**dict.fromkeys(causes.values()), **dict(zip(columns, row))}
        parts["idle_unknown_ns"] = parts["idle_ns"] - sum(parts[name] or 0 for name in causes.values())
        found.append(Breakdown(**parts, overlap_ratio=_ratio(parts["exposed_ns"], parts["comm_ns"])))
    return tuple(found)


def step_breakdowns(timeline: Timeline) -> tuple[Breakdown, ...]:
    """Where the time of every step of one rank goes, in the order of its windows, the last one included."""
    return breakdowns(timeline, *bounds(timeline.windows))


def collectives_per_step(timeline: Timeline) -> dict[int, tuple[tuple[str, int, int], ...]]:
    """Per step the collectives that the host announced in it, as sorted ``(op, count, bytes)``.

    Steps without any have an empty entry; collectives outside of the steps are left out.

    Raises:
        TraceError: the trace does not hold the size of one of them.
    """
    steps = [window.step for window in timeline.windows if window.step is not None]
    counts: dict[int, Counter[str]] = {step: Counter() for step in steps}
    sizes: dict[int, Counter[str]] = {step: Counter() for step in steps}
    for collective in timeline.collectives:
        if not collective.announced or collective.step not in counts:
            continue
        if collective.bytes is None:
            raise TraceError(
                f"the trace does not hold the size of {collective.op}; if it was recorded without "
                "record_shapes=True, record it again with it"
            )
        counts[collective.step][collective.op] += 1
        sizes[collective.step][collective.op] += collective.bytes
    return {step: tuple((op, counts[step][op], sizes[step][op]) for op in sorted(counts[step])) for step in counts}


def mean_ratio(steps: Sequence[Breakdown]) -> float | None:
    """Overlap ratio over several steps: of their sums, so that a step with little communication weighs little."""
    return _ratio(sum(s.exposed_ns for s in steps), sum(s.comm_ns for s in steps))


def _ratio(exposed_ns: int, comm_ns: int) -> float | None:
    """1 - exposed / communication; None, not 0, without communication."""
    return None if comm_ns == 0 else 1 - exposed_ns / comm_ns
