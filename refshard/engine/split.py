"""Parameters that tensor parallelism has split already: each rank shards the part that it has.

``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors over a mesh of its own. The engine
flattens this rank's part of each, and shows the modules DTensors again, over views of the unit's slot.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from refshard.engine.collectives import Collectives
from refshard.errors import EngineError


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of ``mesh`` divide a parameter of this ``shape`` and ``stride``.

    By DTensor's rule, which is that of ``torch.chunk``: where an axis does not divide the size, its last ranks have
    less than the others, or nothing.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> Self | None:
        """How ``parameter`` is split; None if it is a plain tensor.

        Raises:
            EngineError: it is a pending sum, or is split in an order of its own.
        """
        if not isinstance(parameter, DTensor):
            return None
        if not all(type(placement) in (Shard, Replicate) for placement in parameter.placements):
            raise EngineError(
                f"parameter '{name}' must be split by Shard and Replicate, got {parameter.placements}; redistribute it "
                "before refshard.shard"
            )
        return cls(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())

    def wrap(self, part: torch.Tensor) -> DTensor:
        """This rank's part as the modules see it."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient as autograd gives it, which may be a pending sum."""
        assert isinstance(gradient, DTensor)
        return gradient.redistribute(placements=self.placements).to_local()

    @property
    def slab(self) -> tuple[slice, ...]:
        """Which part of the parameter this rank has."""
        bounds = [slice(0, size) for size in self.shape]
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                bound = bounds[placement.dim]
                length = -(-(bound.stop - bound.start) // self.mesh.size(axis))
                first = min(bound.start + self.mesh.get_local_rank(axis) * length, bound.stop)
                bounds[placement.dim] = slice(first, min(first + length, bound.stop))
        return tuple(bounds)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The parameter that this rank's ``part`` belongs to; a collective call of the mesh."""
        return self.wrap(part).full_tensor()

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the mesh that divide the parameter."""
        return tuple(axis for axis, placement in enumerate(self.placements) if isinstance(placement, Shard))

    def axis(self, collectives: Collectives) -> "Collectives | SplitAxis":
        """What reductions over all elements go over, given the shard axis."""
        return SplitAxis(collectives, self.mesh, self.axes) if self.axes else collectives


@dataclass(frozen=True, slots=True)
class SplitAxis:
    """The shard axis together with the axes of a mesh that split a parameter: over all of them, its norms are those of
    the whole.
    """

    collectives: Collectives
    mesh: DeviceMesh
    axes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks they are."""
        return self.collectives.world_size * math.prod(self.mesh.size(axis) for axis in self.axes)

    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """See :meth:`Collectives.reduce_over_shards`."""
        self.collectives.reduce_over_shards(tensor, op)
        there, of = tensor.to(self.mesh.device_type), dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        for axis in self.axes:
            dist.all_reduce(there, op=of, group=self.mesh.get_group(axis))
        tensor.copy_(there)
