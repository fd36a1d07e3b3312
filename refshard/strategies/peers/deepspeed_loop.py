"""The training loop of DeepSpeed's engine, which holds the optimizer too."""

from typing import Any, final

import torch

from refshard.models.llama import next_token_loss
from refshard.strategies.base import Loop


@final
class EngineLoop(Loop):
    """Forward, backward and step through the engine, in ``parts`` microbatches."""

    def __init__(self, engine: Any, parts: int) -> None:
        self._engine, self._parts = engine, parts

    def train(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """See :meth:`Loop.train`."""
        losses: list[torch.Tensor] = []
        for inputs, targets in zip(inputs_BT.chunk(self._parts), targets_BT.chunk(self._parts)):
            losses.append(next_token_loss(self._engine(inputs), targets))
            (losses[-1] / self._parts).backward()
        self._engine.step()  # which also clears the gradients
        return torch.stack(losses).mean().detach()

    def infer(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """See :meth:`Loop.infer`."""
        with torch.no_grad():
            return next_token_loss(self._engine(inputs_BT), targets_BT)
