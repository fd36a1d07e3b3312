"""Low-rank adapters on a frozen Llama: peft's own modules, but with initial values that their names alone decide, so
that they are the same for every strategy and rank.
"""

import math

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from refshard.models.llama import Llama, parameter_seed
from refshard.specs.tuning import Lora


def adapt(model: Llama, lora: Lora, seed: int) -> None:
    """Freeze an initialised ``model`` and put adapters on linear layers of its blocks, in place.

    Adapters have the embedding's dtype, and start from :func:`initialise_adapters`.
    """
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.projections),
        bias="none",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        get_peft_model(model, config, autocast_adapter_dtype=False)
    for layer in adapter_layers(model):
        for part in (layer.lora_A, layer.lora_B):
            part.to(model.model.embed_tokens.weight.dtype)
    initialise_adapters(model, seed)


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """As peft: A uniform within ``1 / sqrt(fan-in)``, B zero; each from a generator that its name seeds."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator(parameter.device).manual_seed(parameter_seed(name, seed))
            parameter.uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:
            parameter.zero_()


def adapter_layers(model: nn.Module) -> list[LoraLayer]:
    """Every adapted layer of a model, wrapped or not."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def switch_dropout(model: nn.Module, *, on: bool) -> None:
    """Only adapters have dropout, and no other module of a Llama depends on its mode."""
    for layer in adapter_layers(model):
        layer.lora_dropout.train(on)
