"""This project's own engine, in any of its modes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from refshard.engine.api import engine_of, full_parameters, no_sync, shard
from refshard.engine.collectives import library_of
from refshard.engine.unit import Unit
from refshard.models.llama import Llama
from refshard.plan.placement import find_mode
from refshard.plan.schedule import OpKind, PassKind, assign_slots, build, chain_markers, forward_only
from refshard.records import CollectiveCount
from refshard.specs.case import Workload
from refshard.strategies.base import Strategy, count_collectives, mesh_of
from refshard.strategies.exchange import announce_exchange


@final
class Refshard(Strategy):
    """``refshard.shard`` with its defaults, in the mode of the given name."""

    _model: Llama

    def __init__(self, mode: str) -> None:
        self._mode = find_mode(mode)

    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        self._world_size = group.size()
        self._gloo = library_of(group, next(model.parameters()).device) == "gloo"
        self._model = model
        return shard(model, mesh_of(group, model), mode=self._mode.name)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(unit.name for unit in engine_of(self._model).units)

    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Strategy.microbatch`: modes that shard gradients reduce every microbatch all the same."""
        return nullcontext() if last or workload == "inference" else no_sync(self._model)

    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: what the plan of a chain of these units says, not what was executed."""
        units = engine_of(self._model).units
        facts = [unit.facts for unit in units]
        markers = chain_markers(len(units), enclosing=self._model.spec.tied)
        slots = assign_slots(markers, facts, self._mode)
        kept = self._mode.parameters == "replicate"
        if workload == "training":
            reduced_once = self._mode.gradients == "replicate"
            kinds = [
                PassKind(gather=not (kept and i), reduce=not reduced_once or i == microbatches - 1)
                for i in range(microbatches)
            ]
        else:
            # Parameters that are kept and never change were gathered in the first pass, which nobody counts.
            kinds = [PassKind(training=False, gather=not kept, reduce=False)] * microbatches
            markers = forward_only(markers)
        streams = [build(markers, slots, self._mode, facts, kind) for kind in kinds]
        return count_collectives(
            c for stream in streams for op in stream for c in self._issued(op.kind, units[op.unit])
        )

    def _issued(self, kind: OpKind, unit: Unit) -> Iterator[tuple[str, int]]:
        """The calls that an op makes, and the bytes of each: over gloo, an exchange with each other rank, in pieces."""
        for flat in unit.flats:
            if kind is OpKind.GATHER and not unit.aliased:
                op, size = "all_gather", flat.layout.numel * flat.dtype.itemsize
            elif kind is OpKind.REDUCE and flat.trained:
                op, size = "reduce_scatter", flat.layout.numel * flat.reduce_dtype.itemsize
            else:
                continue
            if self._mode.optimizer == "replicate":
                yield "all_reduce", size
            elif self._gloo:
                yield from announce_exchange(flat.layout.shard_numel, size // flat.layout.numel, self._world_size)
            else:
                yield op, size

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from full_parameters(self._model)
