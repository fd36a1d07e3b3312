"""One unsharded rank: the reference that every other strategy's losses are compared with."""

from collections.abc import Iterator
from typing import final

import torch
from torch import nn

from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy
from refshard.strategies.loop import PlainLoop, autocast
from refshard.strategies.world import World


@final
class Single(Strategy):
    """Leaves the model as it is."""

    _model: nn.Module

    def wrap(self, model: nn.Module, world: World) -> Loop:
        self._model = model
        return PlainLoop(model, world, computing=autocast(world))

    def wrapped_units(self) -> tuple[str, ...]:
        return ()

    def announced(self) -> tuple[CollectiveCount, ...]:
        return ()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self._model.named_parameters())
