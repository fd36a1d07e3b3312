"""The whole tensor of a local part: which elements each rank holds, and how to reach the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from refshard.engine.collectives import Axis, Collectives
from refshard.engine.layout import Box, boxes
from refshard.engine.split import Split
from refshard.errors import EngineError


@dataclass(eq=False, slots=True)
class Master:
    """The ``shard`` that parts of parameters lie in. ``handed_out`` says that others were given plain tensors of that
    memory, through which they may write unseen. ``elsewhere_other`` says that ranks of the model outside of the unit's
    mesh have other parameters under the same names.
    """

    shard: torch.Tensor
    handed_out: bool = False
    elsewhere_other: bool = False

    def check_known(self, name: str, split: Split | None, done: str = "be saved") -> None:
        """Check that a tensor in it is known by its name to all ranks of the model, as it must to ``be saved``.

        Raises:
            EngineError: other ranks have another one of this ``name``.
        """
        if self.elsewhere_other and split is None:
            raise EngineError(
                f"'{name}' cannot {done}: ranks outside of its policy's mesh have another tensor of this name; make "
                "experts DTensors over the mesh of those ranks (distribute_tensor with Shard(0)) before refshard.shard"
            )

    def hand_out(self, local: torch.Tensor) -> None:
        """Others are given ``local``; that of a gradient or of optimizer state lies elsewhere."""
        self.handed_out |= self.holds(local)

    def holds(self, local: torch.Tensor) -> bool:
        """Whether ``local`` lies in this memory, as parameters do, and gradients and optimizer state do not."""
        return local.untyped_storage().data_ptr() == self.shard.untyped_storage().data_ptr()


@dataclass(eq=False, slots=True)
class Whole:
    """One tensor that the ranks of a shard axis divide: each holds a range of the flattened tensor, possibly empty.

    ``ranges`` are ``[start, stop)`` by rank of ``collectives``' shard axis. If tensor parallelism has ``split`` the
    tensor too, ``shape`` is the global tensor's, and the ranges are of this rank's slab of it, flattened. ``mesh`` is
    what torch's state-dict functions want to see on a DTensor; None where there are no process groups. ``master`` is
    the memory that the parameter lies in. ``inner`` says that the tensor is one of several that a parameter consists
    of. A parameter, its gradient and its optimizer state share one object. For a complex tensor, ``pairs`` is the real
    tensor with one dimension more, made on first use.
    """

    name: str
    shape: torch.Size
    ranges: tuple[tuple[int, int], ...]
    collectives: Collectives
    split: Split | None = None
    mesh: DeviceMesh | None = None
    master: "Master | None" = None
    inner: bool = False
    start: int = field(init=False)
    stop: int = field(init=False)
    axis: Axis = field(init=False)
    slab: tuple[slice, ...] = field(init=False)
    slab_shape: torch.Size = field(init=False)
    pairs: "Whole | None" = field(init=False, default=None)
    _reshaped: dict[torch.Size, "Whole"] = field(init=False)

    def __post_init__(self) -> None:
        """``axis`` is what reductions over all elements go over, ``slab`` where this rank's slab lies in the whole."""
        self.start, self.stop = self.ranges[self.collectives.rank]
        self.axis = self.split.axis(self.collectives) if self.split else self.collectives
        self.slab = self.split.slab if self.split else tuple(slice(0, n) for n in self.shape)
        self.slab_shape = torch.Size([s.stop - s.start for s in self.slab])
        self._reshaped = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a part are parts of a tensor that is divided in the same way."""
        return self

    @property
    def divided(self) -> bool:
        """Whether tensor parallelism gives other ranks other slabs; where it splits unevenly, one may be the whole."""
        return self.axis is not self.collectives

    @property
    def held(self) -> str:
        """What this rank has, in words."""
        slab = f" of its slab {list(self.slab_shape)}" if self.divided else ""
        return f"elements {self.start} to {self.stop} of {self.slab_shape.numel()}{slab}"

    def alike(self, other: "Whole") -> bool:
        """Whether parts of ``other`` hold the same elements of a tensor of the same shape."""
        mine = self.shape, self.ranges, self.slab, self.collectives.rank
        return self is other or mine == (other.shape, other.ranges, other.slab, other.collectives.rank)

    def reshaped(self, shape: torch.Size) -> "Whole":
        """The same elements in the same order as a tensor of another shape.

        Raises:
            EngineError: tensor parallelism has split the tensor, and a slab's elements do not follow each other.
        """
        if shape == self.shape:
            return self
        if shape not in self._reshaped:
            if self.divided:
                raise EngineError(
                    f"{self.label}: cannot be given the shape {tuple(shape)}, since tensor parallelism has split it; "
                    "call full_tensor() first"
                )
            made = Whole(self.name, shape, self.ranges, self.collectives, None, self.mesh, self.master)
            made._reshaped = self._reshaped
            self._reshaped[shape] = made
        return self._reshaped[shape]

    @property
    def label(self) -> str:
        """The tensor in messages."""
        return f"'{self.name}' of shape {list(self.shape)}"

    def boxes(self) -> tuple[tuple[Box, int], ...]:
        """This rank's range as boxes of the whole, each with the first of its elements in the local tensor."""
        first, found = 0, []
        for box in boxes(self.slab_shape, self.start, self.stop - self.start):
            offsets = tuple(o + s.start for o, s in zip(box.offsets, self.slab))
            found.append((Box(offsets, box.sizes), first))
            first += box.numel
        return tuple(found)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements, 1-D, of a plain tensor that expands to the shape; a view where that is cheap."""
        expanded = whole.expand(self.shape)
        if not any(expanded.stride()):  # one value, as in the gradient of a sum: the whole need not exist
            return expanded.as_strided((self.stop - self.start,), (0,))
        slab = expanded[self.slab] if self.split else expanded
        if slab.is_contiguous():
            return slab.reshape(-1)[self.start : self.stop]
        cuts = [
            expanded[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))].reshape(-1)
            for box, _ in self.boxes()
        ]
        return torch.cat(cuts) if cuts else whole.new_empty(0)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor from every rank's 1-D part; a collective call of all ranks that hold it."""
        slab = self.collectives.gather_ranges(local, self.ranges).view(self.slab_shape)
        return slab if self.split is None else self.split.whole(slab)

    def mean_part(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part, 1-D, of the mean over all ranks of a gradient of the whole; a collective call."""
        mean = gradient / self.axis.world_size
        self.axis.reduce_over_shards(mean, "sum")
        return self.collectives.mean_over_replicas(self.cut(mean).clone())

    def mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a small tensor over all ranks; a collective call."""
        mean = value / self.axis.world_size
        self.axis.reduce_over_shards(mean, "sum")
        return self.collectives.mean_over_replicas(mean)

    def reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> torch.Tensor:
        """``tensor``, replaced by its sum or maximum over all ranks that hold other elements."""
        self.axis.reduce_over_shards(tensor, op)
        return tensor


def reduce_max(values: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The maximum over ``axis`` of each of the 1-D ``values``: NaN where a rank has NaN, which libraries may lose."""
    if not values.is_floating_point():
        axis.reduce_over_shards(values, "max")
        return values
    nan = values.isnan()
    both = torch.cat([values.masked_fill(nan, -torch.inf), nan.to(values.dtype)])
    axis.reduce_over_shards(both, "max")
    found, lost = both.chunk(2)
    return found.masked_fill(lost > 0, torch.nan)


def by_axis(wholes: Sequence[Whole | None]) -> dict[Axis | None, list[int]]:
    """Indices by the axis that a reduction goes over; under None those of plain tensors."""
    found: dict[Axis | None, list[int]] = {}
    for index, whole in enumerate(wholes):
        found.setdefault(whole.axis if whole is not None else None, []).append(index)
    return found
