"""When nothing runs, and whether the host or a dependency is to blame."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Intervals, Nanoseconds, Spans

NEVER = int(np.iinfo(np.int64).max)
"""The launch of a span that no span on its lane is known to have been launched after, and of one that never comes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """Maximal intervals ``[starts[i], ends[i])`` in which nothing runs, in order.

    ``followers`` are the rows that begin where the gap ends; of several the one launched first, of these the one on the
    first lane; :data:`UNKNOWN` where nothing comes any more. ``launches`` say when those were launched.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    followers: npt.NDArray[np.int64]
    launches: Nanoseconds

    def split(self, starts: Nanoseconds, ends: Nanoseconds) -> "Gaps":
        """The gaps' parts in each of the sorted, disjoint windows."""
        first = np.searchsorted(self.ends, starts, side="right")
        count = np.where(starts < ends, np.searchsorted(self.starts, ends, side="left") - first, 0)
        windows = np.repeat(np.arange(len(starts)), count)
        rows = np.arange(len(windows)) - np.repeat(np.cumsum(count) - count, count) + first[windows]
        return Gaps(
            starts=np.maximum(self.starts[rows], starts[windows]),
            ends=np.minimum(self.ends[rows], ends[windows]),
            followers=self.followers[rows],
            launches=self.launches[rows],
        )

    def of(self, rows: npt.NDArray[np.bool_]) -> "Gaps":
        """Some of them."""
        return Gaps(
            starts=self.starts[rows], ends=self.ends[rows], followers=self.followers[rows], launches=self.launches[rows]
        )

    @property
    def host_bound(self) -> npt.NDArray[np.bool_]:
        """Which gaps the host is to blame for: what ends them was launched after they began, or never came."""
        return self.launches > self.starts


def knows_launches(spans: Spans) -> bool:
    """Whether the trace tells of any span when it was launched."""
    return bool(np.any(spans.launches != UNKNOWN))


def latest_launches(spans: Spans) -> Nanoseconds:
    """When each span was launched, or, where that is unknown, at the latest; :data:`NEVER` where nothing bounds it.

    A lane runs in the order of launches, so a span was launched no later than the next one on its lane.
    """
    order = np.argsort(spans.lanes, kind="stable")
    launches = np.where(spans.launches == UNKNOWN, NEVER, spans.launches)[order]
    lanes = spans.lanes[order]
    known = np.where(launches == NEVER, len(order), np.arange(len(order)))
    following = np.minimum.accumulate(known[::-1])[::-1]
    bounded = following < len(order)
    bounded[bounded] = lanes[following[bounded]] == lanes[bounded]
    launches[bounded] = launches[following[bounded]]
    found = np.empty(len(order), np.int64)
    found[order] = launches
    return found


def idle_gaps(spans: Spans, busy: Intervals, start: int, end: int) -> Gaps:
    """The gaps in ``busy``, the union of all ``spans``; before it since ``start``, after it to ``end``.

    Spans of no length neither end a gap nor divide it.
    """
    starts = np.concatenate(([min([start, *busy.starts[:1].tolist()])], busy.ends)).astype(np.int64)
    ends = np.concatenate((busy.starts, [max([end, *busy.ends[-1:].tolist()])])).astype(np.int64)
    launches = latest_launches(spans)
    lasting = np.flatnonzero(spans.ends > spans.starts)
    order = lasting[np.lexsort((spans.lanes[lasting], launches[lasting], spans.starts[lasting]))]
    followers = np.full(len(ends), UNKNOWN, np.int64)
    followers[:-1] = order[np.searchsorted(spans.starts[order], ends[:-1], side="left")]
    launched = np.full(len(ends), NEVER, np.int64)
    launched[:-1] = launches[followers[:-1]]
    return Gaps(starts=starts, ends=ends, followers=followers, launches=launched)
