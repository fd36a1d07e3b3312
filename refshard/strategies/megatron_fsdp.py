"""NVIDIA's Megatron-FSDP (``megatron-fsdp`` on PyPI, 0.6.1): ``fully_shard_model`` with blocks as units.

It needs CUDA. Dry runs on the fake CUDA device show that a step issues what is announced here; on a GPU it has not run.
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.distributed.device_mesh import init_device_mesh

from refshard.errors import UnsupportedError
from refshard.models.llama import Block, Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.loop import PlainLoop
from refshard.strategies.world import World

ROOT = "root"
_PREFIX = "module."
"""Its wrapper's prefix of the bare model's names."""


@final
class MegatronFSDP(Strategy):
    """ZeRO-3 with its defaults; what is in no block is the root's. Each microbatch is reduced and awaited
    (``sync_model_each_microbatch``). It is called without CUDA too, so that the error is its own.
    """

    _wrapped: Any

    def wrap(self, model: Llama, world: World) -> Loop:
        import megatron_fsdp
        from megatron_fsdp import param_and_grad_buffer

        if world.case.protocol.fidelity == "dryrun":  # compares what the ranks hold, and a dry run has one
            param_and_grad_buffer.validate_uneven_dtensor = lambda _: None
        if world.mixed:
            model.to(world.computed)  # its own masters are fp32
        mesh = init_device_mesh(world.device.type, (world.shards, 1), mesh_dim_names=("fsdp", "tp"))
        try:
            self._wrapped = megatron_fsdp.fully_shard_model(
                module=model, device_mesh=mesh, dp_shard_dim="fsdp", tp_dim="tp", fsdp_unit_modules=[Block],
                zero_dp_strategy=3, device=world.device,
                mixed_precision_policy=megatron_fsdp.MixedPrecisionPolicy(torch.float32, world.reduced),
            )  # fmt: skip
        except (AssertionError, RuntimeError) as error:
            if world.device.type == "cuda":
                raise
            said = f"{type(error).__name__}: {error}"
            raise UnsupportedError(f"Megatron-FSDP on {world.device.type}: {said}") from error
        self._world = world
        # Its step first waits for the gradients, and afterwards copies the weights into the buffers.
        return PlainLoop(self._wrapped, world, adapt=megatron_fsdp.fully_shard_optimizer)

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self._groups()))

    def announced(self) -> tuple[CollectiveCount, ...]:
        issued, shards = list[tuple[str, int]](), self._world.shards
        for name, group in self._groups():
            size = group.model_weight_buffer.data_size * shards * group.dtype.itemsize
            issued += [("all_gather", size)] * (1 if name == ROOT else 2)  # blocks for forward and backward
            if group.requires_grad:
                buffer = group.main_grad_buffer
                issued.append(("reduce_scatter", buffer.data_size * shards * buffer.dtype.itemsize))
        return count_collectives(issued, times=self._world.case.job.microbatches)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor

        for name, parameter in self._wrapped.named_parameters():
            yield name.removeprefix(_PREFIX), uneven_dtensor_to_full_tensor(parameter).detach()

    def _groups(self) -> list[tuple[str, Any]]:
        """The groups of parameters that share buffers, each with the name of its block."""
        buffers, found = self._wrapped.param_and_grad_buffer, []
        for group in buffers.parameter_groups:
            name = buffers.param_to_name[group.params[0]].removeprefix(_PREFIX)
            found.append((ROOT if group.fsdp_unit_id in (None, -1) else ".".join(name.split(".")[:3]), group))
        return found
