"""Where every parameter lies in its unit's flat buffer, and what a part of one is. Pure arithmetic on shapes.

A unit's parameters are laid end to end in one flat buffer of ``numel`` elements. Rank ``r`` keeps
``[r * shard_numel, (r + 1) * shard_numel)``. Offsets are in elements and the same for every dtype, so that fp32 masters
and bf16 copies of a unit share one layout; the alignment therefore holds for the narrowest dtype.

A shard holds a range of a flattened parameter, while checkpoint formats speak of n-D chunks with offsets and sizes:
:func:`boxes` cuts a range into a ragged head, whole rows and a ragged tail, and the ragged ends again, one dimension
further in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NARROWEST_BYTES = 2
"""Size of the narrowest dtype that parameters are gathered in (bf16)."""
PARAMETER_ALIGNMENT = 128 // NARROWEST_BYTES
"""Elements: each parameter starts on 128 bytes, a GPU's widest coalesced access and two of a CPU's cache lines."""
SHARD_ALIGNMENT = 16 // NARROWEST_BYTES
"""Elements: each shard starts on 16 bytes, the widest vector load and what NCCL's fast paths ask for."""


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """One parameter's place: elements ``[offset, offset + numel)`` of the unit's flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit's flat buffer: ``numel`` elements with all padding, ``world_size`` shards of equal length."""

    parameters: tuple[ParameterLayout, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements that each rank keeps."""
        return self.numel // self.world_size

    def local_range(self, parameter: ParameterLayout, rank: int) -> tuple[int, int]:
        """The part of ``parameter`` that ``rank`` keeps, as ``[start, stop)`` within the rank's shard.

        Empty (start == stop) where the parameter lies wholly in other ranks' shards.
        """
        first = rank * self.shard_numel
        start = min(max(parameter.offset - first, 0), self.shard_numel)
        stop = min(max(parameter.offset + parameter.numel - first, 0), self.shard_numel)
        return start, max(start, stop)


def lay_out(shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> UnitLayout:
    """Place the parameters ``(name, shape)`` in the order given, aligned, and pad to ``world_size`` equal shards."""
    placed, end = [], 0
    for parameter_name, shape in shapes:
        parameter = ParameterLayout(parameter_name, tuple(shape), _round_up(end, PARAMETER_ALIGNMENT))
        placed.append(parameter)
        end = parameter.offset + parameter.numel
    return UnitLayout(tuple(placed), _round_up(max(end, 1), SHARD_ALIGNMENT * world_size), world_size)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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
