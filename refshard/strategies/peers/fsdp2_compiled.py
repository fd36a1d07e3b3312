"""torch's FSDP2 by its tutorial, with every block compiled by itself, as torchtitan does. Collectives stay eager."""

from collections.abc import Iterator
from typing import final

import torch

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy
from refshard.strategies.fsdp2 import FSDP2
from refshard.strategies.peers.simplefsdp_compiler import check_compiler
from refshard.strategies.world import World


@final
class FSDP2Compiled(Strategy):
    """:class:`~refshard.strategies.fsdp2.FSDP2` over compiled blocks, which are alike and share one graph.

    Only ``forward`` is compiled, with its recomputation: FSDP2's hooks run around it. ``Module.compile`` would take
    the hooks in, and fails on a checkpointed forward ("fullgraph=True found no compiled frames").
    """

    def __init__(self) -> None:
        self._fsdp2 = FSDP2()

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`. The first pass of each kind compiles, for seconds."""
        check_compiler(world.device)
        torch.compiler.reset()  # a process may train more models than dynamo recompiles one function for
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
        return self._fsdp2.wrap(model, world)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return self._fsdp2.wrapped_units()

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`."""
        return self._fsdp2.announced()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from self._fsdp2.full_parameters()
