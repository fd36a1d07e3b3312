"""torch's DistributedDataParallel: everything replicated, gradients all-reduced in buckets during backward."""

from collections.abc import Iterator
from typing import final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.loop import PlainLoop, autocast
from refshard.strategies.world import World


@final
class DDP(Strategy):
    """DDP as its documentation recommends it: gradients are views of the buckets."""

    _module: DistributedDataParallel

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """See :meth:`Strategy.wrap`: all but a step's last microbatch accumulate without communication, as DDP's
        documentation has it.
        """
        self._training = world.case.workload == "training"
        self._module = DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=True)
        return PlainLoop(self._module, world, unsynced=self._module.no_sync, computing=autocast(world))

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: one unit per bucket, as DDP rebuilt them after its first step."""
        return tuple(f"bucket{i}" for i in range(len(self._bucket_bytes())))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: an all-reduce per bucket, together the bytes of all that is trained, however
        many microbatches; none without backward. The first forward of a step broadcasts the module's buffers, those of
        a dtype together.
        """
        if not self._training:
            return ()
        parameter_bytes = sum(p.nbytes for p in self._module.parameters() if p.requires_grad)
        total = CollectiveCount(op="all_reduce", count=len(self._bucket_bytes()), bytes=parameter_bytes)
        assert count_collectives(("all_reduce", size) for size in self._bucket_bytes()) == (total,)
        buffers = {buffer.dtype: 0 for buffer in self._module.buffers()}
        for buffer in self._module.buffers():
            buffers[buffer.dtype] += buffer.nbytes
        return (total, *count_collectives(("broadcast", size) for size in buffers.values()))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        for name, parameter in self._module.module.named_parameters():
            yield name, parameter.detach()

    def _bucket_bytes(self) -> list[int]:
        log = self._module._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
        return [int(size) for size in str(sizes).split(",")]
