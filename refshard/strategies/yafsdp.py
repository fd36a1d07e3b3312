"""YaFSDP's own ``fully_shard``, if the user has installed it: it is on no package index (github.com/yandex/YaFSDP)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.loop import Context, PlainLoop
from refshard.strategies.world import World

ALIGNMENT = 8  # elements that a rank's part of a unit is a multiple of: the default of its ``shard_alignment``
TIED = (
    "Param groups of model.layers.0 and model.embed_tokens share a grad buffer, "
    "so they can't be unsharded at the same time."
)


@final
class YaFSDP(Strategy):
    """One unit for the embedding, one for each block, one for the final norm and head; the root owns nothing.

    Units share two buffers in turn, so none may stay gathered while others run, as a tied embedding would. Each
    microbatch is reduced into the shard, as with FSDP2. ``module`` names a module with the interface of ``ya_fsdp``.
    """

    def __init__(self, module: str = "ya_fsdp") -> None:
        self._ya_fsdp: Any = import_module(module)

    def wrap(self, model: Llama, world: World) -> Loop:
        if model.spec.tied:
            raise UnsupportedError(f"a tied embedding in one unit with the head: YaFSDP says: {TIED}")
        options: dict[str, Any] = {"mesh": world.data}
        if world.mixed:
            options["mp_policy"] = self._ya_fsdp.MixedPrecisionPolicy(world.computed, world.reduced)
        for unit in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head], model):
            self._ya_fsdp.fully_shard(unit, **options)
        self._model, self._world = model, world
        computing: Context = nullcontext
        if world.case.job.workload == "inference":
            computing = self._until_resharded
        elif world.device.type == "cpu":
            # gloo counts a gather as a write, so autograd would refuse a parameter that was gathered again into the
            # same buffer. It does not check saved tensors that pass hooks.
            computing = partial(saved_tensors_hooks, _same, _same)
        return PlainLoop(model, world, computing=computing)

    @contextmanager
    def _until_resharded(self) -> Iterator[None]:
        yield
        self._reshard()  # without backward nothing else frees the two buffers for the next forward

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(self._units())

    def announced(self) -> tuple[CollectiveCount, ...]:
        """The last unit of each of the two buffers stays gathered after forward; backward gathers all others, even a
        frozen embedding. A unit is reduced whole if any of it is trained.
        """
        world, issued, units = self._world, list[tuple[str, int]](), self._units()
        training = world.case.job.workload == "training"
        for index, (name, numel) in enumerate(units.items()):
            parameters = [p for part in name.split("+") for p in self._model.get_submodule(part).parameters()]
            trained = training and any(p.requires_grad for p in parameters)
            again = training and index < len(units) - 2
            issued += [("all_gather", numel * world.computed.itemsize)] * (2 if again else 1)
            issued += [("reduce_scatter", numel * world.reduced.itemsize)] * trained
        return count_collectives(issued, times=world.case.job.microbatches)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, self._ya_fsdp.RaggedShardDTensor)
            yield name, self._gather(parameter)

    @torch.no_grad()
    def _gather(self, parameter: Any) -> torch.Tensor:
        """The whole parameter. Its own ``full_tensor`` gathers parts of different sizes, which gloo cannot."""
        group, part = self._world.data.get_group(), parameter.to_local().reshape(-1)
        numels = torch.empty(group.size(), dtype=torch.int64, device=part.device)
        dist.all_gather_into_tensor(numels, numels.new_tensor([part.numel()]), group=group)
        longest = int(numels.max())
        whole = part.new_empty(group.size() * longest)
        dist.all_gather_into_tensor(whole, nn.functional.pad(part, (0, longest - part.numel())), group=group)
        return torch.cat([row[:n] for row, n in zip(whole.split(longest), numels.tolist())]).view(parameter.shape)

    def _units(self) -> dict[str, int]:
        """Elements, padded, of each unit found on the model; a group of modules is one unit."""
        self._reshard()
        names: dict[int, list[str]] = {}
        sizes: dict[int, int] = {}
        for name, module in self._model.named_modules():
            if name and isinstance(module, self._ya_fsdp.YaFSDPModule):
                state = id(module._get_fsdp_state())
                names.setdefault(state, []).append(name)
                sizes[state] = sizes.get(state, 0) + sum(p.numel() for p in module.parameters())
        multiple = self._world.shards * ALIGNMENT
        return {"+".join(names[state]): -(-size // multiple) * multiple for state, size in sizes.items()}

    def _reshard(self) -> None:
        for module in self._model.modules():
            if isinstance(module, self._ya_fsdp.YaFSDPModule):
                module.reshard()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
