"""torch's FSDP2 with its defaults: ``fully_shard`` on every block, then on the whole model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Workload
from refshard.strategies.base import PaddedUnit, Strategy, count_collectives, mesh_of


@final
class FSDP2(Strategy):
    """The recipe of torch's own tutorial; embedding, final norm and head stay with the root."""

    _model: Llama
    _world_size: int

    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        mesh = mesh_of(group, model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model, self._world_size = model, group.size()
        return model

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(unit.name for unit in sharded_units(self._model))

    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """See :meth:`Strategy.microbatch`: nothing, which is FSDP2's way to accumulate at the memory of one
        microbatch (pytorch/pytorch#126166) and what torchtitan's trainer runs. Each backward is reduced into the shard;
        ``set_requires_gradient_sync(False)`` would spare that and keep the whole model's gradients on every rank.
        """
        return nullcontext()

    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: in training every unit is gathered for forward and again for backward, except
        the root, which stays gathered; every unit is reduced once. Without backward nothing reshards the root, so only
        the first pass gathers it.
        """
        issued = []
        for unit in sharded_units(self._model):
            size = unit.nbytes(self._world_size)
            if workload == "inference":
                issued += [("all_gather", size)] * (unit.name != ROOT)
            else:
                issued += [("all_gather", size)] * (1 if unit.name == ROOT else 2) + [("reduce_scatter", size)]
        return count_collectives(issued, times=microbatches)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from full_dtensors(self._model)


ROOT = "root"


def sharded_units(model: nn.Module) -> list[PaddedUnit]:
    """The FSDP2 units that are really there, with the parameters that each manages.

    Modules that were wrapped as one group share one FSDP state and are one unit.
    """
    _reshard(model)
    owner_of = {
        n: fully_shard.state(m)  # type: ignore[attr-defined]
        for n, m in model.named_modules()
        if isinstance(m, FSDPModule)
    }
    names: dict[int, list[str]] = {}
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for name, state in owner_of.items():
        names.setdefault(id(state), []).append(name or ROOT)
        shapes.setdefault(id(state), [])
    element_bytes = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            owner = max((o for o in owner_of if not o or name.startswith(f"{o}.")), key=len)
            state = id(owner_of[owner])
            shapes[state].append(tuple(parameter.shape))
            element_bytes[state] = parameter.element_size()
    return [PaddedUnit("+".join(names[s]), tuple(shapes[s]), element_bytes[s]) for s in names if shapes[s]]


def full_dtensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the model's DTensor parameters one by one."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter.full_tensor().detach()


def _reshard(model: nn.Module) -> None:
    """Shard what a pass without backward left gathered: only then are the parameters DTensors. Communicates nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
