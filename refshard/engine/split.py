"""Parameters that tensor parallelism has split already: each rank shards the part that it has.

``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors over a mesh of its own. The engine
flattens this rank's part of each, and shows the modules DTensors again, over views of the unit's slot.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from refshard.engine.collectives import Collectives
from refshard.errors import EngineError


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of ``mesh`` divide a parameter of this ``shape`` and ``stride``."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> Self | None:
        """How ``parameter`` is split; None if it is a plain tensor.

        Raises:
            EngineError: it is split unevenly, over several axes, or is a pending sum.
        """
        if not isinstance(parameter, DTensor):
            return None
        mesh, placements = parameter.device_mesh, parameter.placements
        even = all(
            p.is_replicate() or (p.is_shard() and parameter.shape[p.dim] % mesh.size() == 0)  # type: ignore[attr-defined]
            for p in placements
        )
        if mesh.ndim != 1 or not even:
            raise EngineError(
                f"parameter '{name}' must be split evenly over one axis of a mesh, got {placements} of "
                f"{tuple(parameter.shape)} over {mesh.ndim} axes, {mesh.size()} ranks; choose a degree that divides it"
            )
        return cls(mesh, placements, parameter.shape, parameter.stride())

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
        (placement,) = self.placements
        bounds = [slice(0, size) for size in self.shape]
        if placement.is_shard():
            dim: int = placement.dim % len(self.shape)  # type: ignore[attr-defined]
            length = self.shape[dim] // self.mesh.size()
            first = self.mesh.get_local_rank() * length
            bounds[dim] = slice(first, first + length)
        return tuple(bounds)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The parameter that this rank's ``part`` belongs to; a collective call of the mesh."""
        return self.wrap(part).full_tensor()

    @property
    def divided(self) -> bool:
        """Whether other ranks of the mesh have other elements."""
        return self.placements != (Replicate(),)


@dataclass(frozen=True, slots=True)
class SplitAxis:
    """The shard axis together with the mesh that splits a parameter: over both, its norms are those of the whole."""

    collectives: Collectives
    mesh: DeviceMesh

    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """See :meth:`Collectives.reduce_over_shards`."""
        self.collectives.reduce_over_shards(tensor, op)
        there = tensor.to(self.mesh.device_type)
        dist.all_reduce(there, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.mesh.get_group())
        tensor.copy_(there)
