"""FSDP2: its options and knobs, its units as found on a model, what they gather and reduce, and its whole parameters.

A knob that a version of torch lacks, or that the device or its backend cannot serve, is an error: a case that asks for
it ends ``unsupported``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from refshard.engine.comm_memory import CommMemory, require_memory
from refshard.errors import UnsupportedError
from refshard.strategies.world import World

ROOT = "root"


def options_of(world: World) -> dict[str, Any]:
    """The arguments of every call of ``fully_shard``: the mesh, and the case's options."""
    options: dict[str, Any] = {"mesh": world.data}
    if world.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=world.computed, reduce_dtype=world.reduced)
    if world.case.job.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    return options


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A unit of a peer that pads each parameter's first dimension to a multiple of the shards.

    ``parameters`` are the elements on one rank, the dtype of the gather, and whether it is trained.
    """

    name: str
    parameters: tuple[tuple[int, torch.dtype, bool], ...]

    def gathers(self, world: World, times: int) -> list[tuple[str, int]]:
        """``(op, bytes)`` of as many gathers; a shard axis of one rank has none."""
        nbytes = sum(numel * dtype.itemsize for numel, dtype, _ in self.parameters)
        return [("all_gather", nbytes * world.shards)] * (times if world.shards > 1 else 0)

    @property
    def trained(self) -> int:
        """Elements of one rank's part of the gradients, which are reduced together."""
        return sum(numel for numel, _, trained in self.parameters if trained)

    def reductions(self, world: World) -> Iterator[tuple[str, int]]:
        """``(op, bytes)`` of the reduction of the gradients: over the shards, then of each shard over the replicas."""
        size = self.trained * world.reduced.itemsize
        if size and world.shards > 1:
            yield "reduce_scatter", size * world.shards
        if size and world.case.job.dp_replicate > 1:
            yield "all_reduce", size


def sharded_units(model: nn.Module, world: World) -> list[PaddedUnit]:
    """The FSDP2 units found on the model, with the parameters that each manages.

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
    """Elements of the largest part of any rank."""
    first, *rest = parameter.shape
    row = math.prod(rest)
    if world.tensor is not None and parameter.device_mesh.ndim > world.data.ndim:  # norms are not split
        split = parameter.placements[-1]
        first //= world.tensor.size() if split.is_shard(0) else 1
        row //= world.tensor.size() if split.is_shard(1) else 1
    return -(-first // world.shards) * row


def full_dtensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the model's DTensor parameters one by one."""
    yield from ((name, gather()) for name, gather in deferred_dtensors(model))


def deferred_dtensors(model: nn.Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """A function for each of the model's DTensor parameters that gathers it, on the device of the mesh: an offloaded
    one's own device has no backend.
    """

    def full(parameter: nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        placed = parameter.detach().to(parameter.device_mesh.device_type)
        assert isinstance(placed, DTensor)
        return placed.full_tensor()

    _reshard(model)
    yield from ((name, partial(full, parameter)) for name, parameter in model.named_parameters())


def _reshard(model: nn.Module) -> None:
    """Shard what a pass without backward left gathered: only then are the parameters DTensors. Communicates nothing."""
    for unit in _units(model):
        unit.reshard()


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule of FSDP2's collectives; by default FSDP2's own.

    - ``prefetch``: how many units ahead gathers are issued, by lists that each unit is given; 0 leaves it to FSDP2,
      which in forward gathers as the host runs ahead, and in backward one unit ahead.
    - ``reduce_group``: reduce-scatters have a process group of their own, so that a gather need not queue behind one.
    - ``reduce_buffers``: how many inputs of reduce-scatters may be in flight before compute waits for the oldest.
    """

    prefetch: int = 0
    reduce_group: bool = False
    reduce_buffers: int = 1


def check_method(method: str) -> None:
    """Check that FSDP2 has a method of this name.

    Raises:
        UnsupportedError: this torch is older than the method.
    """
    if not hasattr(FSDPModule, method):
        raise UnsupportedError(
            f"FSDP2's {method} needs torch >= 2.13, got torch {torch.__version__}; install torch >= 2.13"
        )


def turn(model: nn.Module, knobs: Knobs, forward: list[Any], backward: list[Any]) -> None:
    """Turn the knobs of a model that ``fully_shard`` has been called on, as the root too.

    ``forward`` and ``backward`` hold one module of each unit that is gathered in that pass, in the order of the pass.

    Raises:
        UnsupportedError: this torch lacks a knob.
    """
    root = cast(FSDPModule, model)
    if knobs.reduce_group:
        check_method("set_separate_reduce_scatter_group")
        root.set_separate_reduce_scatter_group(True)
    if knobs.reduce_buffers > 1:
        check_method("set_reduce_scatter_max_input_buffers")
        root.set_reduce_scatter_max_input_buffers(knobs.reduce_buffers)
    if knobs.prefetch:
        for place, unit in enumerate(forward[:-1], start=1):
            unit.set_modules_to_forward_prefetch(forward[place : place + knobs.prefetch])
        for place, unit in enumerate(backward[:-1], start=1):
            unit.set_modules_to_backward_prefetch(backward[place : place + knobs.prefetch])


def communicate_through(memory: CommMemory, model: nn.Module, world: World) -> None:
    """Have FSDP2's collectives of ``model`` read and write this kind of memory; call it after :func:`turn`, since FSDP2
    binds the memory to the group that it finds.

    NCCL moves data without a copy for sums alone, so gradients are then summed, and divided by a kernel.

    Raises:
        UnsupportedError: the backend, the GPU or this torch does not have such memory.
    """
    if memory in ("default", "allocator"):
        return
    if memory == "symmetric":
        check_method("set_symm_mem_for_comm")
    require_memory(memory, world.data.get_group(world.data.ndim - 1), world.device)
    for unit in _units(model):
        unit.set_force_sum_reduction_for_comms(True)
        if memory == "group":
            unit.set_allocate_memory_from_process_group_for_comm(True)
        else:
            unit.set_symm_mem_for_comm("NCCL")


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
