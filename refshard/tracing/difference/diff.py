"""Who owns the time of a trace's steps: every nanosecond belongs to exactly one owner.

Two traces differ by exactly what their owners differ by (:mod:`refshard.tracing.difference.matching`).
"""

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.events.timeline import Intervals, Kind, Nanoseconds, Spans, Timeline
from refshard.tracing.difference.works import Work, works_of
from refshard.tracing.idle import CAUSES, idle_gaps, knows_launches

PRIORITY = (Kind.COMPUTE, Kind.PREP, Kind.COPY, Kind.UNCLASSIFIED, Kind.COMM)
"""Of spans that run at once, one of the kind that stands first here owns the time."""

IDLE, END = "idle", "the end"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What owns ``ns`` nanoseconds of all steps together.

    ``count`` spans of it start in the steps, whether they own time or not; of idle, so many gaps. ``kernels`` are the
    names of its spans, each with the nanoseconds that it owns, the greatest first.
    """

    work: Work
    ns: int
    count: int
    kernels: tuple[tuple[str, int], ...] = ()


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns the nanoseconds of steps of ``step_ns`` each, the greatest owner first; they add up to ``span_ns``."""

    step_ns: tuple[int, ...]
    owners: tuple[Owner, ...]

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.step_ns)

    @property
    def span_ns(self) -> int:
        """Length of all steps together."""
        return sum(self.step_ns)


def attribute(timeline: Timeline) -> Attribution:
    """Give every nanosecond of the steps to exactly one owner.

    Of what runs at once, the kind that stands first in :data:`PRIORITY` owns the time, among spans of one kind the one
    that started first, among those the one on the first lane. Time in which nothing runs is owned by what ends it, and
    by its cause.

    Raises:
        ValueError: two steps overlap, so that a nanosecond would count twice.
    """
    windows = sorted(timeline.windows, key=lambda window: window.start)
    starts = np.array([window.start for window in windows], np.int64)
    ends = np.array([window.end for window in windows], np.int64)
    if np.any(starts[1:] < ends[:-1]):
        raise ValueError("steps must not overlap each other, or their time would count twice")
    found: dict[Work, tuple[int, int]] = {}
    kernels: dict[Work, tuple[tuple[str, int], ...]] = {}
    works, work_of = works_of(timeline)
    for work, ns, count, names in (
        *_of_spans(timeline.spans, works, work_of, starts, ends),
        *_of_idle(timeline, works, work_of, starts, ends),
    ):
        total, number = found.get(work, (0, 0))
        found[work] = (total + ns, number + count)
        kernels[work] = (*kernels.get(work, ()), *names)
    owners = [Owner(work=work, ns=ns, count=n, kernels=kernels[work]) for work, (ns, n) in found.items()]
    return Attribution(
        step_ns=tuple((ends - starts).tolist()),
        owners=tuple(sorted(owners, key=lambda o: (-o.ns, o.work.kind, o.work.operator))),
    )


def _owned(spans: Spans, free: Intervals) -> Nanoseconds:
    """Nanoseconds of ``free`` that each span owns."""
    owned = np.zeros(len(spans), np.int64)
    for kind in PRIORITY:
        rows = np.flatnonzero(spans.of_kind(kind))
        rows = rows[np.lexsort((spans.lanes[rows], spans.starts[rows]))]
        starts, ends = spans.starts[rows], spans.ends[rows]
        # Of its kind, a span owns what lies after the end of all that started before it.
        reach = np.concatenate((starts[:1], np.maximum.accumulate(ends)[:-1]))
        owned[rows] = free.within(np.clip(reach, starts, ends), ends)
        free = free - Intervals.union(starts, ends)
    return owned


def _of_spans(
    spans: Spans, works: list[Work], work_of: npt.NDArray[np.int64], starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[tuple[Work, int, int, tuple[tuple[str, int], ...]]]:
    """Work, nanoseconds, spans begun and kernels of everything that ran in the windows."""
    if not len(spans):
        return
    owned = _owned(spans, Intervals.union(starts, ends))
    inside = np.searchsorted(starts, spans.starts, side="right") - 1
    begun = inside >= 0
    begun[begun] = spans.starts[begun] < ends[inside[begun]]
    kernels = _kernels(spans, work_of, owned, begun)
    for work, ns, count in _sums(work_of, owned, begun.astype(np.int64)):
        if ns or count:
            yield works[work], ns, count, tuple(kernels[work])


def _kernels(
    spans: Spans, work_of: npt.NDArray[np.int64], owned: Nanoseconds, begun: npt.NDArray[np.bool_]
) -> dict[int, list[tuple[str, int]]]:
    """The kernels of each work, the one that owns most first."""
    found = defaultdict(list)
    several = len(spans.name_table)
    for key, ns, count in sorted(_sums(work_of * several + spans.names, owned, begun), key=lambda row: -row[1]):
        if ns or count:
            found[key // several].append((spans.name_table[key % several], ns))
    return found


def _of_idle(
    timeline: Timeline, works: list[Work], work_of: npt.NDArray[np.int64], starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[tuple[Work, int, int, tuple[tuple[str, int], ...]]]:
    """Work, nanoseconds and number of every gap in the windows."""
    if not len(starts):
        return
    gaps = idle_gaps(timeline, int(starts[0]), int(ends[-1])).split(starts, ends)
    # What never comes has number -1, and so the work that is last.
    followers = np.append(work_of, len(works))[gaps.followers]
    told = knows_launches(timeline.spans)
    keys = followers * len(CAUSES) + gaps.causes.astype(np.int64)
    for key, ns, count in _sums(keys, gaps.ends - gaps.starts, np.ones_like(followers)):
        follower, cause = divmod(key, len(CAUSES))
        after = works[follower] if follower < len(works) else Work(kind=IDLE, operator=END)
        bound = CAUSES[cause].replace("_", " ") if told else None
        yield Work(kind=IDLE, operator=after.operator, unit=after.unit, phase=after.phase, bound=bound), ns, count, ()


def _sums(keys: Nanoseconds, ns: Nanoseconds, counts: npt.NDArray[np.generic]) -> list[tuple[int, int, int]]:
    """Each key once, with the sums over its rows."""
    found, row_of = np.unique(keys, return_inverse=True)
    totals, numbers = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    np.add.at(totals, row_of, ns)
    np.add.at(numbers, row_of, counts)
    return list(zip(found.tolist(), totals.tolist(), numbers.tolist()))
