"""Stages of a pipeline: consecutive layers of a Llama that each compute a part of the forward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama, rotary_tables
from refshard.specs.case import Case
from refshard.specs.layers import layers_of_stages, stages_of_rank
from refshard.strategies.loop import Context
from refshard.strategies.world import World


class Stage(nn.Module):
    """Layers of a Llama; their modules keep their names. The first stage also has the embedding, the last the final
    norm and the head. ``index`` counts stages from 0, ``held`` are the numbers of the layers.

    Every forward runs within ``computing()``, on ``tokens`` of each sequence.
    """

    def __init__(self, whole: Llama, index: int, layers: range, tokens: int, computing: Context) -> None:
        super().__init__()
        self.spec, self.index, self.held, self._computing = whole.spec, index, layers, computing
        self._positions = tokens if whole.model.positions is None else whole.model.positions
        self.first, self.last = layers.start == 0, layers.stop == whole.spec.n_layers
        backbone: dict[str, nn.Module] = {"embed_tokens": whole.model.embed_tokens} if self.first else {}
        backbone["layers"] = nn.ModuleDict({str(index): whole.model.layers[index] for index in layers})
        if self.last:
            backbone["norm"] = whole.model.norm
            self.lm_head = whole.lm_head
        self.model = nn.ModuleDict(backbone)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The layers in order."""
        held = self.model["layers"]
        assert isinstance(held, nn.ModuleDict)
        return tuple(held.values())

    def forward(self, given: Tensor) -> Tensor:
        """Map hidden states (B, T, D) to the same shape; the first stage takes token ids (B, T) int64, the last returns
        logits (B, T, V).
        """
        with self._computing():
            x_BTD = self.model["embed_tokens"](given) if self.first else given
            cos_T1Q, sin_T1Q = rotary_tables(self.spec, self._positions, x_BTD)
            for layer in self.layers:
                x_BTD = layer(x_BTD, cos_T1Q, sin_T1Q)
            out: Tensor = self.lm_head(self.model["norm"](x_BTD)) if self.last else x_BTD
        return out


def layers_of(part: Llama | Stage) -> tuple[nn.Module, ...]:
    """The layers of a model, or of a stage of it, in order."""
    return tuple(part.model.layers) if isinstance(part, Llama) else part.layers


def recomputed(part: Llama | Stage, case: Case) -> int:
    """How many of the part's layers recompute in backward."""
    held = range(part.spec.n_layers) if isinstance(part, Llama) else part.held
    return len(case.job.checkpointed(part.spec.n_layers).layers & set(held))


def stages_of(model: Llama, world: World, computing: Context = nullcontext) -> list[Stage]:
    """This rank's stages of ``model``; its other layers take no memory from here on.

    Raises:
        UnsupportedError: the model is tied, so that two stages need one weight, or has fewer layers than stages.
    """
    stages = world.case.job.pp_ranks * world.case.job.interleave
    if model.spec.tied:
        raise UnsupportedError("a pipeline needs an untied model: its first stage embeds, its last has the head")
    if model.spec.n_layers < stages:
        raise UnsupportedError(
            f"a pipeline of {stages} stages needs a model of {stages} or more layers, got {model.spec.n_layers}; "
            "use fewer pipeline ranks, or a smaller interleave"
        )
    divided = layers_of_stages(model.spec.n_layers, stages)
    own = stages_of_rank(world.stage_rank, world.case.job.pp_ranks, world.case.job.interleave)
    made = [Stage(model, index, divided[index], world.tokens, computing) for index in own]
    kept = {id(parameter) for stage in made for parameter in stage.parameters()}
    for module in model.modules():
        if any(id(parameter) not in kept for parameter in module.parameters(recurse=False)):
            module._apply(lambda tensor: tensor.to("meta"), recurse=False)
    return made


def parameters_of_all(
    model: Llama, world: World, own: Mapping[str, Callable[[], Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of ``model`` and its full value, which the rank that has its stage makes by ``own`` and
    broadcasts to its pipeline.
    """
    assert world.pipeline is not None
    ranks, group = world.case.job.pp_ranks, world.pipeline.get_group()
    divided = layers_of_stages(model.spec.n_layers, ranks * world.case.job.interleave)
    stage_of = {f"model.layers.{layer}.": stage for stage, layers in enumerate(divided) for layer in layers}
    for name, parameter in model.named_parameters():
        layer = ".".join([*name.split(".")[:3], ""])
        owner = stage_of.get(layer, 0 if "embed_tokens" in name else len(divided) - 1) % ranks
        if owner == world.stage_rank:
            value = own[name]().contiguous()
        else:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        dist.broadcast(value, group_src=owner, group=group)
        yield name, value
