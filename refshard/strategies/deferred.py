"""Models from the meta device: a strategy shards first, and then gives what a rank keeps storage and values.

A model that is not on the meta device is left as it is by all of these.
"""

from collections.abc import Callable

import torch
from torch import nn

from refshard.models.llama import Initialiser, Llama, initialise
from refshard.strategies.world import World


def fill(model: Llama, world: World) -> None:
    """Give a model whose parameters have become DTensors storage, and each rank's part of the initial values."""
    if _on_meta(model):
        model.to_empty(device="cpu" if world.case.offload else world.device)
        initialise(model, world.case.seed, world.device)


def values(model: Llama, world: World) -> Callable[[nn.Module], None] | None:
    """A function that fills the parameters which a module of ``model`` holds directly, once they have storage."""
    return Initialiser(model, world.case.seed) if _on_meta(model) else None


def storage_and_values(model: Llama, world: World) -> Callable[[nn.Module], None] | None:
    """As :func:`values`, and gives them storage first. The parameter objects stay the same, so that ties hold."""
    initial = values(model, world)
    if initial is None:
        return None

    def fill_module(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device=world.device), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)
        initial(module)

    return fill_module


def _on_meta(model: Llama) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
