"""A contiguous range of a flattened tensor as rectangular boxes of the tensor itself. Pure arithmetic.

A shard is a range of a flattened parameter, while checkpoint formats speak of n-D chunks with offsets and sizes. A
range is cut into a ragged head, whole rows and a ragged tail, and the ragged ends again, one dimension further in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an n-D tensor, ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], first: int, numel: int) -> tuple[Box, ...]:
    """Elements ``[first, first + numel)`` of a flattened row-major tensor as the fewest boxes, in ascending order.

    Each box is itself contiguous in the flattened tensor, so that it can be viewed in place, and the boxes follow each
    other without a gap. An n-D tensor needs at most ``2n - 1`` of them, a 0-d tensor one, an empty range none.

    Raises:
        ValueError: the range does not lie within the tensor.
    """
    total = math.prod(shape)
    if not 0 <= first <= first + numel <= total:
        raise ValueError(f"the range must lie within the {total} elements of {tuple(shape)}, got {first} + {numel}")
    return tuple(_cut((), tuple(shape), first, first + numel)) if numel else ()


def _cut(outer: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of the non-empty range ``[start, stop)`` of the sub-tensor of ``shape`` at the index ``outer``."""
    if not shape:
        return [Box(outer, (1,) * len(outer))]
    row = math.prod(shape[1:])
    first_row, last_row = start // row, (stop - 1) // row
    ragged_head = start % row or (first_row == last_row and stop % row)
    if first_row == last_row and ragged_head:
        return _cut((*outer, first_row), shape[1:], start - first_row * row, stop - first_row * row)
    head = _cut((*outer, first_row), shape[1:], start % row, row) if ragged_head else []
    tail = _cut((*outer, last_row), shape[1:], 0, stop % row) if stop % row else []
    rows = range(first_row + bool(head), last_row + (not tail))
    whole = [Box((*outer, rows.start, *(0 for _ in shape[1:])), (*(1 for _ in outer), len(rows), *shape[1:]))]
    return [*head, *(whole if rows else []), *tail]
