"""Where the steps of one trace differ from those of another, so that the differences add up to the whole.

Every nanosecond of the steps belongs to exactly one owner, so two traces differ by exactly what their owners differ by.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.timeline import KINDS, UNKNOWN, Intervals, Kind, Nanoseconds, Spans, Timeline
from refshard.tracing.idle import CAUSES, idle_gaps, knows_launches

PRIORITY = (Kind.COMPUTE, Kind.PREP, Kind.COPY, Kind.UNCLASSIFIED, Kind.COMM)
"""Of spans that run at once, one of the kind that stands first here owns the time."""

IDLE = "idle"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What owns ``ns`` nanoseconds of all steps together: ``label`` of ``kind``, one of :class:`Kind` or ``idle``.

    ``count`` spans of it start in the steps, whether they own time or not; of idle, so many gaps.
    """

    kind: str
    label: str
    ns: int
    count: int


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns the ``span_ns`` nanoseconds of ``steps`` steps, the greatest owner first; they add up to ``span_ns``."""

    steps: int
    span_ns: int
    owners: tuple[Owner, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One owner in two traces: nanoseconds and spans per step, as means over the steps of each.

    ``delta_ns`` is B's less A's. ``new`` is what only B has, ``gone`` what only A has.
    """

    kind: str
    label: str
    a_ns: float
    b_ns: float
    delta_ns: float
    a_count: float
    b_count: float
    new: bool
    gone: bool


def attribute(timeline: Timeline) -> Attribution:
    """Give every nanosecond of the steps to exactly one owner.

    Of what runs at once, the kind that stands first in :data:`PRIORITY` owns the time, among spans of one kind the one
    that started first, among those the one on the first lane. Time in which nothing runs is owned by what ends it.
    Labels are the operator that launched a span, ``op (unit)`` for a collective (its span's name where the trace does
    not tell which), and for idle ``before`` such a label and which bound it.

    Raises:
        ValueError: two steps overlap, so that a nanosecond would count twice.
    """
    windows = sorted(timeline.windows, key=lambda window: window.start)
    starts = np.array([window.start for window in windows], np.int64)
    ends = np.array([window.end for window in windows], np.int64)
    if np.any(starts[1:] < ends[:-1]):
        raise ValueError("steps must not overlap each other, or their time would count twice")
    found: dict[tuple[str, str], tuple[int, int]] = {}
    labels, label_of = _labels(timeline)
    for kind, label, ns, count in (
        *_of_spans(timeline.spans, labels, label_of, starts, ends),
        *_of_idle(timeline, labels, label_of, starts, ends),
    ):
        total, number = found.get((kind, label), (0, 0))
        found[kind, label] = (total + ns, number + count)
    owners = [Owner(kind=kind, label=label, ns=ns, count=count) for (kind, label), (ns, count) in found.items()]
    return Attribution(
        steps=len(windows),
        span_ns=int((ends - starts).sum()),
        owners=tuple(sorted(owners, key=lambda o: (-o.ns, o.kind, o.label))),
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


def _labels(timeline: Timeline) -> tuple[list[str], npt.NDArray[np.int64]]:
    """A table of labels, and which of them each span bears."""
    spans = timeline.spans
    labels = list(spans.name_table)
    label_of = np.where(spans.of_kind(Kind.COMM) | (spans.operators == UNKNOWN), spans.names, spans.operators)
    label_of = label_of.astype(np.int64)
    codes: dict[str, int] = {}
    for collective in timeline.collectives:
        if collective.rows:
            unit = None if collective.unit is None else collective.unit.strip("()")
            label = collective.op if unit is None else f"{collective.op} ({unit})"
            if label not in codes:
                codes[label] = len(labels)
                labels.append(label)
            label_of[list(collective.rows)] = codes[label]
    return labels, label_of


def _of_spans(
    spans: Spans, labels: list[str], label_of: npt.NDArray[np.int64], starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[tuple[str, str, int, int]]:
    """Kind, label, nanoseconds and spans begun of everything that ran in the windows."""
    owned = _owned(spans, Intervals.union(starts, ends))
    inside = np.searchsorted(starts, spans.starts, side="right") - 1
    begun = inside >= 0
    begun[begun] = spans.starts[begun] < ends[inside[begun]]
    keys = spans.kinds.astype(np.int64) * len(labels) + label_of
    for key, ns, count in _sums(keys, owned, begun.astype(np.int64)):
        if ns or count:
            yield KINDS[key // len(labels)].value, labels[key % len(labels)], ns, count


def _of_idle(
    timeline: Timeline, labels: list[str], label_of: npt.NDArray[np.int64], starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[tuple[str, str, int, int]]:
    """Kind, label, nanoseconds and number of every gap in the windows."""
    if not len(starts):
        return
    gaps = idle_gaps(timeline, int(starts[0]), int(ends[-1])).split(starts, ends)
    # What never comes has number -1, and so the label that is last.
    followers = np.append(label_of, len(labels))[gaps.followers]
    told = knows_launches(timeline.spans)
    for key, ns, count in _sums(
        followers * len(CAUSES) + gaps.causes.astype(np.int64), gaps.ends - gaps.starts, np.ones_like(followers)
    ):
        follower, cause = divmod(key, len(CAUSES))
        label = f"before {labels[follower] if follower < len(labels) else 'the end'}"
        yield IDLE, f"{label} ({CAUSES[cause].replace('_', ' ')})" if told else label, ns, count


def _sums(keys: Nanoseconds, ns: Nanoseconds, counts: Nanoseconds) -> list[tuple[int, int, int]]:
    """Each key once, with the sums over its rows."""
    found, row_of = np.unique(keys, return_inverse=True)
    totals, numbers = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    np.add.at(totals, row_of, ns)
    np.add.at(numbers, row_of, counts)
    return list(zip(found.tolist(), totals.tolist(), numbers.tolist()))


def difference(a: Attribution, b: Attribution) -> tuple[Change, ...]:
    """Every owner's change per step from ``a`` to ``b``, the greatest first; they add up to the mean step's change.

    Raises:
        ValueError: one of them has no step.
    """
    for name, attribution in (("A", a), ("B", b)):
        if not attribution.steps:
            raise ValueError(f"trace {name} has no step, so it has no mean step to compare")
    of_a = {(owner.kind, owner.label): owner for owner in a.owners}
    of_b = {(owner.kind, owner.label): owner for owner in b.owners}
    found = []
    for kind, label in dict.fromkeys((*of_a, *of_b)):
        mine, theirs = of_a.get((kind, label)), of_b.get((kind, label))
        a_ns, a_count = (mine.ns / a.steps, mine.count / a.steps) if mine else (0.0, 0.0)
        b_ns, b_count = (theirs.ns / b.steps, theirs.count / b.steps) if theirs else (0.0, 0.0)
        found.append(
            Change(
                kind=kind,
                label=label,
                a_ns=a_ns,
                b_ns=b_ns,
                delta_ns=b_ns - a_ns,
                a_count=a_count,
                b_count=b_count,
                new=mine is None,
                gone=theirs is None,
            )
        )
    return tuple(sorted(found, key=lambda c: (-abs(c.delta_ns), c.kind, c.label)))
