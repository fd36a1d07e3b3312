"""This project's own engine, in any of its modes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from refshard.engine.api import engine_of, full_parameters, shard
from refshard.models.llama import Llama
from refshard.plan.placement import find_mode
from refshard.plan.schedule import Op, OpKind, assign_slots, build, chain_markers, forward_only
from refshard.records import CollectiveCount
from refshard.specs import Workload
from refshard.strategies.base import Strategy, count_collectives, mesh_of


@final
class Refshard(Strategy):
    """``refshard.shard`` with its defaults, in the mode of the given name."""

    _model: Llama

    def __init__(self, mode: str) -> None:
        self._mode = find_mode(mode)

    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        self._gloo = dist.get_backend(group) == "gloo"
        self._model = model
        return shard(model, mesh_of(group, model), mode=self._mode.name)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(unit.name for unit in engine_of(self._model).units)

    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Strategy.microbatch`: the engine reduces every microbatch into the fp32 shard, and needs
        no telling.
        """
        return nullcontext()

    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: what the plan of a chain of these units says, not what was executed."""
        units = engine_of(self._model).units
        sizes = [unit.layout.numel for unit in units]
        markers = chain_markers(len(units), enclosing=self._model.spec.tied)
        slots = assign_slots(markers, sizes, self._mode)
        stream = build(markers if workload == "training" else forward_only(markers), slots, self._mode)
        reduce_op = "all_to_all" if self._gloo else "reduce_scatter"
        names = {OpKind.GATHER: "all_gather", OpKind.REDUCE: reduce_op}

        def issued(op: Op) -> tuple[str, int]:
            return names[op.kind], sizes[op.unit] * units[op.unit].shard.element_size()

        return count_collectives((issued(op) for op in stream if op.kind in names), times=microbatches)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from full_parameters(self._model)
