"""Models on the meta device: a strategy shards first, and then gives each rank's part storage and values.

A model that is not on the meta device is left as it is. A module of the user's own is on it only in dry runs, which
compute no values, so it gets storage alone.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from refshard.models.llama import Initialiser, Llama, initialise
from refshard.strategies.world import World


def fill(model: nn.Module, world: World) -> None:
    """Give a model of DTensors storage, and each rank's part of the initial values."""
    if _on_meta(model):
        tied: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    tied.setdefault(id(parameter), []).append((module, name))
        model.to_empty(device="cpu" if world.case.job.offload else world.device)
        for (first, key), *others in tied.values():  # each module has got a parameter of its own
            for module, name in others:
                module._parameters[name] = first._parameters[key]
        if isinstance(model, Llama):
            initialise(model, world.case.protocol.seed, world.device)


def fill_stages(stages: Iterable[nn.Module], model: Llama, world: World) -> None:
    """As :func:`fill`, for this rank's stages of ``model``, sharded or not."""
    initial = Initialiser(model, world.case.protocol.seed, world.device)
    for stage in stages:
        if _on_meta(stage):
            stage.to_empty(device=world.device)
            for module in stage.modules():
                initial(module)


def values(model: nn.Module, world: World) -> Callable[[nn.Module], None] | None:
    """A function that fills the parameters which a module of ``model`` holds directly, once they have storage."""

    def write_buffers(module: nn.Module) -> None:
        for buffer in module.buffers(recurse=False):
            buffer.zero_()  # the engine refuses a buffer that nobody wrote to

    if not _on_meta(model):
        return None
    return Initialiser(model, world.case.protocol.seed) if isinstance(model, Llama) else write_buffers


def storage_and_values(model: nn.Module, world: World) -> Callable[[nn.Module], None] | None:
    """As :func:`values`, with storage first. The parameter objects stay the same, so that ties hold."""
    initial = values(model, world)
    if initial is None:
        return None

    def fill_module(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device=world.device), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=world.device)
        initial(module)

    return fill_module


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
