"""torch's DistributedDataParallel: everything replicated, gradients all-reduced in buckets during backward."""

from collections.abc import Iterator
from typing import cast, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.context import Splitting, announce_rings
from refshard.strategies.deferred import fill, fill_stages
from refshard.strategies.loop import Context, PlainLoop, autocast
from refshard.strategies.pipelined import PipelineLoop, announce_messages
from refshard.strategies.stages import parameters_of_all, stages_of
from refshard.strategies.world import World


@final
class DDP(Strategy):
    """DDP as its documentation recommends it: gradients are views of the buckets."""

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """See :meth:`Strategy.wrap`: all but a step's last microbatch accumulate without communication, as DDP's
        documentation has it, and as torch's pipeline schedules do.

        Raises:
            UnsupportedError: a zero-bubble schedule computes weights' gradients where DDP does not see them.
        """
        self._model, self._world, computing = model, world, autocast(world)
        self._splitting = Splitting(model, world)
        if world.pipeline is not None:
            return self._wrap_stages(cast(Llama, model), world, computing)
        fill(model, world)
        self._modules = [self._replicate(model, world)]
        (module,) = self._modules
        return PlainLoop(module, world, unsynced=module.no_sync, computing=computing, stepping=self._splitting)

    def _wrap_stages(self, model: Llama, world: World, computing: Context) -> Loop:
        if world.case.schedule == "zero-bubble":
            raise UnsupportedError(
                "schedule must be '1f1b' or 'interleaved' for ddp, got 'zero-bubble': torch computes the gradients of "
                "weights apart from backward, where DDP does not reduce them; use fsdp2"
            )
        self._stages = stages_of(model, world, computing)
        fill_stages(self._stages, model, world)
        self._modules = [self._replicate(stage, world) for stage in self._stages]
        return PipelineLoop(self._stages, self._modules, world, residual=torch.float32, stepping=self._splitting)

    def _replicate(self, part: nn.Module, world: World) -> DistributedDataParallel:
        return DistributedDataParallel(part, process_group=world.data.get_group(), gradient_as_bucket_view=True)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: one unit per bucket, as DDP rebuilt them after its first step."""
        stages = [""] if self._world.pipeline is None else [f"stage{stage.index}." for stage in self._stages]
        return tuple(
            f"{stage}bucket{i}"
            for stage, module in zip(stages, self._modules)
            for i in range(len(_bucket_bytes(module)))
        )

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: an all-reduce per bucket, together the bytes of all that is trained, however
        many microbatches; none without backward. The first forward of a step broadcasts the module's buffers, those of
        a dtype together.
        """
        issued: list[tuple[str, int]] = []
        if self._world.case.workload == "training":
            issued += [pair for module in self._modules for pair in _reductions(module)]
        if self._world.context is not None:
            for part in [cast(Llama, self._model)] if self._world.pipeline is None else self._stages:
                issued += announce_rings(part, self._world)
        if self._world.pipeline is not None:
            issued += announce_messages(self._stages, self._world, torch.float32)
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        if self._world.pipeline is not None:
            own = {name: p.detach for stage in self._stages for name, p in stage.named_parameters()}
            yield from parameters_of_all(cast(Llama, self._model), self._world, own)
            return
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()


def _reductions(module: DistributedDataParallel) -> Iterator[tuple[str, int]]:
    sizes = _bucket_bytes(module)
    assert sum(sizes) == sum(p.nbytes for p in module.parameters() if p.requires_grad)
    yield from (("all_reduce", size) for size in sizes)
    buffers = {buffer.dtype: 0 for buffer in module.buffers()}
    for buffer in module.buffers():
        buffers[buffer.dtype] += buffer.nbytes
    yield from (("broadcast", size) for size in buffers.values())


def _bucket_bytes(module: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, as rebuilt after the first step."""
    log = module._get_ddp_logging_data()
    if sizes := log.get("rebuilt_bucket_sizes"):
        return [int(size) for size in str(sizes).split(",")]
    # DDP logs no step whose forward is within ``no_sync``, as torch's pipeline schedules have it.
    return [bucket.buffer().nbytes for bucket in module.reducer._get_zeros_like_grad_buckets()]
