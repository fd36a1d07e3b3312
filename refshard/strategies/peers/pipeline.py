"""torch's pipeline parallelism alone: all ranks form one pipeline, and nothing is sharded."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import fill_stages
from refshard.strategies.pipelined import PipelineLoop, announce_messages
from refshard.strategies.stages import parameters_of_all, stages_of
from refshard.strategies.world import World


@final
class Pipeline(Strategy):
    """Layers divided as evenly as can be; the first rank has the embedding, the last the final norm and the head."""

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`.

        Raises:
            UnsupportedError: see :func:`~refshard.strategies.stages.stages_of`.
        """
        self._model, self._world = model, world
        self._stages = stages_of(model, world)
        fill_stages(self._stages, model, world)
        return PipelineLoop(self._stages, self._stages, world, residual=torch.float32)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: this rank's stages, named by the layers that they hold."""
        named = {module: name for name, module in self._model.named_modules()}
        ends = ((named[stage.layers[0]], named[stage.layers[-1]]) for stage in self._stages)
        return tuple(f"{first}-{last.rpartition('.')[2]}" for first, last in ends)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`."""
        return count_collectives(announce_messages(self._stages, self._world, torch.float32))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        own = {name: parameter.detach for stage in self._stages for name, parameter in stage.named_parameters()}
        yield from parameters_of_all(self._model, self._world, own)
