"""Llama weights to and from Hugging Face's folders: ``config.json`` beside ``*.safetensors``.

Modules carry Hugging Face's names already, so only the configuration is translated. ``safetensors`` is imported where
it is used: a worker that trains does not need it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from refshard import flops, folders
from refshard.errors import CheckpointError, SpecError
from refshard.models.llama import Llama
from refshard.specs.model import ModelSpec, RopeScaling

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OBSOLETE = "rotary_emb.inv_freq"
"""What early exports of Llama hold beside the weights; it is computed from the configuration."""
DEFAULT_POSITIONS = 2048
"""``max_position_embeddings`` of a model whose spec does not bound it: Hugging Face's own default for Llama."""


def export(folder: str | Path, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a model for ``transformers.AutoModelForCausalLM.from_pretrained``; an export in ``folder`` is replaced.

    ``tensors`` are all weights by name, as ``Llama(spec).state_dict()`` lists them, on any device; a tied head may be
    left out. They keep their dtype. The folder appears once it is complete; see :mod:`refshard.folders`.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape, or the folder holds something else than an
            export.
    """
    from safetensors.torch import save_file

    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check(found, spec, "the weights to export")
    # Hugging Face stores a tied weight once; it ties by the configuration.
    kept = {n: t.detach().cpu().contiguous() for n, t in tensors.items() if not (spec.tied and n == HEAD)}
    staging = folders.begin(folder, [WEIGHTS, CONFIG])
    try:
        save_file(kept, staging / WEIGHTS, metadata={"format": "pt"})
        config = {**config_of(spec), "torch_dtype": str(kept[EMBEDDING].dtype).removeprefix("torch.")}
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for path in staging.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        folders.commit(folder)
    except BaseException:
        folders.abandon(folder)
        raise


def read(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight of an export by name, one at a time on the CPU in the dtype of its file.

    Raises:
        CheckpointError: the folder holds no such export.
    """
    from safetensors import safe_open

    for path, names in _files(Path(folder)).items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


@torch.no_grad()
def fill(model: Llama, folder: str | Path) -> None:
    """Fill a bare model, in place and converted to its dtype, from an export of the same configuration.

    Configuration, names and shapes are checked before anything is changed.

    Raises:
        CheckpointError: the folder holds no export, or another model's.
        SpecError: the configuration is of a model that :class:`Llama` cannot be.
    """
    folder = Path(folder)
    _check_same(read_spec(folder), model.spec, folder)
    _check(_shapes(folder), model.spec, f"{folder}")
    parameters = dict(model.named_parameters())
    for name, tensor in read(folder):
        if name in parameters:  # all but a tied head that is stored twice
            parameters[name].copy_(tensor)


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` that makes Hugging Face's Llama compute what ``Llama(spec)`` does."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": spec.tied,
        "max_position_embeddings": DEFAULT_POSITIONS,
    }
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        config["max_position_embeddings"] = int(scaling.factor * scaling.original_context)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return config


def read_spec(folder: str | Path) -> ModelSpec:
    """The dimensions of the model in a Hugging Face folder.

    Raises:
        CheckpointError: there is no readable ``config.json``.
        SpecError: it describes what :class:`Llama` cannot be.
    """
    path = Path(folder) / CONFIG
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give the folder of a Hugging Face model") from error
    rules = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, rule in rules.items():
        if config.get(key, rule) != rule:
            raise SpecError(f"{path}: {key} must be {rule!r}, got {config[key]!r}; only plain Llamas can be read")
    # transformers 5 writes `rope_parameters` where older releases, and Meta, have `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        fields = {
            "dim": config["hidden_size"],
            "n_layers": config["num_hidden_layers"],
            "n_heads": config["num_attention_heads"],
            "n_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
            "ffn_dim": config["intermediate_size"],
            "vocab": config["vocab_size"],
            "norm_eps": config["rms_norm_eps"],
            "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            "rope_scaling": _scaling(rope, path),
            "tied": config.get("tie_word_embeddings", False),
            "params": 1,
            "source": str(path),
        }
        spec = msgspec.convert(fields, ModelSpec, from_attributes=True)
    except KeyError as error:
        raise SpecError(f"{path}: {error.args[0]} is missing; give the configuration of a Llama") from error
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}; give the configuration of a Llama") from error
    if config.get("head_dim") not in (None, spec.head_dim):
        raise SpecError(f"{path}: head_dim must be {spec.head_dim} = dim / n_heads, got {config['head_dim']}")
    return msgspec.structs.replace(spec, params=flops.parameter_count(spec))


def _scaling(rope: Mapping[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise SpecError(f"{path}: rope_type must be 'default' or 'llama3', got {kind!r}; Llama computes no other")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )


def _check_same(found: ModelSpec, mine: ModelSpec, folder: Path) -> None:
    """Check all that a model computes with: equal shapes do not make equal models."""
    for field in (f for f in ModelSpec.__struct_fields__ if f not in ("params", "source")):
        if getattr(found, field) != getattr(mine, field):
            raise CheckpointError(
                f"{folder} holds a model with {field} = {getattr(found, field)}, but this one has "
                f"{getattr(mine, field)}; build it from read_spec(folder)"
            )


def _check(found: Mapping[str, tuple[int, ...]], spec: ModelSpec, what: str) -> None:
    """Check names and shapes against those of the model; a tied head may be missing."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Llama(spec).state_dict().items()}
    for name, shape in expected.items():
        if name not in found and not (spec.tied and name == HEAD):
            raise CheckpointError(f"{what} lack '{name}' of shape {shape}; the model of this spec has it")
    for name, shape in found.items():
        if name not in expected:
            raise CheckpointError(f"{what} have '{name}' of shape {shape}, which the model of this spec has not")
        if shape != expected[name]:
            raise CheckpointError(f"{what} have '{name}' with shape {shape}, but the spec's model has {expected[name]}")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    found = {}
    for path, names in _files(folder).items():
        with safe_open(path, framework="pt") as file:
            found.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
    return found


class _Index(msgspec.Struct):
    """The index of an export in several files: which file holds which weight."""

    weight_map: dict[str, str]


def _files(folder: Path) -> dict[Path, list[str]]:
    """Each file of weights, and the names in it; what an index lists and no file holds is an error."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    listed: dict[str, str] = {}
    if index.is_file():
        try:
            listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{index} cannot be read ({error}); give a complete export") from error
    held: dict[Path, list[str]] = {}
    for path in [folder / name for name in sorted(set(listed.values()))] or [folder / WEIGHTS]:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                held[path] = sorted(name for name in names if not name.endswith(OBSOLETE))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); give the folder of a complete export") from error
    for name, file_name in listed.items():
        if name not in held[folder / file_name] and not name.endswith(OBSOLETE):
            raise CheckpointError(f"{index} lists '{name}' in {file_name}, which lacks it; give a complete export")
    return held
