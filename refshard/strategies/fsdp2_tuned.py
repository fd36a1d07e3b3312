"""torch's FSDP2 made as fast as its public API allows; a comparison with an untuned peer would prove little.

Units for the embedding and the head, as torchtitan has them, wherever it runs; the embedding is not gathered for
backward, which does not read it, and the head is kept until its backward.

On a CPU, FSDP2 runs every collective synchronously. What its API offers against that, each kept because it helps:

- ``unshard(async_op=True)`` from hooks one unit ahead, in forward and in backward, so that gathers overlap compute;
- over gloo, ``set_custom_reduce_scatter`` with the exchange-and-sum that the engine uses there, pieces and all;
  synchronous, as its interface asks. One that returned early would be right only while FSDP2 happens not to touch the
  result.

On a GPU FSDP2 gathers ahead by itself, on streams of its own. Each knob that is turned there is a row or an axis too,
so that a suite can say what it brings:

- reduce-scatters have a process group of their own. Gathers further ahead and more inputs of reduce-scatters in flight
  (``fsdp2-tuned-deep``) cost memory for little time, so they are not turned;
- gathers go to, and reductions come from, memory of the process group where the GPUs have it, as with the engine,
  unless the case says otherwise.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from refshard.engine.collectives import GroupCollectives, exchange_bytes, library_of
from refshard.engine.comm_memory import has_group_memory
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies import fully_sharded
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import fill
from refshard.strategies.loop import PlainLoop
from refshard.strategies.optimizer import announce_muon, muon_over_dtensors
from refshard.strategies.world import World


@final
class FSDP2Tuned(Strategy):
    """FSDP2 with every public knob that helps on the backend at hand, and with ``knobs`` of
    :class:`~refshard.strategies.fully_sharded.Knobs`.
    """

    def __init__(self, **knobs: Any) -> None:
        self._knobs = fully_sharded.Knobs(**knobs)

    def wrap(self, model: Llama, world: World) -> Loop:
        """Microbatches as in :class:`~refshard.strategies.fsdp2.FSDP2`."""
        options, shards = fully_sharded.options_of(world), world.data.get_group(world.data.ndim - 1)
        self._model, self._world = model, world
        self._gloo = library_of(shards, world.device) == "gloo"
        backbone, blocks = model.model, list(model.model.layers)
        forward, backward = [model, *blocks], [model, *reversed(blocks)]
        if not model.spec.tied:
            fully_shard(backbone.embed_tokens, **options).set_unshard_in_backward(False)
            fully_shard([backbone.norm, model.lm_head], **options, reshard_after_forward=False)
            forward, backward = [backbone.embed_tokens, *blocks, backbone.norm], [backbone.norm, *reversed(blocks)]
        for layer in blocks:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        knobs, memory = self._knobs, world.case.job.comm_memory
        if world.device.type == "cuda" and world.shards > 1:
            knobs = msgspec.structs.replace(knobs, reduce_group=True)
        fully_sharded.turn(model, knobs, forward, backward)
        if memory == "default" and world.shards > 1 and has_group_memory(shards, world.device):
            memory = "group"
        fully_sharded.communicate_through(memory, model, world)
        fill(model, world)
        if self._gloo:
            exchange = _ExchangeAndSum(shards)
            for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
                unit.set_custom_reduce_scatter(exchange)
        if world.device.type == "cpu":
            self._gather_ahead()
        return PlainLoop(model, world, whole=muon_over_dtensors)

    def _gather_ahead(self) -> None:
        """On a CPU: gathers one unit ahead."""
        backbone = self._model.model
        blocks = list(backbone.layers)
        for module, following in pairwise([backbone.embed_tokens, *blocks, self._model.lm_head]):
            if isinstance(following, FSDPModule):
                module.register_forward_pre_hook(_unshard(following))
            if module in blocks:
                # Before FSDP2's own hook, which would gather the block synchronously.
                following.register_forward_hook(_when_differentiated(_unshard(module)), prepend=True)

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in fully_sharded.sharded_units(self._model, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """Only the blocks are gathered a second time for backward. Without backward, units that are kept after forward
        stay gathered, as FSDP2's documentation says of evaluation.
        """
        issued: list[tuple[str, int]] = []
        for unit in fully_sharded.sharded_units(self._model, self._world):
            if self._world.case.job.workload == "inference":
                gathers = 0 if unit.name.endswith(("lm_head", fully_sharded.ROOT)) else 1
            else:
                gathers = 2 if ".layers." in unit.name else 1
                for op, size in unit.reductions(self._world):
                    if self._gloo and op == "reduce_scatter":
                        calls = exchange_bytes(unit.trained, self._world.reduced.itemsize, self._world.shards)
                        issued += [("all_to_all", nbytes) for nbytes in calls]
                    else:
                        issued.append((op, size))
            issued += unit.gathers(self._world, gathers)
        issued *= self._world.case.job.microbatches
        issued += announce_muon(self._model, self._world.case)
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from fully_sharded.full_dtensors(self._model)


def _unshard(module: nn.Module) -> Callable[..., None]:
    assert isinstance(module, FSDPModule)

    def hook(*_: Any) -> None:
        module.unshard(async_op=True)

    return hook


def _when_differentiated(start: Callable[..., None]) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(start)

    return hook


class _ExchangeAndSum(ReduceScatter):
    """The engine's reduce-scatter over gloo, awaited where it is issued."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._collectives = GroupCollectives(group)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:  # fmt: skip
        """Reduce ``input_tensor`` (world_size * n elements) into ``output_tensor`` (n elements)."""
        self._collectives.reduce_scatter(output_tensor, input_tensor).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
