"""Which of nested intervals is innermost at a moment, and how much of each is its own, without a loop over them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Nanoseconds

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nesting:
    """Intervals of one thread, ordered by start and the longer first; of two that overlap, one must enclose the
    other. None is empty.

    ``keys`` sort them by depth and then by order, so that the innermost at depth d is found by bisection: the last
    that began at that depth.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    closed: Nanoseconds
    keys: Rows

    @classmethod
    def of(cls, starts: Nanoseconds, ends: Nanoseconds) -> "Nesting":
        """Intervals that are ordered already; see :func:`nested_order`."""
        closed, order = np.sort(ends), np.arange(len(starts))
        depth = order - np.searchsorted(closed, starts, side="right")
        return cls(starts=starts, ends=ends, closed=closed, keys=np.sort(depth * len(starts) + order))

    def innermost(self, points: Nanoseconds) -> Rows:
        """The place of the innermost interval that holds at each point, :data:`UNKNOWN` where none does."""
        begun = np.searchsorted(self.starts, points, side="right")
        return self._at_depth(begun - 1, begun - np.searchsorted(self.closed, points, side="right") - 1, points)

    def parents(self) -> Rows:
        """The place of the interval that encloses each most closely, :data:`UNKNOWN` for the outermost."""
        order = np.arange(len(self.starts))
        depth = order - np.searchsorted(self.closed, self.starts, side="right")
        return self._at_depth(order - 1, depth - 1, self.starts)

    def own(self) -> Nanoseconds:
        """How long each runs without those that it encloses."""
        parents, lengths = self.parents(), self.ends - self.starts
        inner = np.zeros(len(lengths), np.int64)
        enclosed = parents != UNKNOWN
        np.add.at(inner, parents[enclosed], lengths[enclosed])
        return np.asarray(np.maximum(0, lengths - inner), np.int64)

    def _at_depth(self, last: Rows, depth: Rows, points: Nanoseconds) -> Rows:
        """Of those up to ``last`` the last at ``depth``, if it holds at the point."""
        count = len(self.starts)
        if not count:
            return np.full(len(points), UNKNOWN, np.int64)
        place = np.searchsorted(self.keys, depth * count + last, side="right") - 1
        found = self.keys[np.maximum(place, 0)]
        row = found % count
        good = (place >= 0) & (depth >= 0) & (found // count == depth) & (points >= self.starts[row])
        return np.where(good & (points < self.ends[row]), row, UNKNOWN)


def nested_order(starts: Nanoseconds, ends: Nanoseconds) -> Rows:
    """The order that :meth:`Nesting.of` wants."""
    return np.lexsort((-ends, starts))


def innermost_on(
    threads: npt.NDArray[np.int32], starts: Nanoseconds, ends: Nanoseconds,
    at_threads: npt.NDArray[np.int32], points: Nanoseconds,
) -> Rows:  # fmt: skip
    """For each point the place of the innermost interval of its thread that holds then, or :data:`UNKNOWN`."""
    found = np.full(len(points), UNKNOWN, np.int64)
    for thread in np.unique(at_threads).tolist():
        there = np.flatnonzero(at_threads == thread)
        rows = _with_points(threads == thread, starts, ends, np.sort(points[there]))
        rows = rows[nested_order(starts[rows], ends[rows])]
        place = Nesting.of(starts[rows], ends[rows]).innermost(points[there])
        found[there[place != UNKNOWN]] = rows[place[place != UNKNOWN]]
    return found


def _with_points(mine: npt.NDArray[np.bool_], starts: Nanoseconds, ends: Nanoseconds, points: Nanoseconds) -> Rows:
    """Of the rows that are ``mine`` those with a point in them: most have none, and the rest takes less memory."""
    rows = np.flatnonzero(mine).astype(np.int32)
    before = np.searchsorted(points, starts[rows]).astype(np.int32)
    return rows[before < np.searchsorted(points, ends[rows])].astype(np.int64)
