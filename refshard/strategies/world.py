"""The ranks that a strategy is given, how a case divides them, and the model's blocks."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from refshard.specs.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a case, and how it divides them.

    ``data`` is the mesh to shard over: one axis, ``"shard"``, which includes context-parallel ranks; with replicas two,
    ``"replicate"`` and ``"shard"``. If the case asks for them, ``tensor`` is the mesh of the ranks that split each
    matrix with this one, ``context`` of ranks that split each sequence, and ``pipeline`` of ranks that pass
    microbatches on. ``blocks`` are the names of the modules that become units.
    """

    case: Case
    group: dist.ProcessGroup
    device: torch.device
    data: DeviceMesh
    tensor: DeviceMesh | None
    context: DeviceMesh | None
    pipeline: DeviceMesh | None
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, case: Case, group: dist.ProcessGroup, device: torch.device, blocks: tuple[str, ...]) -> Self:
        """Divide the ranks of ``group``, which holds all ranks; each of them must call this."""
        job = case.job
        sizes = {
            "pipeline": job.pp_ranks, "replicate": job.dp_replicate, "shard": job.data_ranks // job.dp_replicate,
            "context": job.cp, "tensor": job.tp,
        }  # fmt: skip
        if job.strategy == "tensor-parallel":
            sizes["shard"] = job.gpus  # its only axis, which it splits over
        kept = {"shard", job.strategy}  # a pipeline may be of one rank
        sizes = {name: size for name, size in sizes.items() if size > 1 or name in kept}
        if len(sizes) == 1:
            whole = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
        else:
            # DTensor's plans for an earlier case's mesh of the same shape name that mesh's groups.
            _clear_python_sharding_prop_cache()
            _clear_fast_path_sharding_prop_cache()
            whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        split = {name: whole[name] if name in sizes else None for name in ("tensor", "context", "pipeline")}
        axes = [name for name in ("replicate", "shard") if name in sizes]
        if "context" in sizes:
            data = whole["shard", "context"]._flatten("shard_context")
            data = whole["replicate", "shard_context"] if "replicate" in sizes else data
        else:
            data = whole if axes == [*sizes] else whole[tuple(axes)]
        return cls(case=case, group=group, device=device, data=data, blocks=blocks, **split)

    @property
    def data_rank(self) -> int:
        """This rank's place among the ranks that divide the batch."""
        within = self.case.job.tp_ranks * self.case.job.cp
        return self.group.rank() // within % self.case.job.data_ranks

    @property
    def stage_rank(self) -> int:
        """This rank's place in its pipeline."""
        return 0 if self.pipeline is None else self.pipeline.get_local_rank()

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that this rank computes on, with the ranks that split matrices with it."""
        return self.case.job.seq_len // self.case.job.cp

    @property
    def shards(self) -> int:
        """Number of ranks on the shard axis."""
        return self.data.size(self.data.ndim - 1)

    @property
    def mixed(self) -> bool:
        """Whether parameters are computed with in another dtype than they are kept in, fp32. A model that is tuned by
        adapters is kept in the dtype that it is computed in.
        """
        return self.case.job.precision == "bf16" and self.case.job.tuning == "full"

    @property
    def reduced(self) -> torch.dtype:
        """Reduction dtype of gradients: the dtype that parameters are kept in."""
        return torch.float32 if self.mixed else self.computed

    @property
    def computed(self) -> torch.dtype:
        """The dtype of parameters in forward and backward."""
        return torch.bfloat16 if self.case.job.precision == "bf16" else torch.float32
