"""One unsharded rank: the reference that every other strategy's losses are held against."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Workload
from refshard.strategies.base import Strategy


@final
class Single(Strategy):
    """Leaves the model as it is."""

    _model: Llama

    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        self._model = model
        return model

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return ()

    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Strategy.microbatch`."""
        return nullcontext()

    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`."""
        return ()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()
