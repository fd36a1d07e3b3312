"""Copies and fills beside which the device does nothing else: time that is neither compute nor idle."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import Breakdown, Cause, LoneCopy
from refshard.analysis.grouping import sums
from refshard.analysis.idle import idle_gaps, knows_launches
from refshard.analysis.windows import bounds
from refshard.errors import TraceError
from refshard.events.timeline import Intervals, Kind, Meaning, Nanoseconds, Timeline


def lone(timeline: Timeline) -> Intervals:
    """When copies and fills run and nothing else does.

    Copies into and out of the buffers of collectives count as something else: they have figures of their own.
    """
    copies = _copies(timeline)
    return timeline.spans.covered(copies) - timeline.spans.covered(~copies) if copies.any() else Intervals.of([])


def lone_copies(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[LoneCopy, ...]:
    """The copies of the windows ``[starts[i], ends[i])`` by name, those with most time alone first."""
    spans, alone = timeline.spans, lone(timeline) & Intervals.union(starts, ends)
    rows = np.flatnonzero(_copies(timeline))
    each = alone.within(spans.starts[rows], spans.ends[rows])
    rows, each = rows[each > 0], each[each > 0]
    names, group, counts = np.unique(spans.names[rows], return_inverse=True, return_counts=True)
    total = sums(group, each, len(names))
    return tuple(
        LoneCopy(name=spans.name_table[names[place]], ns=int(total[place]), count=int(counts[place]))
        for place in np.argsort(-total, kind="stable").tolist()
    )


def _copies(timeline: Timeline) -> npt.NDArray[np.bool_]:
    spans = timeline.spans
    found: npt.NDArray[np.bool_] = spans.of_kind(Kind.COPY) & (
        (spans.under & (Meaning.COPY_IN | Meaning.COPY_OUT)) == 0
    )
    return found


_KNOWN = tuple(cause for cause in Cause if cause is not Cause.UNKNOWN)


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
        "span_ns": ends - starts,
        "busy_ns": busy.within(starts, ends),
        **{f"{kind}_ns": inside[kind] for kind in Kind},
        "exposed_ns": exposed,
        "exposed_any_ns": exposed_any,
        "idle_ns": ends - starts - busy.within(starts, ends),
        "lone_copy_ns": lone(timeline).within(starts, ends),
    }
    found = []
    for row, idle in zip(zip(*(column.tolist() for column in columns.values())), _idle(timeline, starts, ends)):
        parts: dict[str, Any] = {**dict(zip(columns, row)), **idle}
        parts["idle_unknown_ns"] = parts["idle_ns"] - sum(ns or 0 for ns in idle.values())
        found.append(Breakdown(**parts, overlap_ratio=_ratio(parts["exposed_ns"], parts["comm_ns"])))
    return tuple(found)


def _idle(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> list[dict[str, int | None]]:
    """Idle nanoseconds of each window by cause, as far as causes are known; None each where no launch is."""
    fields = [f"idle_{cause}_ns" for cause in _KNOWN]
    if not len(starts) or not knows_launches(timeline.spans):
        return [dict.fromkeys(fields) for _ in starts]
    gaps = idle_gaps(timeline, int(starts.min()), int(ends.max()))
    columns = []
    for cause in _KNOWN:
        rows = gaps.caused_by(cause)
        columns.append(Intervals(gaps.starts[rows], gaps.ends[rows]).within(starts, ends).tolist())
    return [dict(zip(fields, row)) for row in zip(*columns)]


def step_breakdowns(timeline: Timeline) -> tuple[Breakdown, ...]:
    """Where the time of every step of one rank goes, in the order of its windows, the last one included."""
    return breakdowns(timeline, *bounds(timeline.windows))


def collectives_per_step(timeline: Timeline) -> dict[int, tuple[tuple[str, int, int], ...]]:
    """Per step the collectives that the host announced in it, as sorted ``(op, count, bytes)``.

    Steps without any have an empty entry; a collective outside of the steps is none of theirs.

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
