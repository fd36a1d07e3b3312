"""Which interval of the host holds at a moment, and which operator a kernel belongs to: the one rule, for all figures.

Kineto's external id, where the recorder numbers operators with it, names the innermost operator around the launch. So
the time and thread of the launch tell the same, and tell it too where the ids have another numbering, as in 2022.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.names import GRAPH_LAUNCHES
from refshard.events.table import HOST, TraceFile
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


_NO_OPERATOR = re.compile(
    r"^(?:autograd::engine::evaluate_function|Optimizer\.|Torch-Compiled|CompiledFunction|TorchDynamo|"
    r"torch::autograd::(?!CppNode)|DistributedDataParallel|DataParallel|FullyShardedDataParallel|enumerate\(|"
    r"PyTorchProfiler|nn\.Module:|record_param_comms|Pregraph|AOTDispatcher|inductor::)|#"
)
"""Operators, by the profiler's category, that only hold others: what they launch is known by its own name. With a #,
those of 2021 for steps and the user's phases, and compiled graphs' (``## Call CompiledFxGraph``).
"""
_WHOLE = re.compile(
    r"^aten::(?:convolution(?:_backward)?|"
    r"_scaled_dot_product_(?:flash|efficient|cudnn|fused)_attention(?:_\w+)?)$"
)
"""Operators that say best what the operators do that they call: these have other arguments, or fewer."""


def innermost_of(trace: TraceFile, candidates: Rows, rows: Rows) -> Rows:
    """The innermost of the host's events ``candidates`` where each of the events ``rows`` begins, on its thread."""
    host = trace.host
    place = innermost_on(
        host.threads[candidates], host.starts[candidates], host.ends[candidates], host.threads[rows], host.starts[rows]
    )
    return np.where(place == UNKNOWN, UNKNOWN, candidates[place]) if len(candidates) else place


def operators_of(trace: TraceFile, calls: Rows) -> Rows:
    """The row of :class:`HostEvents` of the operator that each of these of its rows belongs to; or :data:`UNKNOWN`.

    It is the innermost that holds on the row's thread when the row begins (an operator belongs to itself), but for
    convolutions and attention: there the one that was given the whole problem. What launches a graph belongs to none:
    its kernels are many operators', which called nothing now.
    """
    host = trace.host
    found = np.full(len(calls), UNKNOWN, np.int64)
    if not len(host.starts):
        return found
    there = np.flatnonzero((calls != UNKNOWN) & ~named(trace, GRAPH_LAUNCHES)[calls])
    rows = calls[there]
    is_operator = (host.categories == HOST) & ~named(trace, _NO_OPERATOR)
    around = innermost_of(trace, np.flatnonzero(is_operator), rows)
    whole = whole_problems(trace, rows)
    found[there] = np.select((whole != UNKNOWN, is_operator[rows]), (whole, rows), around)
    return found


def whole_problems(trace: TraceFile, rows: Rows) -> Rows:
    """The convolution or attention that was given the whole problem of which each row is part, or :data:`UNKNOWN`."""
    is_whole = (trace.host.categories == HOST) & named(trace, _WHOLE)
    return innermost_of(trace, np.flatnonzero(is_whole), rows)


def column_at(column: npt.NDArray[np.int32], rows: Rows) -> npt.NDArray[np.int32]:
    """A column of the host's events at some rows; :data:`UNKNOWN` at rows of that."""
    known = rows != UNKNOWN
    found = np.full(len(rows), UNKNOWN, np.int32)
    found[known] = column[rows[known]]
    return found


def named(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.bool_]:
    """Which of the host's events have the pattern in their names."""
    matching = np.array([bool(pattern.search(name)) for name in trace.names] or [False], np.bool_)
    return np.asarray(matching[trace.host.names], np.bool_)
