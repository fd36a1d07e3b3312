"""A strategy that shards by block, over compiled blocks, as torchtitan has it, or over a compiled model."""

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
class Compiled(Strategy):
    """The strategy called ``of`` over compiled code. Its hooks run between graphs, so collectives stay eager.

    Of each block, ``forward`` is compiled, with its recomputation; blocks are alike and share one graph.
    ``Module.compile`` would compile the hooks too, and fails on a checkpointed forward ("fullgraph=True found no
    compiled frames"). With ``whole`` all of the model is compiled, and breaks into graphs at the hooks.
    """

    def __init__(self, of: str, *, whole: bool = False) -> None:
        self._of, self._whole = make_strategy(of), whole

    def wrap(self, model: Llama, world: World) -> Loop:
        """The first pass of each kind compiles, for seconds."""
        check_compiler(world.device)
        torch.compiler.reset()  # a process may train more models than dynamo recompiles one function for
        if self._whole:
            model.compile(dynamic=False)
        for layer in model.model.layers if not self._whole else ():
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
        return self._of.wrap(model, world)

    def wrapped_units(self) -> tuple[str, ...]:
        return self._of.wrapped_units()

    def announced(self) -> tuple[CollectiveCount, ...]:
        return self._of.announced()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of.full_parameters()
