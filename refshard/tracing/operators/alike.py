"""Which runs of kernels do the same work, so that their durations can be compared."""

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Spans
from refshard.tracing.difference.works import phases_of
from refshard.tracing.operators.nesting import Rows


def same_work(spans: Spans, rows: Rows, operands: npt.NDArray[np.int32]) -> Rows:
    """A number for each of the kernels ``rows``; those of one number do the same work. :data:`UNKNOWN`: who knows.

    Kernels do the same work if their names, grids and blocks are the same, and their operators' ``operands`` too.
    Where the trace has no operands, grid and block are not enough: kernels that loop over their data have one grid
    for many sizes. There, runs also need the same place in the same sequence of kernels: of a unit's forward,
    backward or optimizer step, as layers of one kind have, or of the whole step's for kernels of no unit.
    """
    found = np.full(len(rows), UNKNOWN, np.int64)
    shaped = operands != UNKNOWN
    found[shaped] = grouped(spans.signatures[rows[shaped]], operands[shaped])[1]
    placed = np.flatnonzero(spans.launches[rows] != UNKNOWN)
    places = _places(spans, rows[placed])
    told = np.array([name.endswith("]") for name in spans.signature_names] or [False])  # grid and block
    usable = ~shaped[placed] & told[spans.signatures[rows[placed]]]
    found[placed[usable]] = places[usable] + found.max(initial=UNKNOWN) + 1
    return found


def _places(spans: Spans, rows: Rows) -> Rows:
    """A number for each row: equal for those at one place of equal sequences."""
    if not len(rows):
        return rows
    blocks = (spans.steps[rows], spans.units[rows], phases_of(spans)[rows])
    order = np.lexsort((spans.launches[rows], *blocks))
    changes = np.any([np.diff(column[order]) != 0 for column in blocks], axis=0)
    first = np.append(True, changes)
    starts = np.flatnonzero(first)
    block = np.cumsum(first) - 1
    position = np.arange(len(rows)) - starts[block]
    # A sequence's fingerprint: equal ones have equal sums, others only by a chance of 2^-64.
    random = np.random.default_rng(0).integers(0, 2**64, len(spans.signature_names), np.uint64)
    tokens = random[spans.signatures[rows[order]]] * (2 * position.astype(np.uint64) + np.uint64(1))
    sequences = np.unique(np.add.reduceat(tokens, starts), return_inverse=True)[1]
    found = np.empty(len(rows), np.int64)
    found[order] = sequences[block] * len(rows) + position
    return found


def grouped(*columns: npt.NDArray[np.integer]) -> tuple[Rows, Rows]:
    """Rows alike in all columns: the first row of each group, and the group of each row."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        lowest, highest = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        key = key * (highest - lowest + 1) + (column.astype(np.int64) - lowest)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first, group
