"""Which of nested intervals hold a point in time, without a loop over all of them."""

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Nanoseconds


def innermost_at(
    starts: Nanoseconds,
    ends: Nanoseconds,
    threads: npt.NDArray[np.int32],
    points: Nanoseconds,
    threads_of_points: npt.NDArray[np.int32],
) -> npt.NDArray[np.int64]:
    """The row of the innermost interval on each point's thread that holds it; :data:`UNKNOWN` without one.

    Intervals are half-open, ``[start, end)``, and those of a thread must nest. They are searched level by level, so
    time grows with the depth and not with the number of their children.
    """
    found = np.full(len(points), UNKNOWN, np.int64)
    for thread in np.unique(threads_of_points).tolist():
        rows = np.flatnonzero((threads == thread) & (ends > starts))
        rows = rows[np.lexsort((-ends[rows], starts[rows]))]
        # As many hold an interval's start as have begun before it, less those that have ended.
        depth = np.arange(len(rows)) - np.searchsorted(np.sort(ends[rows]), starts[rows], side="right")
        rows = rows[np.argsort(depth, kind="stable")]
        bounds = np.cumsum(np.bincount(depth)) if len(rows) else np.empty(0, np.int64)
        inside = np.flatnonzero(threads_of_points == thread)
        for first, last in zip(np.concatenate(([0], bounds[:-1])).tolist(), bounds.tolist()):
            level = rows[first:last]
            place = np.searchsorted(starts[level], points[inside], side="right") - 1
            holds = place >= 0
            holds[holds] = points[inside][holds] < ends[level[place[holds]]]
            inside = inside[holds]
            found[inside] = level[place[holds]]
    return found
