"""torch's pipeline parallelism: each rank has a stretch of the blocks, and microbatches pass from rank to rank."""

from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import storage_and_values
from refshard.strategies.peers.pipeline_stage import PipelineLoop, Stage
from refshard.strategies.world import World


@final
class Pipeline(Strategy):
    """Blocks divided as evenly as can be; the first rank has the embedding, the last the final norm and the head.

    The schedule is 1F1B: once the pipeline is full, each rank computes a backward after each forward. With fewer
    microbatches than ranks, which cannot fill it, all forwards come first (GPipe).
    """

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`.

        Raises:
            UnsupportedError: the model is tied, whose one weight two ranks would need, or has fewer blocks than ranks.
        """
        ranks, layers = world.group.size(), model.spec.n_layers
        if model.spec.tied:
            raise UnsupportedError("a pipeline needs an untied model: the first rank embeds, the last has the head")
        if layers < ranks:
            raise UnsupportedError(f"a pipeline of {ranks} ranks needs at least {ranks} blocks, the model has {layers}")
        self._model, self._world, self._rank = model, world, world.group.rank()
        self._owners = [index * ranks // layers for index in range(layers)]
        stage = Stage(model, [i for i, owner in enumerate(self._owners) if owner == self._rank], world)
        if (fill := storage_and_values(model, world)) is not None:
            for module in stage.modules():
                fill(module)
        kept = {id(parameter) for parameter in stage.parameters()}
        for module in model.modules():  # what is another rank's takes no memory here
            if any(id(parameter) not in kept for parameter in module.parameters(recurse=False)):
                module._apply(lambda tensor: tensor.to("meta"), recurse=False)
        return PipelineLoop(stage, world)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: this rank's stage, named by the blocks whose weights it holds."""
        layers = enumerate(self._model.model.layers)
        held = [index for index, layer in layers if not any(p.is_meta for p in layer.parameters())]
        return (f"model.layers.{held[0]}-{held[-1]}",)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: this rank's messages to its neighbours, hidden states on and their gradients
        back for each microbatch; and the mean loss, which the last rank tells all.
        """
        case = self._world.case
        hidden = case.global_batch // case.microbatches * case.seq_len * self._model.spec.dim * 4
        onward, back = self._rank < self._world.group.size() - 1, self._rank > 0
        backward = case.workload == "training"
        issued = [("send", hidden)] * (onward + (backward and back)) + [("recv", hidden)] * (
            back + (backward and onward)
        )
        return count_collectives([*(issued * case.microbatches), ("broadcast", 4)])

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        last = self._world.group.size() - 1
        for name, parameter in self._model.named_parameters():
            parts = name.split(".")
            owner = self._owners[int(parts[2])] if parts[1] == "layers" else 0 if "embed" in name else last
            value = torch.empty_like(parameter, device=self._world.device, requires_grad=False)
            if owner == self._rank:
                value.copy_(parameter.detach())
            dist.broadcast(value, group_src=owner, group=self._world.group)
            yield name, value
