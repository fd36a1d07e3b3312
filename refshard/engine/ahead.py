"""Gathering parameters before a pass needs them, where the program knows better than the order that was observed.

A pass gathers one unit ahead of its use in an order that it knows, and nothing ahead in one that varies. What is asked
for here is gathered at once, if its storage is free. It changes nothing but when: the pass claims the unit where it
would gather it, gives it up where it would anyway, and does not see that it was asked for.
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
    """What :func:`unshard` has begun."""

    def __init__(self, asked: Sequence[tuple[Executor, Unit]]) -> None:
        self._asked = tuple(asked)

    def wait(self) -> None:
        """Wait until the parameters are there; on CUDA, the current stream waits. Their next use does so anyway."""
        for executor, unit in self._asked:
            executor.await_gather(unit)


def unshard(module: nn.Module) -> Unsharding:
    """Begin to gather the parameters of ``module``, a part of a sharded model, for its next forward or backward.

    It gathers all units that hold parameters of ``module``, in registration order. This is a collective: all ranks must
    call it for the same modules at the same place, as they must call the modules themselves; ``shard(debug=True)``
    checks it.

    The storage limits how far ahead this works. In ``zero2`` and ``fsdp`` each unit has its own storage, and what is
    gathered ahead adds to the peak. In ``yafsdp`` blocks share a ring of two slots: if the slot of a block is taken,
    nothing happens here, and the pass gathers the block as always. Nothing happens either for a unit that is gathered
    already, and in backward for one whose backward has ended: so a forward pre-hook may call this, which activation
    checkpointing calls again in backward.

    Modules do not see the gathered parameters before they compute. What is gathered in a pass and not used is
    given up when the pass ends. What is gathered between passes is for the next one, which gathers it again if weights
    have changed since, or where they are plain (with one rank to shard over), since a write through ``.data`` leaves no
    trace there.

    Raises:
        EngineError: ``module`` is no part of a sharded model.
    """
    asked = _asked(module)
    for executor, unit in asked:
        torch.compiler.disable(executor.unshard)(unit)
    return Unsharding(asked)


def reshard(module: nn.Module) -> None:
    """Give up what :func:`unshard` has gathered of ``module`` and no pass has claimed yet. Anything else stays.

    Raises:
        EngineError: ``module`` is no part of a sharded model, or is computing.
    """
    for executor, unit in _asked(module):
        torch.compiler.disable(executor.reshard)(unit)


def _asked(module: nn.Module) -> list[tuple[Executor, Unit]]:
    hooks = hooks_of(module)
    return [(hooks.executor, unit) for unit in hooks.units_of(module)]
