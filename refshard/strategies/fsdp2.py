"""torch's FSDP2 with its defaults: ``fully_shard`` on every block, then on the whole model; or with a knob turned."""

from collections.abc import Iterator
from typing import Any, cast, final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.context import Splitting, announce_rings
from refshard.strategies.deferred import fill, fill_stages
from refshard.strategies.fsdp2_knobs import Knobs, communicate_through, turn
from refshard.strategies.fully_sharded import (
    ROOT,
    announce_reduction,
    deferred_dtensors,
    full_dtensors,
    fully_shard_options,
    sharded_units,
)
from refshard.strategies.loop import PlainLoop
from refshard.strategies.muon_over_dtensors import announce_muon, muon_over_dtensors
from refshard.strategies.peers.tensor_parallel import announce_split, split
from refshard.strategies.pipelined import PipelineLoop, announce_messages, gathers_of
from refshard.strategies.stages import parameters_of_all, stages_of
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
        would spare that and keep the whole model's gradients on every rank. A pipeline does so: torch's schedules
        reduce a stage once a step, and as in torchtitan its parameters stay gathered from its first forward on.
        """
        self._model, self._world, self._splitting = model, world, Splitting(model, world)
        if world.pipeline is not None:
            return self._wrap_stages(cast(Llama, model), world)
        if world.tensor is not None:
            split(cast(Llama, model), world.tensor, by_sequence=world.case.sequence_parallel)
        self._shard(model, world)
        fill(model, world)
        return PlainLoop(model, world, stepping=self._splitting, muon=muon_over_dtensors)

    def _wrap_stages(self, model: Llama, world: World) -> Loop:
        self._stages = stages_of(model, world)
        for stage in self._stages:
            if world.tensor is not None:
                split(stage, world.tensor, by_sequence=world.case.sequence_parallel)
            self._shard(stage, world, reshard_after_forward=False)
        fill_stages(self._stages, model, world)
        self._loop = PipelineLoop(
            self._stages, self._stages, world, residual=world.computed, muon=muon_over_dtensors,
            stepping=self._splitting,
        )  # fmt: skip
        return self._loop

    def _shard(self, part: nn.Module, world: World, **more: Any) -> None:
        """Make units of the blocks of a model, or of a stage of it."""
        options, named = {**fully_shard_options(world), **more}, dict(part.named_modules())
        blocks = [named[name] for name in world.blocks if name in named]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(part, **options)
        turn(part, self._knobs, [part, *blocks], [part, *reversed(blocks)])
        communicate_through(world.case.comm_memory, part, world)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        parts = [self._model] if self._world.pipeline is None else self._stages
        return tuple(unit.name for part in parts for unit in sharded_units(part, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: in training every unit is gathered for forward and again for backward, except
        the root, which stays gathered; every unit is reduced once. Without backward nothing reshards the root, so only
        the first pass gathers it. In a pipeline, see :func:`~refshard.strategies.pipelined.gathers_of`.
        """
        if self._world.pipeline is not None:
            return count_collectives(self._issued_by_stages())
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
        if self._world.context is not None:
            issued += announce_rings(cast(Llama, self._model), self._world)
        issued += announce_muon(self._model, self._world.case)
        return count_collectives(issued)

    def _issued_by_stages(self) -> Iterator[tuple[str, int]]:
        world = self._world
        for stage in self._stages:
            gathers = gathers_of(self._loop.schedule, stage, world.stage_rank)
            for unit in sharded_units(stage, world):
                yield from unit.gathers(world, gathers)
                if world.case.workload == "training":
                    yield from announce_reduction(unit, world)
            if world.tensor is not None:
                yield from announce_split(stage, world, world.computed)
            if world.context is not None:
                yield from announce_rings(stage, world)
            yield from announce_muon(stage, world.case)
        yield from announce_messages(self._stages, world, world.computed)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        if self._world.pipeline is None:
            yield from full_dtensors(self._model)
        else:
            own = {name: value for stage in self._stages for name, value in deferred_dtensors(stage)}
            yield from parameters_of_all(cast(Llama, self._model), self._world, own)
