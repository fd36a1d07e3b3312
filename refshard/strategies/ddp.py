"""torch's DistributedDataParallel: everything replicated, gradients all-reduced in buckets during backward."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.context import announce_rings, splitting
from refshard.strategies.deferred import fill, fill_stages
from refshard.strategies.loop import PlainLoop, autocast
from refshard.strategies.pipeline import PipelineLoop, announce_messages
from refshard.strategies.stages import Stage, parameters_of_all, stages_of
from refshard.strategies.world import World


@final
class DDP(Strategy):
    """DDP as its documentation recommends it: gradients are views of the buckets."""

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """Only a step's last microbatch communicates, as in DDP's documentation and in torch's pipeline schedules.

        Raises:
            UnsupportedError: a zero-bubble schedule computes weights' gradients where DDP does not see them.
        """
        self._model, self._world, self._stages = cast(Llama, model), world, list[Stage]()
        computing, stepping = autocast(world), splitting(model, world)
        if world.pipeline is None:
            fill(model, world)
            module = _replicate(model, world)
            self._modules = [module]
            return PlainLoop(module, world, unsynced=module.no_sync, computing=computing, stepping=stepping)
        if world.case.job.schedule == "zero-bubble":
            raise UnsupportedError(
                "schedule must be '1f1b' or 'interleaved' for ddp, got 'zero-bubble': torch computes the gradients of "
                "weights apart from backward, where DDP does not reduce them; use fsdp2"
            )
        self._stages = stages_of(self._model, world, computing)
        fill_stages(self._stages, self._model, world)
        self._modules = [_replicate(stage, world) for stage in self._stages]
        return PipelineLoop(self._stages, self._modules, world, residual=torch.float32, stepping=stepping)

    def wrapped_units(self) -> tuple[str, ...]:
        """One unit per bucket, as DDP rebuilt them after its first step."""
        stages = [f"stage{stage.index}." for stage in self._stages] or [""]
        buckets = [range(len(_bucket_bytes(module))) for module in self._modules]
        return tuple(f"{stage}bucket{i}" for stage, indices in zip(stages, buckets) for i in indices)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """One all-reduce per bucket and step; together they have the bytes of all that is trained. The first forward of
        a step broadcasts the module's buffers, those of a dtype together.
        """
        issued: list[tuple[str, int]] = []
        if self._world.case.job.workload == "training":
            for module in self._modules:
                sizes, buffers = _bucket_bytes(module), Counter[torch.dtype]()
                assert sum(sizes) == sum(p.nbytes for p in module.parameters() if p.requires_grad)
                for buffer in module.buffers():
                    buffers[buffer.dtype] += buffer.nbytes
                issued += [("all_reduce", size) for size in sizes]
                issued += [("broadcast", size) for size in buffers.values()]
        if self._world.context is not None:
            parts: Sequence[Llama | Stage] = self._stages or [self._model]
            issued += [pair for part in parts for pair in announce_rings(part, self._world)]
        if self._stages:
            issued += announce_messages(self._stages, self._world, torch.float32)
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._stages:
            own = {name: p.detach for stage in self._stages for name, p in stage.named_parameters()}
            yield from parameters_of_all(self._model, self._world, own)
        else:
            yield from ((name, parameter.detach()) for name, parameter in self._model.named_parameters())


def _replicate(part: nn.Module, world: World) -> DistributedDataParallel:
    return DistributedDataParallel(part, process_group=world.data.get_group(), gradient_as_bucket_view=True)


def _bucket_bytes(module: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, as rebuilt after the first step."""
    log = module._get_ddp_logging_data()
    if sizes := log.get("rebuilt_bucket_sizes"):
        return [int(size) for size in str(sizes).split(",")]
    # DDP logs no step with its forward in ``no_sync``, as in torch's pipeline schedules.
    return [bucket.buffer().nbytes for bucket in module.reducer._get_zeros_like_grad_buckets()]
