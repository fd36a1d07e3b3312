"""torch's FSDP2 with its defaults: ``fully_shard`` on every block, then on the whole model; or with a knob turned."""

from collections.abc import Iterator, Sequence
from typing import Any, cast, final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies import fully_sharded
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.context import announce_rings, splitting
from refshard.strategies.deferred import fill, fill_stages
from refshard.strategies.loop import PlainLoop
from refshard.strategies.optimizer import announce_muon, muon_over_dtensors
from refshard.strategies.pipeline import PipelineLoop, announce_messages, gathers_of
from refshard.strategies.stages import Stage, parameters_of_all, stages_of
from refshard.strategies.tensor_parallel import announce_split, split
from refshard.strategies.world import World


@final
class FSDP2(Strategy):
    """As in torch's own tutorial: embedding, final norm and head stay with the root. ``knobs`` are those of
    :class:`~refshard.strategies.fully_sharded.Knobs`, which do not change what is communicated.
    """

    def __init__(self, **knobs: Any) -> None:
        self._knobs = fully_sharded.Knobs(**knobs)

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """Microbatches accumulate in FSDP2's own way, at the memory of one (pytorch/pytorch#126166), as in torchtitan's
        trainer: each backward is reduced into the shard. ``set_requires_gradient_sync(False)`` would spare that, but
        keep the whole model's gradients on every rank. A pipeline does so: torch's schedules reduce a stage once a
        step, and as in torchtitan its parameters stay gathered from its first forward on.
        """
        self._model, self._world, self._stages = cast(Llama, model), world, list[Stage]()
        stepping = splitting(model, world)
        if world.pipeline is None:
            self._shard(model)
            fill(model, world)
            return PlainLoop(model, world, stepping=stepping, whole=muon_over_dtensors)
        self._stages = stages_of(self._model, world)
        for stage in self._stages:
            self._shard(stage, reshard_after_forward=False)
        fill_stages(self._stages, self._model, world)
        self._loop = PipelineLoop(
            self._stages, self._stages, world, residual=world.computed, whole=muon_over_dtensors, stepping=stepping
        )
        return self._loop

    def _shard(self, part: nn.Module, **more: Any) -> None:
        """Make units of the blocks of a model, or of a stage of it."""
        world = self._world
        if world.tensor is not None:
            split(cast(Llama, part), world.tensor, by_sequence=world.case.job.sequence_parallel)
        options, named = {**fully_sharded.options_of(world), **more}, dict(part.named_modules())
        blocks = [named[name] for name in world.blocks if name in named]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(part, **options)
        fully_sharded.turn(part, self._knobs, [part, *blocks], [part, *reversed(blocks)])
        fully_sharded.communicate_through(world.case.job.comm_memory, part, world)

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(unit.name for part in self._parts() for unit in fully_sharded.sharded_units(part, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """In training every unit is gathered for forward and again for backward, except the root, which stays gathered;
        every unit is reduced once. Without backward nothing reshards the root, so only the first pass gathers it. In a
        pipeline, see :func:`~refshard.strategies.pipeline.gathers_of`.
        """
        world, issued = self._world, list[tuple[str, int]]()
        training = world.case.job.workload == "training"
        for part in self._parts():
            units = fully_sharded.sharded_units(part, world)
            # Backward does not reach frozen blocks in front, but gathers as many of them as it prefetches.
            unreached = [unit.name for unit in units if not unit.trained and unit.name != fully_sharded.ROOT]
            unreached = unreached[: -max(1, self._knobs.prefetch)]
            for unit in units:
                gathers, times = training + (unit.name != fully_sharded.ROOT), world.case.job.microbatches
                gathers -= unit.name in unreached
                if isinstance(part, Stage):
                    gathers, times = gathers_of(self._loop.schedule, part, world.stage_rank), 1
                issued += unit.gathers(world, gathers) * times
                if training:
                    issued += [*unit.reductions(world)] * times
            if world.tensor is not None:
                issued += announce_split(part, world, world.computed)
            if world.context is not None:
                issued += announce_rings(part, world)
            issued += announce_muon(part, world.case)
        if self._stages:
            issued += announce_messages(self._stages, world, world.computed)
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._stages:
            own = {name: value for stage in self._stages for name, value in fully_sharded.deferred_dtensors(stage)}
            yield from parameters_of_all(self._model, self._world, own)
        else:
            yield from fully_sharded.full_dtensors(self._model)

    def _parts(self) -> Sequence[Llama | Stage]:
        return self._stages or [self._model]
