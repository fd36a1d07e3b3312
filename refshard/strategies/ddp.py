"""torch's DistributedDataParallel: everything replicated, gradients all-reduced in buckets during backward."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Workload
from refshard.strategies.base import Strategy, count_collectives


@final
class DDP(Strategy):
    """DDP as its documentation recommends it: gradients are views of the buckets."""

    _module: DistributedDataParallel

    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        self._module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        return self._module

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: one unit per bucket, as DDP rebuilt them after its first step."""
        return tuple(f"bucket{i}" for i in range(len(self._bucket_bytes())))

    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Strategy.microbatch`: all but the last one accumulate without communication, as DDP documents."""
        return nullcontext() if last else self._module.no_sync()

    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: an all-reduce per bucket, together the bytes of all parameters, however many
        microbatches; none without backward.
        """
        if workload == "inference":
            return ()
        parameter_bytes = sum(p.nbytes for p in self._module.parameters())
        total = CollectiveCount(op="all_reduce", count=len(self._bucket_bytes()), bytes=parameter_bytes)
        assert count_collectives(("all_reduce", size) for size in self._bucket_bytes()) == (total,)
        return (total,)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        for name, parameter in self._module.module.named_parameters():
            yield name, parameter.detach()

    def _bucket_bytes(self) -> list[int]:
        log = self._module._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
        return [int(size) for size in str(sizes).split(",")]
