"""Where a window's time goes, and how much of its communication hides behind compute: pure functions of a timeline.

Everything is int64 nanoseconds. U(x) is the union of the spans of kind x, cut to the window; |.| is its length.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from refshard.errors import TraceError
from refshard.timeline import Intervals, Kind, Nanoseconds, Timeline
from refshard.tracing.figures import Breakdown
from refshard.tracing.idle import idle_gaps, knows_launches


def exposed_communication(timeline: Timeline) -> Intervals:
    """When communication runs and no compute does."""
    return timeline.busy(Kind.COMM) - timeline.busy(Kind.COMPUTE)


def breakdowns(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[Breakdown, ...]:
    """Where the time of each window ``[starts[i], ends[i])`` goes; windows may overlap each other.

    Exposed communication is U(comm) without U(compute), and ``exposed_any`` without U of all other kinds. Idle is all
    of the window in which nothing runs, split by :func:`_idle_host`.
    """
    busy = timeline.busy(*Kind)
    of_kind = {kind: timeline.busy(kind) for kind in Kind}
    inside = {kind: union.within(starts, ends) for kind, union in of_kind.items()}
    others = timeline.busy(*(kind for kind in Kind if kind is not Kind.COMM))
    exposed = exposed_communication(timeline).within(starts, ends)
    # |comm without others| = |comm or others| - |others|, which needs no set difference.
    exposed_any = busy.within(starts, ends) - others.within(starts, ends)
    columns = {
        "span_ns": ends - starts,
        "busy_ns": busy.within(starts, ends),
        **{f"{kind}_ns": inside[kind] for kind in Kind},
        "exposed_ns": exposed,
        "exposed_any_ns": exposed_any,
        "idle_ns": ends - starts - busy.within(starts, ends),
    }
    rows = zip(*(column.tolist() for column in columns.values()))
    host = _idle_host(timeline, busy, starts, ends) if knows_launches(timeline.spans) else [None] * len(starts)
    return tuple(_breakdown(dict(zip(columns, row)), idle_host) for row, idle_host in zip(rows, host))


def _breakdown(row: dict[str, int], idle_host: int | None) -> Breakdown:
    return Breakdown(
        **row,
        overlap_ratio=_ratio(row["exposed_ns"], row["comm_ns"]),
        idle_host_ns=idle_host,
        idle_dependency_ns=None if idle_host is None else row["idle_ns"] - idle_host,
    )


def _idle_host(timeline: Timeline, busy: Intervals, starts: Nanoseconds, ends: Nanoseconds) -> list[int]:
    """Idle nanoseconds of each window that the host is to blame for.

    A gap is a maximal interval of the window in which nothing runs. It is host-bound if the span that ends it was
    launched after the gap began, and dependency-bound if that was launched already. One that lasts to the end of the
    window is judged by what comes after it; where nothing does, it is host-bound.
    """
    if not len(starts):
        return []
    gaps = idle_gaps(timeline.spans, busy, int(starts.min()), int(ends.max()))
    blamed = gaps.host_bound
    idle = Intervals(gaps.starts[blamed], gaps.ends[blamed]).within(starts, ends)
    # A gap that the window cuts begins with the window: by then what ends it may have been launched.
    cut = np.searchsorted(gaps.starts, starts, side="right") - 1
    launched = blamed[cut] & (gaps.launches[cut] <= starts)
    excused = np.where(launched, np.maximum(0, np.minimum(gaps.ends[cut], ends) - starts), 0)
    return [int(ns) for ns in idle - excused]


def step_breakdowns(timeline: Timeline) -> tuple[Breakdown, ...]:
    """Where the time of every step of one rank goes, in the order of its windows, the last one included."""
    starts = np.array([window.start for window in timeline.windows], np.int64)
    return breakdowns(timeline, starts, np.array([window.end for window in timeline.windows], np.int64))


def collectives_per_step(timeline: Timeline) -> dict[int, tuple[tuple[str, int, int], ...]]:
    """Per step the collectives that the host announced in it, as sorted ``(op, count, bytes)``.

    Steps without any have an empty entry; a collective outside of the steps is none of theirs.

    Raises:
        TraceError: the trace was recorded without shapes.
    """
    steps = [window.step for window in timeline.windows if window.step is not None]
    counts: dict[int, Counter[str]] = {step: Counter() for step in steps}
    sizes: dict[int, Counter[str]] = {step: Counter() for step in steps}
    for collective in timeline.collectives:
        if not collective.announced or collective.step not in counts:
            continue
        if collective.bytes is None:
            raise TraceError(f"{collective.op} has no shapes; record the trace with record_shapes=True")
        counts[collective.step][collective.op] += 1
        sizes[collective.step][collective.op] += collective.bytes
    return {step: tuple((op, counts[step][op], sizes[step][op]) for op in sorted(counts[step])) for step in counts}


def mean_ratio(steps: Sequence[Breakdown]) -> float | None:
    """Overlap ratio over several steps: of their sums, so that a step with little communication weighs little."""
    return _ratio(sum(s.exposed_ns for s in steps), sum(s.comm_ns for s in steps))


def _ratio(exposed_ns: int, comm_ns: int) -> float | None:
    """1 - exposed / communication; None, not 0, without communication."""
    return None if comm_ns == 0 else 1 - exposed_ns / comm_ns
