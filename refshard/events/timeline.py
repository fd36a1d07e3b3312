"""Spans on lanes, and the algebra of sets of intervals that every overlap figure is computed with.

All times are int64 nanoseconds. A measured trace, an emulated one and a simulated schedule all become a
:class:`Timeline`, so that overlap is computed once, by the same code.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag, StrEnum
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
Table = TypeVar("Table")


class Intervals:
    """A set of points in time, kept as sorted, disjoint, half-open intervals ``[start, end)``.

    >>> busy = Intervals.of([(0, 10), (5, 20), (30, 40)])
    >>> busy, busy.length
    (Intervals([(0, 20), (30, 40)]), 30)
    >>> busy - Intervals.of([(8, 35)])
    Intervals([(0, 8), (35, 40)])
    """

    __slots__ = ("_sums", "ends", "starts")

    def __init__(self, starts: Nanoseconds, ends: Nanoseconds) -> None:
        """Take already sorted and disjoint intervals; use :meth:`of` or :meth:`union` for anything else."""
        self.starts = starts
        self.ends = ends
        self._sums: Nanoseconds | None = None

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Intervals":
        """The union of ``(start, end)`` pairs in any order."""
        flat = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        return cls.union(flat[:, 0], flat[:, 1])

    @classmethod
    def union(cls, starts: Nanoseconds, ends: Nanoseconds) -> "Intervals":
        """The union of intervals given as two arrays of one length; empty ones vanish.

        Raises:
            ValueError: an interval ends before it starts.
        """
        if np.any(ends < starts):
            worst = int(np.argmin(ends - starts))
            raise ValueError(f"an interval must not end before it starts, got [{starts[worst]}, {ends[worst]})")
        kept = ends > starts
        starts, ends = starts[kept], ends[kept]
        if not len(starts):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        reach = np.maximum.accumulate(ends)
        first = np.concatenate(([True], starts[1:] > reach[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(starts[first], reach[last])

    @property
    def length(self) -> int:
        """Nanoseconds covered."""
        return int(np.sum(self.ends - self.starts))

    def within(self, starts: Nanoseconds, ends: Nanoseconds) -> Nanoseconds:
        """Nanoseconds covered inside each of the windows ``[starts[i], ends[i])``, which may overlap each other.

        >>> Intervals.of([(0, 10), (20, 30)]).within(np.array([5, 10]), np.array([25, 20]))
        array([10,  0])
        """
        return self._covered_before(ends) - self._covered_before(starts)

    def _covered_before(self, points: Nanoseconds) -> Nanoseconds:
        if self._sums is None:
            self._sums = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        index = np.searchsorted(self.starts, points, side="right")
        beyond = np.zeros(len(points), np.int64)
        inside = index > 0
        beyond[inside] = np.maximum(0, self.ends[index[inside] - 1] - points[inside])
        return np.asarray(self._sums[index] - beyond, dtype=np.int64)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The intervals as plain tuples."""
        return list(zip(self.starts.tolist(), self.ends.tolist()))

    def __or__(self, other: "Intervals") -> "Intervals":
        return Intervals.union(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def __and__(self, other: "Intervals") -> "Intervals":
        return self._where(other, lambda mine, theirs: mine & theirs)

    def __sub__(self, other: "Intervals") -> "Intervals":
        return self._where(other, lambda mine, theirs: mine & ~theirs)

    def _where(self, other: "Intervals", keep) -> "Intervals":  # type: ignore[no-untyped-def]
        """Cut time at every boundary of both sets and keep the pieces for which ``keep(in_self, in_other)``."""
        # Not np.unique: on large arrays it hashes, which takes several times as long.
        cuts = np.sort(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        cuts = cuts[np.concatenate(([True], cuts[1:] > cuts[:-1]))] if len(cuts) else cuts
        if len(cuts) < 2:
            return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
        kept = keep(self._covers(cuts[:-1]), other._covers(cuts[:-1]))
        return Intervals.union(cuts[:-1][kept], cuts[1:][kept])

    def _covers(self, points: Nanoseconds) -> Mask:
        index = np.searchsorted(self.starts, points, side="right") - 1
        inside = index >= 0
        inside[inside] = points[inside] < self.ends[index[inside]]
        return inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.pairs == other.pairs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Intervals({self.pairs})"


class Kind(StrEnum):
    """What a span of device time (on a CPU: of a thread's time) is spent on."""

    COMM = "comm"
    PREP = "prep"
    COPY = "copy"
    COMPUTE = "compute"
    UNCLASSIFIED = "unclassified"


KINDS = tuple(Kind)
"""Kinds by their code in :attr:`Spans.kinds`."""


class Meaning(IntFlag):
    """What a phase that the host announced is for, whoever named it; a span may be launched under several.

    ``REDUCE`` is all that leads to a gradient's reduction, ``COPY_IN`` and ``COPY_OUT`` move what a collective sends
    or has received, ``WAIT`` is for a collective to end, ``REDUCE_WAIT`` for an earlier reduction so that its buffer
    can be reused. ``FORWARD`` and ``BACKWARD`` begin a unit's compute, ``LEAVE`` ends it. ``COLLECTIVE`` is any kernel
    that runs for an emulated collective.
    """

    ALL_GATHER = 1
    REDUCE = 2
    COPY_IN = 4
    COPY_OUT = 8
    WAIT = 16
    REDUCE_WAIT = 32
    FORWARD = 64
    BACKWARD = 128
    LEAVE = 256
    OPTIMIZER = 512
    COLLECTIVE = 1024


UNKNOWN = -1
"""Stands in a column of :class:`Spans` for what the trace does not tell."""


class Inputs(NamedTuple):
    """The tensors that an operator was given: ``dims`` as in ``[8192,4096]x[4096,14336]``, ``dtype`` as in ``bf16``."""

    dims: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """What ran, a row each, ordered by start and then by end; columns are arrays of one length.

    ``kinds`` are codes of :data:`KINDS`; ``lanes``, ``names``, ``operators`` and ``units`` index the tables next to
    them; ``operators`` and ``names`` share one. ``operators`` says what the host was doing when it launched the span
    (the span's own name if unknown), ``launches`` when its call began, ``queued`` when that returned (never
    after the span's start), ``steps`` in which step (a number of :attr:`Timeline.windows`) and ``units`` for which
    unit; each :data:`UNKNOWN` where the trace does not say. ``under`` holds the :class:`Meaning` of the phases that the
    span was launched under. Spans of one ``signatures`` code do the same work: one kernel in one launch geometry;
    ``signature_names`` spells the codes out, so that the spans of two timelines can be matched (left empty, by name
    alone).

    Columns that are empty tell nothing: ``calls`` number the calls of operators (spans of one number were launched by
    one call), ``inputs`` index ``input_names``, ``in_autograd`` says whether autograd's engine launched the span.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    kinds: npt.NDArray[np.int8]
    lanes: Ints
    names: Ints
    operators: Ints
    launches: Nanoseconds
    queued: Nanoseconds
    steps: Ints
    units: Ints
    under: npt.NDArray[np.int16]
    signatures: Ints
    lane_names: tuple[str, ...]
    name_table: tuple[str, ...]
    unit_names: tuple[str, ...] = ()
    signature_names: tuple[str, ...] = ()
    calls: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    inputs: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    in_autograd: Mask = field(default_factory=lambda: np.empty(0, np.bool_))
    input_names: tuple[Inputs, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def of_kind(self, *kinds: Kind) -> Mask:
        """Which rows are of these kinds."""
        return np.isin(self.kinds, [KINDS.index(kind) for kind in kinds])

    def main_lane(self) -> int:
        """The lane that computes most; without compute, the busiest one; :data:`UNKNOWN` without spans."""
        if not len(self):
            return UNKNOWN
        computes = self.of_kind(Kind.COMPUTE)
        rows = computes if computes.any() else np.ones(len(self), np.bool_)
        return int(np.argmax(np.bincount(self.lanes[rows], weights=(self.ends - self.starts)[rows])))

    def alone(self) -> Mask:
        """Which rows overlap no other."""
        reach = np.maximum.accumulate(self.ends)
        follow, precede = self.starts[1:] >= reach[:-1], self.ends[:-1] <= self.starts[1:]
        found: Mask = np.append(True, follow) & np.append(precede, True)
        return found

    def covered(self, rows: Mask) -> Intervals:
        """Union of these rows' intervals."""
        return Intervals.union(self.starts[rows], self.ends[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostCalls:
    """What the host's calls to the device's runtime say about waits.

    For each span, ``threads`` is the number of the thread that launched it (:data:`UNKNOWN` if the trace does not say),
    and ``awaits`` whether that thread made the stream wait for an event since it last launched on the stream.
    ``starts`` and ``ends`` are of calls that blocked their thread, ``callers`` are the threads, and ``names`` index
    :attr:`Spans.name_table`; they are ordered by start.

    ``waiting`` are rows of spans that waited for the spans ``sources`` of other lanes, as the profiler recorded it;
    both are empty where it recorded no waits of streams.
    """

    threads: Ints
    awaits: Mask
    starts: Nanoseconds
    ends: Nanoseconds
    callers: Ints
    names: Ints
    waiting: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    sources: Rows = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of one rank: what it moves, where it was announced, and when it ran.

    ``bytes`` is the size of the unsharded tensor: an all-gather's output, a reduce-scatter's input, an all-reduce's
    tensor, the larger side of an all-to-all (*size* in nccl-tests); None if the trace has no shapes. ``launched``,
    ``start`` and ``end`` are nanoseconds. ``start``, ``end`` and ``lane`` are None if the trace shows no execution.
    ``group`` names the process group, of ``group_size`` ranks; ``group_ranks`` lists them where the trace does, and
    ``group_description`` is what the program calls the group. ``sequence`` is the number that torch gives a collective
    in its group, the same on all ranks. ``announced`` says whether the host's own operator of
    the collective is in the trace. ``rows`` are those of :class:`Spans` that ran for it; between them it did not run.
    """

    op: str
    bytes: int | None
    step: int | None
    group: str | None = None
    group_size: int | None = None
    dtype: str | None = None
    unit: str | None = None
    lane: str | None = None
    launched: int | None = None
    start: int | None = None
    end: int | None = None
    announced: bool = True
    rows: tuple[int, ...] = ()
    group_ranks: tuple[int, ...] = ()
    group_description: str | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One training step of one rank, ``[start, end)`` nanoseconds; ``step`` is None for a trace without steps.

    Another window that a user chose has a ``name``, and its number as ``step``.
    """

    step: int | None
    start: int
    end: int
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A phase that the host announced, of ``unit``, over ``[start, end)`` nanoseconds of the host."""

    meaning: Meaning
    unit: str | None
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What one rank did: its steps, spans and collectives, ordered by start.

    ``windows`` are the steps as the device lived them; ``host_windows`` are the same as the host announced them, in
    which its ``labels`` lie. On a CPU they are one.
    """

    rank: int | None
    windows: tuple[Window, ...]
    spans: Spans
    host_windows: tuple[Window, ...] = ()
    collectives: tuple[Collective, ...] = ()
    labels: tuple[Label, ...] = ()
    on_device: bool = False
    calls: HostCalls | None = None

    def busy(self, *kinds: Kind) -> Intervals:
        """Union of the spans of these kinds."""
        return self.spans.covered(self.spans.of_kind(*kinds))


def rows_of(table: Table, rows: Rows | Mask) -> Table:
    """Some rows of a dataclass of columns; what is no column stays."""
    every = cast(Any, table)
    columns = {field.name: getattr(every, field.name) for field in fields(every)}
    return cast(Table, replace(every, **{k: one[rows] for k, one in columns.items() if isinstance(one, np.ndarray)}))


def grouped(*columns: npt.NDArray[np.generic]) -> tuple[Rows, Rows]:
    """Rows alike in all columns: the first row of each group, and the group of each row; groups are in order."""
    codes, firsts = np.zeros(len(columns[0]), np.int64), np.zeros(0, np.int64)
    for column in columns if len(codes) else ():
        _, place = np.unique(column, return_inverse=True)
        # Numbered anew after each column: the product of all their ranges may not fit an int64.
        _, firsts, codes = np.unique(codes * (int(place.max()) + 1) + place, return_index=True, return_inverse=True)
    return firsts, codes


def sums(group: Rows, values: npt.NDArray[np.generic], count: int) -> Rows:
    """The sum of the values of each of ``count`` groups, exactly."""
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found


def ranges(first: Rows, until: Rows) -> tuple[Rows, Rows]:
    """Every place ``i`` with each number in ``range(first[i], until[i])``."""
    count = np.maximum(0, until - first)
    place = np.repeat(np.arange(len(count)), count)
    return place, np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count) + first[place]
