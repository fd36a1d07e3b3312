"""Knobs of FSDP2's public API beyond ``fully_shard``'s own arguments, and how each is called.

A knob that a version of torch lacks, or that the device or its backend cannot serve, is an error: a case that asks for
it ends ``unsupported``.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from refshard.engine.comm_memory import CommMemory, require_memory
from refshard.errors import UnsupportedError
from refshard.strategies.world import World


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


def turn(model: nn.Module, knobs: Knobs, forward: Sequence[nn.Module], backward: Sequence[nn.Module]) -> None:
    """Turn the knobs of a model that ``fully_shard`` has been called on, as its root too.

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
        for unit, ahead in _ahead(forward, knobs.prefetch):
            unit.set_modules_to_forward_prefetch(ahead)
        for unit, ahead in _ahead(backward, knobs.prefetch):
            unit.set_modules_to_backward_prefetch(ahead)


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


def _ahead(order: Sequence[nn.Module], depth: int) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    """Each unit that is followed by any, and the next ``depth`` of them."""
    units = cast(Sequence[FSDPModule], order)
    for place, unit in enumerate(units[:-1], start=1):
        yield unit, list(units[place : place + depth])
