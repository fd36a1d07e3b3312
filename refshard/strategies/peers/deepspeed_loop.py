"""The training loop of DeepSpeed's engine, which holds the optimizer too."""

from typing import Any, final

import torch

from refshard.models.batch import Batch
from refshard.strategies.base import Loop


@final
class EngineLoop(Loop):
    """Forward, backward and step through the engine, in ``parts`` microbatches."""

    def __init__(self, engine: Any, parts: int) -> None:
        self._engine, self._parts = engine, parts

    def train(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.train`."""
        losses: list[torch.Tensor] = []
        for part in batch.split(self._parts):
            losses.append(part.loss(self._engine))
            (losses[-1] / self._parts).backward()
        self._engine.step()  # which also clears the gradients
        return torch.stack(losses).mean().detach()

    def infer(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.infer`."""
        with torch.no_grad():
            return batch.loss(self._engine)
