"""Low-rank adapters on a frozen Llama: peft's own modules, saved in peft's own format.

What is added here is that they start from values that their names decide, whatever the strategy and the rank.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights
from peft import get_peft_model_state_dict as get_state
from peft import set_peft_model_state_dict as set_state
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from refshard.errors import CheckpointError
from refshard.models.llama import Llama, parameter_seed
from refshard.specs.tuning import LORA

_PREFIX = "base_model.model."
"""What peft puts before the bare model's names in what it saves."""


def adapt(model: Llama, seed: int) -> PeftModel:
    """Freeze an initialised ``model`` and put adapters on every linear layer of its blocks, in place.

    Returns peft's view of the same modules, to load adapters with; what is to be wrapped and trained stays ``model``.
    Adapters are of the embedding's dtype, and start from :func:`initialise_adapters`.
    """
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        adapted = get_peft_model(model, _config(), autocast_adapter_dtype=False)
    for layer in adapter_layers(model):
        for part in (layer.lora_A, layer.lora_B):
            part.to(model.model.embed_tokens.weight.dtype)
    initialise_adapters(model, seed)
    return adapted


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """As peft does: A uniform within ``1 / sqrt(fan-in)``, B zero; each from a generator that its name seeds."""
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
    """Adapters alone have dropout, and nothing else of a Llama asks whether it is in training."""
    for layer in adapter_layers(model):
        layer.lora_dropout.train(on)


def adapter_state(full_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The adapters among a strategy's full parameters, by the name that peft expects them by."""
    return {_PREFIX + name: value for name, value in full_parameters if ".lora_" in name}


def save_adapters(folder: Path, model: Llama, state: Mapping[str, Tensor]) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` of what :func:`adapter_state` gathered.

    peft picks entries by the places of its modules, and silently writes none of them where a wrapper (FSDP1's) sits in
    between: so a bare model on the meta device stands in for ``model``, which may be wrapped in any way.

    Raises:
        CheckpointError: ``state`` is not that of the model's adapters.
    """
    with torch.device("meta"):
        bare = get_peft_model(Llama(model.spec), _config())
    written = get_state(bare, state_dict=dict(state))
    if different := sorted(written.keys() ^ get_state(bare).keys()):
        raise CheckpointError(
            f"adapters to save: {different[0]} and {len(different) - 1} more are missing or are not the model's; give "
            "all full parameters of the model that was adapted"
        )
    bare.save_pretrained(str(folder), state_dict=dict(state))


def load_adapters(folder: Path, adapted: PeftModel) -> None:
    """Fill the adapters of a model that is not sharded yet.

    Raises:
        CheckpointError: the file lacks an adapter, or holds one that the model has not.
    """
    found: Any = set_state(adapted, load_peft_weights(str(folder), device="cpu"))
    missing = [name for name in found.missing_keys if ".lora_" in name]
    if missing or found.unexpected_keys:
        different = [*missing, *found.unexpected_keys]
        raise CheckpointError(
            f"adapters in {folder}: {different[0]} and {len(different) - 1} more are missing or are not the model's; "
            "adapt the model that they were saved from"
        )


def _config() -> LoraConfig:
    return LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        lora_dropout=LORA.dropout,
        target_modules=list(LORA.projections),
        bias="none",
    )
