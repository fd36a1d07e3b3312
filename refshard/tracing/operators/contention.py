"""How much longer kernels take beside communication than alone."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from refshard.timeline import Kind, Timeline
from refshard.tracing.operators.operator_figures import CLASSES, Contention, Slowdown

ENOUGH = 3
"""So many runs of each sort are needed before their medians are compared."""
_MOST = 50


def find_contention(
    timeline: Timeline, rows: npt.NDArray[np.int64], classes: npt.NDArray[np.int8], operands: npt.NDArray[np.int32],
    shorts: Mapping[int, str],
) -> Contention | None:  # fmt: skip
    """Compare the spans ``rows``, of these ``classes`` and ``operands``; ``shorts`` are their kernels' names by code.

    A run is beside communication if more than half of it is, and alone if nothing of it is.
    """
    spans, comm = timeline.spans, timeline.busy(Kind.COMM)
    starts, ends = spans.starts[rows], spans.ends[rows]
    lengths, within = ends - starts, comm.within(starts, ends)
    beside, alone = 2 * within > lengths, within == 0
    sample, group = grouped(spans.signatures[rows], operands, classes)
    count = len(sample)
    runs = np.bincount(group[beside], minlength=count)
    enough = (runs >= ENOUGH) & (np.bincount(group[alone], minlength=count) >= ENOUGH)
    if not enough.any():
        return None
    medians = [_medians(group[which], lengths[which], count) for which in (beside, alone)]
    slow, plain = (np.where(enough, runs * median, 0.0) for median in medians)
    names = spans.names[rows][sample]
    by_kernel, kinds = names.astype(np.int64) * len(CLASSES) + classes[sample], classes[sample]

    def slowdowns(by: npt.NDArray[np.integer], label: Mapping[int, str] | None) -> tuple[Slowdown, ...]:
        found = []
        for code in np.unique(by[enough]).tolist():
            mine = enough & (by == code)
            kind = CLASSES[code % len(CLASSES)]
            found.append(
                Slowdown(
                    name=kind if label is None else label[code // len(CLASSES)], kind=kind,
                    runs=int(runs[mine].sum()), beside_ns=round(slow[mine].sum()), alone_ns=round(plain[mine].sum()),
                )
            )  # fmt: skip
        return tuple(sorted(found, key=lambda one: -one.lost_ns))

    return Contention(
        classes=slowdowns(kinds, None),
        kernels=slowdowns(by_kernel, shorts)[:_MOST],
        compared_ns=int(lengths[beside & enough[group]].sum()),
        beside_ns=int(lengths[beside].sum()),
        by_shape=bool((operands >= 0).any()),
    )


def grouped(*columns: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows alike in all columns: the first row of each group, and the group of each row."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        lowest, highest = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        key = key * (highest - lowest + 1) + (column.astype(np.int64) - lowest)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first, group


def _medians(groups: npt.NDArray[np.int64], values: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """The median of each group's values; 0 of a group without any."""
    order = np.lexsort((values, groups))
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    ranked = np.append(values[order], 0)
    low, high = first + np.maximum(0, sizes - 1) // 2, first + sizes // 2
    last = len(ranked) - 1
    return np.where(sizes > 0, (ranked[np.minimum(low, last)] + ranked[np.minimum(high, last)]) / 2, 0.0)
