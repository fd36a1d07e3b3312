"""Gather parameters before a pass needs them, if the program knows more than the observed order.

A pass gathers one unit ahead of its use if it knows the order, and nothing ahead if the order varies. A request here
gathers at once, if the storage is free. Only the time changes: the pass uses and frees the unit as it would without
the request.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from refshard.engine.executor import Executor
from refshard.engine.hooks import hooks_of
from refshard.engine.unit import Unit


@final
class Unsharding:
    """The gathers that :func:`unshard` has begun."""

    def __init__(self, asked: Sequence[tuple[Executor, Unit]]) -> None:
        self._asked = tuple(asked)

    def wait(self) -> None:
        """Wait until the parameters are gathered; on CUDA, the current stream waits. Optional: their next use waits."""
        for executor, unit in self._asked:
            executor.await_gather(unit)


def unshard(module: nn.Module) -> Unsharding:
    """Begin to gather the parameters of ``module``, a part of a sharded model, for its next forward or backward.

    It gathers all units that hold parameters of ``module``, in registration order. This is a collective: all ranks must
    call it for the same modules at the same point of the program; ``shard(debug=True)`` checks this.

    How far ahead this works depends on the mode. In ``zero2`` and ``fsdp`` each unit has its own storage, so gathering
    ahead adds to the peak. In ``yafsdp`` blocks share two buffers: if a block's buffer is in use, the call does nothing
    and the block is gathered as usual. The call also does nothing for a unit that is already gathered, or, in backward,
    for a unit that has finished its backward. It is therefore safe in a forward pre-hook, which activation
    checkpointing calls again in backward.

    Modules see the gathered parameters only while they compute. Units gathered in a pass but not used are freed
    when the pass ends. Units gathered between passes are for the next pass, which gathers them again if weights have
    changed since. With a single shard rank it always gathers again, because a write through ``.data`` cannot be
    detected.

    Raises:
        EngineError: ``module`` is not part of a sharded model.
    """
    units = torch.compiler.disable(_asked)(module)  # else dynamo iterates over all models' hooks as some are freed
    for executor, unit in units:
        torch.compiler.disable(executor.unshard)(unit)
    return Unsharding(units)


def reshard(module: nn.Module) -> None:
    """Free the parameters of ``module`` that :func:`unshard` has gathered and no pass has used yet. Others stay.

    Raises:
        EngineError: ``module`` is not part of a sharded model, or is computing.
    """
    for executor, unit in torch.compiler.disable(_asked)(module):
        torch.compiler.disable(executor.reshard)(unit)


def _asked(module: nn.Module) -> list[tuple[Executor, Unit]]:
    hooks = hooks_of(module)
    return [(hooks.executor, unit) for unit in hooks.units_of(module)]
