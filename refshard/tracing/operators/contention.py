"""How much longer kernels take beside communication than alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Kind, Nanoseconds, Timeline
from refshard.tracing.operators.alike import grouped, same_work
from refshard.tracing.operators.nesting import Rows
from refshard.tracing.operators.operator_figures import CLASSES, Contention, OperatorClass, Slowdown

ENOUGH = 3
"""So many runs of each sort are needed before they are compared."""
SURE = 1.96
"""Beyond so many standard deviations a difference of ranks is no chance, at 5 %."""
_MOST = 50


def find_contention(
    timeline: Timeline, rows: Rows, classes: npt.NDArray[np.int8], operands: npt.NDArray[np.int32],
    shorts: Mapping[int, str],
) -> Contention | None:  # fmt: skip
    """Compare the spans ``rows``, of these ``classes`` and ``operands``; ``shorts`` are their kernels' names by code.

    A run is beside communication if more than half of it is, and alone if nothing of it is. None if no run is beside
    communication.
    """
    spans, comm, works = timeline.spans, timeline.busy(Kind.COMM), same_work(timeline.spans, rows, operands)
    lengths = spans.ends[rows] - spans.starts[rows]
    within = comm.within(spans.starts[rows], spans.ends[rows])
    beside = 2 * within > lengths
    if not beside.any():
        return None
    mine = np.flatnonzero((beside | (within == 0)) & (works != UNKNOWN))
    sample, group = grouped(works[mine], classes[mine], spans.names[rows[mine]])
    found = _Comparison.of(group, beside[mine], lengths[mine], len(sample))
    enough, sample = found.enough, mine[sample]
    kinds = classes[sample].astype(np.int64)
    by_kernel = spans.names[rows[sample]] * len(CLASSES) + kinds

    def slowdowns(by: Rows, label: Mapping[int, str] | None) -> tuple[Slowdown, ...]:
        told = []
        for code in np.unique(by[enough]).tolist():
            kind = CLASSES[code % len(CLASSES)]
            name = kind if label is None else label[code // len(CLASSES)]
            told.append(found.over(enough & (by == code), name, kind))
        return tuple(sorted(told, key=lambda one: (-one.lost_ns, -one.beside_ns)))

    compared = np.zeros(len(rows), np.bool_)
    compared[mine] = beside[mine] & enough[group]
    return Contention(
        classes=slowdowns(kinds, None),
        kernels=slowdowns(by_kernel, shorts)[:_MOST],
        compared_ns=int(lengths[compared].sum()),
        beside_ns=int(lengths[beside].sum()),
        shapeless_ns=int(lengths[beside & ~compared & (operands == UNKNOWN)].sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Comparison:
    """Of each group: whether it has enough runs of both sorts, how many are ``beside``, the medians of both, and the
    rank sum of those beside: by how much it exceeds its expectation, and its variance, as :meth:`over` weighs them.
    """

    enough: npt.NDArray[np.bool_]
    runs: Rows
    slow: npt.NDArray[np.float64]
    plain: npt.NDArray[np.float64]
    excess: npt.NDArray[np.float64]
    variance: npt.NDArray[np.float64]

    @classmethod
    def of(cls, group: Rows, beside: npt.NDArray[np.bool_], lengths: Nanoseconds, count: int) -> "_Comparison":
        runs, alone = (np.bincount(group[which], minlength=count) for which in (beside, ~beside))
        ranks, ties = _ranks(group, lengths, count)
        every = np.maximum(2, runs + alone)  # of one run nothing is said
        excess = np.bincount(group[beside], ranks[beside], minlength=count) - runs * (every + 1) / 2
        variance = runs * alone / 12 * (every + 1 - ties / (every * (every - 1)))
        weights = 1 / (every + 1)
        return cls(
            enough=(runs >= ENOUGH) & (alone >= ENOUGH), runs=runs,
            slow=runs * _medians(group[beside], lengths[beside], count),
            plain=runs * _medians(group[~beside], lengths[~beside], count),
            excess=excess * weights, variance=variance * weights**2,
        )  # fmt: skip

    def over(self, groups: npt.NDArray[np.bool_], name: str, kind: OperatorClass) -> Slowdown:
        """All of some groups.

        Whether it is a slowdown is decided by Wilcoxon's rank sums, joined over the groups as by van Elteren (1960).
        """
        excess, variance = self.excess[groups].sum(), self.variance[groups].sum()
        slow, plain = round(self.slow[groups].sum()), round(self.plain[groups].sum())
        return Slowdown(
            name=name, kind=kind, runs=int(self.runs[groups].sum()), beside_ns=slow, alone_ns=plain,
            slower=bool(slow > plain and excess >= SURE * np.sqrt(variance) and variance > 0),
        )  # fmt: skip


def _ranks(groups: Rows, values: Nanoseconds, count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Each value's rank in its group, from 1, equal ones sharing their mean; and of each group the sum of t³ - t over
    its t equal values.
    """
    order = np.lexsort((values, groups))
    first = np.append(True, (np.diff(groups[order]) != 0) | (np.diff(values[order]) != 0))[: len(order)]
    starts, run = np.flatnonzero(first), np.cumsum(first) - 1
    equal = np.diff(np.append(starts, len(order)))
    sizes = np.bincount(groups, minlength=count)
    begins = (np.cumsum(sizes) - sizes)[groups[order]]
    ranks = np.empty(len(order), np.float64)
    ranks[order] = starts[run] - begins + (equal[run] + 1) / 2
    ties = np.zeros(count, np.int64)
    np.add.at(ties, groups[order][starts], equal**3 - equal)
    return ranks, ties


def _medians(groups: Rows, values: Nanoseconds, count: int) -> npt.NDArray[np.float64]:
    """The median of each group's values; 0 of a group without any."""
    order = np.lexsort((values, groups))
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    ranked = np.append(values[order], 0)
    low, high = first + np.maximum(0, sizes - 1) // 2, first + sizes // 2
    last = len(ranked) - 1
    return np.where(sizes > 0, (ranked[np.minimum(low, last)] + ranked[np.minimum(high, last)]) / 2, 0.0)
