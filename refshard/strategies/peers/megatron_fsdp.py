"""NVIDIA's Megatron-FSDP (``megatron-fsdp`` on PyPI, 0.6.1): ``fully_shard_model`` with blocks as units.

It needs CUDA. Dry runs on the fake CUDA device show that a step issues what is announced here; on a GPU it has not run.
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.distributed.device_mesh import init_device_mesh

from refshard.errors import UnsupportedError
from refshard.models.batch import Batch
from refshard.models.llama import Block, Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World

ROOT = "root"
_PREFIX = "module."
"""What its wrapper puts before the bare model's names."""


@final
class MegatronFSDP(Strategy):
    """ZeRO-3 with its defaults; what is in no block is the root's. Each microbatch is reduced and waited for
    (``sync_model_each_microbatch``). Called without CUDA too, to say why in its own words.
    """

    _wrapped: Any

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`."""
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, param_and_grad_buffer

        if world.case.fidelity == "dryrun":  # a check of what the other ranks hold; the package skips it without them
            param_and_grad_buffer.validate_uneven_dtensor = lambda _: None
        if world.mixed:
            model.to(world.computed)  # its own masters are fp32
        mesh = init_device_mesh(world.device.type, (world.shards, 1), mesh_dim_names=("fsdp", "tp"))
        try:
            self._wrapped = fully_shard_model(
                module=model,
                device_mesh=mesh,
                dp_shard_dim="fsdp",
                tp_dim="tp",
                fsdp_unit_modules=[Block],
                zero_dp_strategy=3,
                device=world.device,
                mixed_precision_policy=MixedPrecisionPolicy(torch.float32, world.reduced),
            )
        except (AssertionError, RuntimeError) as error:
            if world.device.type == "cuda":
                raise
            words = f"{type(error).__name__}: {error}"
            raise UnsupportedError(f"Megatron-FSDP on {world.device.type}: {words}") from error
        self._world = world
        return _SyncedLoop(self._wrapped, world)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(dict.fromkeys(name for name, _ in self._groups()))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: blocks are gathered for forward and backward, the root once."""
        issued, shards = list[tuple[str, int]](), self._world.shards
        for name, group in self._groups():
            size = group.model_weight_buffer.data_size * shards * group.dtype.itemsize
            issued += [("all_gather", size)] * (1 if name == ROOT else 2)
            if group.requires_grad:
                buffer = group.main_grad_buffer
                issued.append(("reduce_scatter", buffer.data_size * shards * buffer.dtype.itemsize))
        return count_collectives(issued, times=self._world.case.microbatches)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor

        for name, parameter in self._wrapped.named_parameters():
            yield name.removeprefix(_PREFIX), uneven_dtensor_to_full_tensor(parameter).detach()

    def _groups(self) -> list[tuple[str, Any]]:
        """The groups of parameters that share buffers, each with the name of the block that holds it."""
        buffers = self._wrapped.param_and_grad_buffer
        found = []
        for group in buffers.parameter_groups:
            name = buffers.param_to_name[group.params[0]].removeprefix(_PREFIX)
            found.append((ROOT if group.fsdp_unit_id in (None, -1) else ".".join(name.split(".")[:3]), group))
        return found


@final
class _SyncedLoop(Loop):
    """The optimizer's ``step`` first waits for the gradients, and afterwards copies the weights into the buffers."""

    def __init__(self, module: Any, world: World) -> None:
        from megatron_fsdp import fully_shard_optimizer

        self._module, self._parts = module, world.case.microbatches
        self._optimizer: torch.optim.Optimizer = fully_shard_optimizer(make_optimizer(module, world.case))

    def train(self, batch: Batch) -> torch.Tensor:
        losses = []
        for part in batch.split(self._parts):
            loss = part.loss(self._module)
            (loss / self._parts).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean()

    def infer(self, batch: Batch) -> torch.Tensor:
        raise UnsupportedError("refshard does not support inference with Megatron-FSDP")
