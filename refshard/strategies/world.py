"""The ranks that a strategy is given, how a case divides them, and the model's blocks."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from refshard.specs.case import CaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a case, and how it divides them.

    ``data`` is the mesh that batches are divided over and that a strategy shards over: of one axis, ``"shard"``; with
    replicas of two, ``"replicate"`` and ``"shard"``. ``tensor`` is the mesh of the ranks that split each matrix with
    this one, if the case asks for that. ``blocks`` are the names of the modules that become units.
    """

    case: CaseSpec
    group: dist.ProcessGroup
    device: torch.device
    data: DeviceMesh
    tensor: DeviceMesh | None
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, case: CaseSpec, group: dist.ProcessGroup, device: torch.device, blocks: tuple[str, ...]) -> Self:
        """Divide the ranks of ``group``, which are all that there are; each of them must call this."""
        if case.replicas * case.tensor_parallel == 1:
            data, tensor = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",)), None
        else:
            sizes = {
                "replicate": case.replicas,
                "shard": case.world_size // case.replicas // case.tensor_parallel,
                "tensor": case.tensor_parallel,
            }
            sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
            mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            axes = tuple(name for name in sizes if name != "tensor")
            data = mesh[axes] if "tensor" in sizes else mesh
            tensor = mesh["tensor"] if "tensor" in sizes else None
        return cls(case=case, group=group, device=device, data=data, tensor=tensor, blocks=blocks)

    @property
    def data_rank(self) -> int:
        """This rank's place among those that divide the batch."""
        return self.group.rank() // self.case.tensor_parallel % self.case.data_ranks

    @property
    def shards(self) -> int:
        """Number of ranks on the shard axis."""
        return self.data.size(self.data.ndim - 1)

    @property
    def mixed(self) -> bool:
        """Whether parameters are computed with in another dtype than they are kept in, fp32. What is tuned by adapters
        is kept in what it is computed in.
        """
        return self.case.precision == "bf16" and self.case.tuning == "full"

    @property
    def reduced(self) -> torch.dtype:
        """What gradients are reduced in: the dtype that parameters are kept in."""
        return torch.float32 if self.mixed else self.computed

    @property
    def computed(self) -> torch.dtype:
        """What parameters are computed with."""
        return torch.bfloat16 if self.case.precision == "bf16" else torch.float32
