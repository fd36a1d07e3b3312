"""A Hugging Face ``config.json`` as a model's dimensions, if the architecture is exactly this project's Llama.

A field that would change what is computed, and that a model's spec does not have, is refused by name: a model that is
almost a Llama has other parameters, FLOPs or memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from refshard.errors import SpecError
from refshard.specs.reading import convert, read_json

CONFIG = "config.json"
"""The name that Hugging Face gives the file."""
_REMEDY = "use a model of your own instead: model = 'package.module:factory' (docs/how-to/own-model.md)"


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that matter. Those with a default are missing in files that older versions of transformers wrote."""

    model_type: Literal["llama", "mistral"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None
    architectures: list[str] | None = None


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a :class:`~refshard.specs.model.ModelSpec`, but for ``params``, as a ``config.json`` has them.

    Raises:
        SpecError: it cannot be read, lacks a field, or is of another architecture.
    """
    data = read_json(path)
    if (found := data.get("model_type")) not in ("llama", "mistral"):
        raise SpecError(f"{path}: model_type must be 'llama' or 'mistral', got {found!r}; {_REMEDY}")
    config = convert(data, _Config, where=str(path))
    _check(config, data, path)
    theta, scaling = _rope(config, path)
    heads = config.num_attention_heads
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_kv_heads": heads if config.num_key_value_heads is None else config.num_key_value_heads,
        "ffn_dim": config.intermediate_size,
        "vocab": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "tied": config.tie_word_embeddings,
        "source": str(path),
        "rope_scaling": scaling,
    }


def _check(config: _Config, data: Mapping[str, Any], path: Path) -> None:
    """Check every field that changes what is computed.

    Raises:
        SpecError: one has a value that this project's Llama does not implement.
    """
    mistral = config.model_type == "mistral"
    if mistral and "sliding_window" not in data:  # transformers' own default is 4096
        raise SpecError(f"{path}: sliding_window must be given for mistral, got nothing; set it to null, or {_REMEDY}")
    if mistral and config.num_key_value_heads is None:
        raise SpecError(f"{path}: num_key_value_heads must be given for mistral, got nothing; add it")
    width = config.hidden_size // max(config.num_attention_heads, 1)
    rules: dict[str, tuple[object, str]] = {
        "hidden_act": ("silu", "'silu'"),
        "attention_bias": (False, "false"),
        "mlp_bias": (False, "false"),
        "attention_dropout": (0.0, "0.0"),
        "partial_rotary_factor": (1.0, "1.0"),
        "quantization_config": (None, "absent"),
        **({"sliding_window": (None, "null")} if mistral else {}),
    }
    if config.head_dim not in (None, width):
        rules["head_dim"] = (width, f"hidden_size / num_attention_heads = {width}")
    for field, (wanted, words) in rules.items():
        if (given := getattr(config, field)) != wanted:
            raise SpecError(f"{path}: {field} must be {words}, got {given!r}; {_REMEDY}")
    for name in config.architectures or ():
        if not name.endswith("ForCausalLM"):
            raise SpecError(f"{path}: architectures must end in ForCausalLM, got '{name}'; {_REMEDY}")


def _rope(config: _Config, path: Path) -> tuple[float, dict[str, Any] | None]:
    """The base of the rotations, and their scaling. Version 5 of transformers writes both as ``rope_parameters``."""
    given = {**(config.rope_scaling or {}), **(config.rope_parameters or {})}
    theta = given.get("rope_theta", config.rope_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise SpecError(
            f"{path}: partial_rotary_factor must be 1.0, got {given['partial_rotary_factor']!r}; {_REMEDY}"
        )  # fmt: skip
    base = 10000.0 if theta is None else theta
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise SpecError(f"{path}: rope_type must be 'default' or 'llama3', got {kind!r}; {_REMEDY}")
    names = {"original_context": "original_max_position_embeddings"}
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
    if missing := next((names.get(f, f) for f in fields if names.get(f, f) not in given), None):
        raise SpecError(f"{path}: {missing} must be given for rope_type 'llama3', got nothing; add it")
    return base, {field: given[names.get(field, field)] for field in fields}
