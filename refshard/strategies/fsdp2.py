"""torch's FSDP2 with its defaults: ``fully_shard`` on every block, then on the whole model; or with a knob turned."""

from collections.abc import Iterator
from typing import Any, cast, final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import fill
from refshard.strategies.fsdp2_knobs import Knobs, communicate_through, turn
from refshard.strategies.fully_sharded import (
    ROOT,
    announce_reduction,
    full_dtensors,
    fully_shard_options,
    sharded_units,
)
from refshard.strategies.loop import PlainLoop
from refshard.strategies.muon_over_dtensors import announce_muon, muon_over_dtensors
from refshard.strategies.peers.tensor_parallel import announce_split, split
from refshard.strategies.world import World


@final
class FSDP2(Strategy):
    """The recipe of torch's own tutorial; embedding, final norm and head stay with the root. ``knobs`` are those of
    :class:`~refshard.strategies.fsdp2_knobs.Knobs`, none of which changes what is communicated.
    """

    def __init__(self, **knobs: Any) -> None:
        self._knobs = Knobs(**knobs)

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """See :meth:`Strategy.wrap`.

        Several microbatches are FSDP2's own way to accumulate at the memory of one (pytorch/pytorch#126166), which is
        what torchtitan's trainer runs: each backward is reduced into the shard. ``set_requires_gradient_sync(False)``
        would spare that and keep the whole model's gradients on every rank.
        """
        if world.tensor is not None:
            split(cast(Llama, model), world.tensor)
        options, blocks = fully_shard_options(world), [model.get_submodule(name) for name in world.blocks]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        turn(model, self._knobs, [model, *blocks], [model, *reversed(blocks)])
        communicate_through(world.case.comm_memory, model, world)
        fill(model, world)
        self._model, self._world = model, world
        return PlainLoop(model, world, muon=muon_over_dtensors)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(unit.name for unit in sharded_units(self._model, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: in training every unit is gathered for forward and again for backward, except
        the root, which stays gathered; every unit is reduced once. Without backward nothing reshards the root, so only
        the first pass gathers it.
        """
        issued: list[tuple[str, int]] = []
        for unit in sharded_units(self._model, self._world):
            if self._world.case.workload == "inference":
                gathers = 0 if unit.name == ROOT else 1
            else:
                gathers = 1 if unit.name == ROOT else 2
                issued += announce_reduction(unit, self._world)
            issued += unit.gathers(self._world, gathers)
        issued *= self._world.case.microbatches
        if self._world.tensor is not None:
            issued += announce_split(cast(Llama, self._model), self._world, self._world.computed)
        issued += announce_muon(self._model, self._world.case)
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from full_dtensors(self._model)
