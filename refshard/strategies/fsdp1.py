"""torch's first FSDP, ``FullyShardedDataParallel``: the baseline of YaFSDP's own comparison."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles, _get_fsdp_states_with_modules
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import storage_and_values
from refshard.strategies.loop import PlainLoop
from refshard.strategies.world import World

_HYBRID = {"FULL_SHARD": fsdp.ShardingStrategy.HYBRID_SHARD, "SHARD_GRAD_OP": fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2}
EMBEDDING = "model.embed_tokens"
ROOT = "root"
_PREFIX = "_fsdp_wrapped_module."


@final
class FSDP1(Strategy):
    """Blocks and the embedding are units; the final norm and the head, and a tied embedding, are the root's. In a model
    that is no Llama, all but blocks is the root's. Each microbatch is reduced into the shard; without sharding, only
    the last one.
    """

    _module: fsdp.FullyShardedDataParallel

    def __init__(
        self,
        sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = "FULL_SHARD",
        prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE",
    ) -> None:
        self._sharding = sharding
        self._prefetch = None if prefetch is None else fsdp.BackwardPrefetch[prefetch]

    def wrap(self, model: nn.Module, world: World) -> Loop:
        self._world = world
        if world.shards == 1:
            raise UnsupportedError("FSDP1 on a single rank turns every sharding strategy into NO_SHARD")
        if world.case.job.offload and world.device.type == "cpu":
            try:
                torch.empty(1).pin_memory()  # as FSDP1 does on its first step
            except RuntimeError as error:
                raise UnsupportedError(f"FSDP1 offloads to pinned memory, and torch says: {error}") from None
        units = {model.get_submodule(name) for name in world.blocks}
        if isinstance(model, Llama) and not model.spec.tied:
            units.add(model.model.embed_tokens)
        strategy = fsdp.ShardingStrategy[self._sharding]
        options: dict[str, Any] = {"process_group": world.group, "sharding_strategy": strategy}
        if world.case.job.dp_replicate > 1:
            options = {"device_mesh": world.data, "sharding_strategy": _HYBRID[self._sharding]}
        if world.mixed:
            options["mixed_precision"] = fsdp.MixedPrecision(param_dtype=world.computed, reduce_dtype=world.reduced)
        self._module = fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
            backward_prefetch=self._prefetch, cpu_offload=fsdp.CPUOffload(offload_params=world.case.job.offload),
            device_id=world.device, param_init_fn=storage_and_values(model, world), use_orig_params=True, **options,
        )  # fmt: skip
        unsynced = self._module.no_sync if self._sharding == "NO_SHARD" else nullcontext
        return PlainLoop(self._module, world, unsynced=unsynced)

    def wrapped_units(self) -> tuple[str, ...]:
        found = zip(*_get_fsdp_states_with_modules(self._module))
        names = {module: name for name, module in self._module.named_modules()}
        return tuple(names[module].replace(_PREFIX, "") or ROOT for state, module in found if state._handle is not None)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """A unit is gathered for forward, and again for backward if forward freed it and backward reaches it, which it
        does not for a frozen embedding. If any of it is trained, all of it is reduced over the shards, then over the
        replicas. Only backward frees the root. Without sharding a unit's gradients are all-reduced once a step.
        """
        world, sharded = self._world, self._sharding != "NO_SHARD"
        issued, training = list[tuple[str, int]](), world.case.job.workload == "training"
        names = self.wrapped_units()
        for index, handle in enumerate(_get_fsdp_handles(self._module)):
            flat = handle.flat_param
            reduced = training and flat.requires_grad
            if not sharded:
                issued += [("all_reduce", flat.numel() * world.reduced.itemsize)] * reduced
                continue
            numel, kept = flat._padded_unsharded_size.numel(), names[index] == ROOT or self._sharding == "SHARD_GRAD_OP"
            again = not kept and training and (reduced or names[index] != EMBEDDING)
            gathers = again + (training or not kept)
            issued += [("all_gather", numel * handle._fwd_bwd_param_dtype.itemsize)] * gathers  # fp32 for a BatchNorm
            if reduced:
                issued.append(("reduce_scatter", numel * world.reduced.itemsize))
                issued += [("all_reduce", numel // world.shards * world.reduced.itemsize)] * (
                    world.case.job.dp_replicate > 1
                )
        return count_collectives(issued, times=world.case.job.microbatches if sharded else 1)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        with fsdp.FullyShardedDataParallel.summon_full_params(self._module, writeback=False):
            for name, parameter in self._module.named_parameters():
                yield name.replace(_PREFIX, ""), parameter.detach().clone()
