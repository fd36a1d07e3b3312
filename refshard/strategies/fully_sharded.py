"""What FSDP2 makes of a model: its units as they are found there, what they gather and reduce, its whole parameters."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from refshard.strategies.world import World

ROOT = "root"


def fully_shard_options(world: World) -> dict[str, Any]:
    """What every call of ``fully_shard`` is given: the mesh, and what the case asks for."""
    options: dict[str, Any] = {"mesh": world.data}
    if world.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=world.computed, reduce_dtype=world.reduced)
    if world.case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    return options


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A unit of a peer that pads each parameter's first dimension to a multiple of the shards.

    ``parameters`` are their elements on one rank, what each is gathered in, and whether it is trained.
    """

    name: str
    parameters: tuple[tuple[int, torch.dtype, bool], ...]

    @property
    def gathered(self) -> int:
        """Bytes of one rank's part of the unsharded parameters."""
        return sum(numel * dtype.itemsize for numel, dtype, _ in self.parameters)

    def gathers(self, world: World, times: int) -> list[tuple[str, int]]:
        """``(op, bytes)`` of as many gathers; a shard axis of one rank has none."""
        return [("all_gather", self.gathered * world.shards)] * (times if world.shards > 1 else 0)

    @property
    def trained(self) -> int:
        """Elements of one rank's part of the gradients, which are reduced together."""
        return sum(numel for numel, _, trained in self.parameters if trained)


def sharded_units(model: nn.Module, world: World) -> list[PaddedUnit]:
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
    parameters: dict[int, list[tuple[int, torch.dtype, bool]]] = {}
    for name, state in owner_of.items():
        names.setdefault(id(state), []).append(name or ROOT)
        parameters.setdefault(id(state), [])
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            owner = max((o for o in owner_of if not o or name.startswith(f"{o}.")), key=len)
            dtype = world.computed if parameter.is_floating_point() else parameter.dtype
            parameters[id(owner_of[owner])].append((_padded(parameter, world), dtype, parameter.requires_grad))
    return [PaddedUnit("+".join(names[state]), tuple(found)) for state, found in parameters.items() if found]


def _padded(parameter: DTensor, world: World) -> int:
    """Elements of the largest part that a rank has."""
    first, *rest = parameter.shape
    row = math.prod(rest)
    if world.tensor is not None and parameter.device_mesh.ndim > world.data.ndim:  # norms are not split
        split = parameter.placements[-1]
        first //= world.tensor.size() if split.is_shard(0) else 1
        row //= world.tensor.size() if split.is_shard(1) else 1
    return -(-first // world.shards) * row


def announce_reduction(unit: PaddedUnit, world: World) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of the reduction of a unit's gradients: over the shards, then of each shard over the replicas."""
    size = unit.trained * world.reduced.itemsize
    if size and world.shards > 1:
        yield "reduce_scatter", size * world.shards
    if size and world.case.replicas > 1:
        yield "all_reduce", size


def full_dtensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the model's DTensor parameters one by one."""
    for name, gather in deferred_dtensors(model):
        yield name, gather()


def deferred_dtensors(model: nn.Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What gathers each of the model's DTensor parameters, offloaded ones where their mesh is: there is its backend."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, partial(_full, parameter)


def _full(parameter: DTensor) -> torch.Tensor:
    placed = parameter.detach().to(parameter.device_mesh.device_type)
    assert isinstance(placed, DTensor)
    return placed.full_tensor()


def _reshard(model: nn.Module) -> None:
    """Shard what a pass without backward left gathered: only then are the parameters DTensors. Communicates nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
