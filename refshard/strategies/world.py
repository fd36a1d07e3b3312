"""The ranks that a strategy is given, how a case divides them, and the model's blocks."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from refshard.specs.case import CaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a case, and how it divides them.

    ``data`` is the mesh that a strategy shards over: of one axis, ``"shard"``, which context-parallel ranks lie on too;
    with replicas of two, ``"replicate"`` and ``"shard"``. ``tensor`` is the mesh of the ranks that split each matrix
    with this one, ``context`` of those that split each sequence, ``pipeline`` of those that pass microbatches on, each
    if the case asks for that. ``blocks`` are the names of the modules that become units.
    """

    case: CaseSpec
    group: dist.ProcessGroup
    device: torch.device
    data: DeviceMesh
    tensor: DeviceMesh | None
    context: DeviceMesh | None
    pipeline: DeviceMesh | None
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, case: CaseSpec, group: dist.ProcessGroup, device: torch.device, blocks: tuple[str, ...]) -> Self:
        """Divide the ranks of ``group``, which are all that there are; each of them must call this."""
        sizes = {
            "pipeline": case.pipeline_ranks,
            "replicate": case.replicas,
            "shard": case.data_ranks // case.replicas,
            "context": case.context_parallel,
            "tensor": case.tensor_parallel,
        }
        if case.strategy == "tensor-parallel":
            sizes["shard"] = case.world_size  # its only axis, which it splits over
        kept = {"shard", case.strategy}  # a pipeline may be of one rank
        sizes = {name: size for name, size in sizes.items() if size > 1 or name in kept}
        if len(sizes) == 1:
            whole = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
        else:
            # What DTensor planned for an earlier case's mesh of the same shape names the groups of that one.
            _clear_python_sharding_prop_cache()
            _clear_fast_path_sharding_prop_cache()
            whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        split = {name: whole[name] if name in sizes else None for name in ("tensor", "context", "pipeline")}
        return cls(case=case, group=group, device=device, data=_data(whole, sizes), blocks=blocks, **split)

    @property
    def data_rank(self) -> int:
        """This rank's place among those that divide the batch."""
        within = self.case.tensor_ranks * self.case.context_parallel
        return self.group.rank() // within % self.case.data_ranks

    @property
    def stage_rank(self) -> int:
        """This rank's place in its pipeline."""
        return 0 if self.pipeline is None else self.pipeline.get_local_rank()

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        return self.case.global_batch // self.case.data_ranks // self.case.microbatches

    @property
    def tokens(self) -> int:
        """Of each sequence, the tokens that this rank and those that split matrices with it compute on."""
        return self.case.seq_len // self.case.context_parallel

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


def _data(whole: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    if "context" not in sizes:
        axes = tuple(name for name in ("replicate", "shard") if name in sizes)
        return whole if axes == tuple(sizes) else whole[axes]
    shards = whole["shard", "context"]._flatten("shard_context")
    return whole["replicate", "shard_context"] if "replicate" in sizes else shards
