"""A strategy that shards by block, with every block compiled by itself, as torchtitan does. Collectives stay eager."""

from collections.abc import Iterator
from typing import final

import torch

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies import make_strategy
from refshard.strategies.base import Loop, Strategy
from refshard.strategies.simplefsdp import check_compiler
from refshard.strategies.world import World


@final
class CompiledBlocks(Strategy):
    """The strategy called ``of`` over compiled blocks, which are alike and share one graph.

    Only ``forward`` is compiled, with its recomputation: the strategy's hooks run around it. ``Module.compile`` would
    compile the hooks too, and fails on a checkpointed forward ("fullgraph=True found no compiled frames").
    """

    def __init__(self, of: str) -> None:
        self._of = make_strategy(of)

    def wrap(self, model: Llama, world: World) -> Loop:
        """The first pass of each kind compiles, for seconds."""
        check_compiler(world.device)
        torch.compiler.reset()  # a process may train more models than dynamo recompiles one function for
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
        return self._of.wrap(model, world)

    def wrapped_units(self) -> tuple[str, ...]:
        return self._of.wrapped_units()

    def announced(self) -> tuple[CollectiveCount, ...]:
        return self._of.announced()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of.full_parameters()
