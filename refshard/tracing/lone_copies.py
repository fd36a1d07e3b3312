"""Copies and fills beside which the device does nothing else: time that is neither compute nor idle."""

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import Intervals, Kind, Meaning, Nanoseconds, Timeline
from refshard.tracing.figures import LoneCopy


def lone(timeline: Timeline) -> Intervals:
    """When copies and fills run and nothing else does.

    Copies into and out of the buffers of collectives count as something else: they have figures of their own.
    """
    copies = _copies(timeline)
    return timeline.spans.covered(copies) - timeline.spans.covered(~copies) if copies.any() else Intervals.of([])


def lone_copies(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[LoneCopy, ...]:
    """The copies of the windows ``[starts[i], ends[i])`` by name, those with most time alone first."""
    spans, alone = timeline.spans, lone(timeline) & Intervals.union(starts, ends)
    rows = np.flatnonzero(_copies(timeline))
    each = alone.within(spans.starts[rows], spans.ends[rows])
    rows, each = rows[each > 0], each[each > 0]
    names, group = np.unique(spans.names[rows], return_inverse=True)
    total = np.zeros(len(names), np.int64)
    np.add.at(total, group, each)
    counts = np.bincount(group, minlength=len(names))
    return tuple(
        LoneCopy(name=spans.name_table[names[place]], ns=int(total[place]), count=int(counts[place]))
        for place in np.argsort(-total, kind="stable").tolist()
    )


def _copies(timeline: Timeline) -> npt.NDArray[np.bool_]:
    spans = timeline.spans
    found: npt.NDArray[np.bool_] = spans.of_kind(Kind.COPY) & (
        (spans.under & (Meaning.COPY_IN | Meaning.COPY_OUT)) == 0
    )
    return found
