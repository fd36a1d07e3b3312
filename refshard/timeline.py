"""Spans on lanes, and the algebra of sets of intervals that every overlap figure is computed with.

All times are int64 nanoseconds. A measured trace, an emulated one and a simulated schedule all become a
:class:`Timeline`, so that overlap is computed once, by the same code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


class Intervals:
    """A set of points in time, kept as sorted, disjoint, half-open intervals ``[start, end)``.

    >>> busy = Intervals.of([(0, 10), (5, 20), (30, 40)])
    >>> busy, busy.length
    (Intervals([(0, 20), (30, 40)]), 30)
    >>> busy - Intervals.of([(8, 35)])
    Intervals([(0, 8), (35, 40)])
    """

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Nanoseconds, ends: Nanoseconds) -> None:
        """Take already sorted and disjoint intervals; use :meth:`of` or :meth:`union` for anything else."""
        self.starts = starts
        self.ends = ends

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
        cuts = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        if len(cuts) < 2:
            return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
        kept = keep(self._covers(cuts[:-1]), other._covers(cuts[:-1]))
        return Intervals.union(cuts[:-1][kept], cuts[1:][kept])

    def _covers(self, points: Nanoseconds) -> npt.NDArray[np.bool_]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One event: ``kind`` of work on ``lane`` (a stream or a thread) over ``[start, end)`` nanoseconds."""

    kind: Kind
    lane: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as announced on its rank: what it moves, and in which step it was issued.

    ``bytes`` is the size of the unsharded tensor: an all-gather's output, a reduce-scatter's input, an all-reduce's
    tensor (the *size* column of nccl-tests); None where the trace was recorded without shapes.
    """

    op: str
    bytes: int | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One training step of one rank, ``[start, end)`` nanoseconds."""

    step: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one rank did: its steps, spans and collectives, ordered by start."""

    rank: int
    windows: tuple[Window, ...]
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...] = ()

    def busy(self, *kinds: Kind) -> Intervals:
        """Union of the spans of these kinds."""
        return Intervals.of((s.start, s.end) for s in self.spans if s.kind in kinds)
