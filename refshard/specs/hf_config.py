"""A Hugging Face ``config.json`` as a model's dimensions, if the architecture is exactly one that a model's spec has.

A field that would change what is computed, and that a model's spec does not have, is refused by name: a model that is
almost a Llama has other parameters, FLOPs or memory.

A spec does not say how positions are rotated if not as in Llama 3 (YaRN, Gemma's second base, GLM's half of each head),
nor has it the caps of Gemma 2's scores and logits. These change neither parameters nor FLOPs, so such models can be
planned, but not trained.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from refshard.errors import SpecError
from refshard.specs.reading import convert, read_json

CONFIG = "config.json"
"""The name that Hugging Face gives the file."""
_REMEDY = "use a model of your own instead: model = 'package.module:factory' (docs/how-to/measure.md)"
_TANH_GELU = "gelu_pytorch_tanh"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a configuration comes from, and what else to do if it is refused; for messages."""

    name: str
    remedy: str = _REMEDY

    def __str__(self) -> str:
        return self.name


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that matter. Those with a default are missing in files that older versions of transformers wrote."""

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
    use_sliding_window: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None
    architectures: list[str] | None = None


class _Phi3(_Config, frozen=True, kw_only=True):
    """Phi 3 and 4. A window of all positions is none."""

    max_position_embeddings: int


class _Mixture(_Config, frozen=True, kw_only=True):
    num_experts_per_tok: int


class _Qwen3Moe(_Mixture, frozen=True, kw_only=True):
    """Qwen 3 with experts."""

    num_experts: int
    moe_intermediate_size: int
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class _Mixtral(_Mixture, frozen=True, kw_only=True):
    """Mixtral; its experts have the width ``intermediate_size``."""

    num_local_experts: int


class _GptOss(_Mixtral, frozen=True, kw_only=True):
    """gpt-oss; its experts have the width ``intermediate_size``."""

    attention_bias: bool = True
    layer_types: list[str] | None = None


class _Llama4(_Mixtral, frozen=True, kw_only=True):
    """Llama 4's text. Published files leave out what is transformers' default, which these are."""

    intermediate_size_mlp: int
    interleave_moe_layer_step: int = 1
    moe_layers: list[int] | None = None
    attention_chunk_size: int | None = 8192
    no_rope_layer_interval: int = 4


class _WithShared(_Mixture, frozen=True, kw_only=True):
    """A mixture with shared experts, and layers without experts before it: GLM 4.5 and 4.6."""

    n_routed_experts: int
    n_shared_experts: int | None = None
    moe_intermediate_size: int
    first_k_dense_replace: int = 0
    use_qk_norm: bool = False


class _Deepseek(_WithShared, frozen=True, kw_only=True):
    """DeepSeek V2, V3 and R1, and Kimi K2."""

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_layer_freq: int = 1
    n_group: int | None = None
    topk_group: int | None = None


class _Gemma(_Config, frozen=True, kw_only=True):
    """Gemma 2, and Gemma 3's text. Published files leave out what is transformers' default, which these are."""

    vocab_size: int = 262_208
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    hidden_activation: str = _TANH_GELU
    sliding_window: int | None = 4096
    sliding_window_pattern: int | None = None
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False


Fields = dict[str, Any]
Read = Callable[[Mapping[str, Any], "Source"], Fields]
Known = TypeVar("Known", bound=_Config)
Rules = dict[str, tuple[object, str]]
"""By field: the value that it must have, and that value in words."""
_PLAIN: Rules = {
    "hidden_act": ("silu", "'silu'"),
    "attention_bias": (False, "false"),
    "mlp_bias": (False, "false"),
    "attention_dropout": (0.0, "0.0"),
    "quantization_config": (None, "absent"),
}
_NO_WINDOW: Rules = {**_PLAIN, "use_sliding_window": (False, "false")}


def read_config(path: Path) -> Fields:
    """The fields of a :class:`~refshard.specs.model.ModelSpec`, except ``params``, as a ``config.json`` has them.

    Raises:
        SpecError: it cannot be read, lacks a field, or is of another architecture.
    """
    return config_fields(read_json(path), Source(name=str(path)))


def config_fields(data: Mapping[str, Any], source: Source) -> Fields:
    """As :func:`read_config`, of what a ``config.json`` holds.

    Raises:
        SpecError: it lacks a field, or is of another architecture.
    """
    family = data.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        known = "', '".join(sorted(_FAMILIES))
        raise SpecError(f"{source}: model_type must be one of '{known}', got {family!r}; {source.remedy}")
    _check_architecture(data, source)
    return {**read(data, source), "source": str(source)}


def _llama(data: Mapping[str, Any], source: Source) -> Fields:
    config = _read(_Config, data, source)
    return {**_common(config), **_rope(config, source)}


def _mistral(data: Mapping[str, Any], source: Source) -> Fields:
    config = _read(_Config, data, source, ("sliding_window", "num_key_value_heads"))
    return {**_common(config), "window": config.sliding_window or 0, **_rope(config, source)}


def _phi3(data: Mapping[str, Any], source: Source) -> Fields:
    config = _read(_Phi3, data, source, ("num_key_value_heads",))
    window = config.sliding_window or 0
    narrow = window if window < config.max_position_embeddings else 0
    return {**_common(config), "window": narrow, **_rope(config, source)}


def _smollm3(data: Mapping[str, Any], source: Source) -> Fields:
    config = _read(_Config, {"tie_word_embeddings": True, **data}, source, rules=_NO_WINDOW)
    return {**_common(config), "other_rotations": True, "rope_theta": _rope_base(config, default=2e6)}


def _olmo2(data: Mapping[str, Any], source: Source) -> Fields:
    """Attention and feed-forward are normed after, not before; queries and keys of all heads together."""
    config = _read(_Config, data, source)
    queries, keys, width = _widths(config)
    return {**_common(config), "query_norm": True, "vectors": queries + keys - 2 * width, **_rope(config, source)}


def _qwen2(data: Mapping[str, Any], source: Source) -> Fields:
    """Queries, keys and values have biases."""
    config = _read(_Config, data, source, ("num_key_value_heads",), _NO_WINDOW)
    queries, keys, _ = _widths(config)
    return {**_common(config), "vectors": queries + 2 * keys, **_rope(config, source)}


def _qwen3(data: Mapping[str, Any], source: Source) -> Fields:
    config = _read(_Config, data, source, ("head_dim", "num_key_value_heads"), _NO_WINDOW)
    return {**_common(config), "query_norm": True, **_rope(config, source)}


def _qwen3_moe(data: Mapping[str, Any], source: Source) -> Fields:
    if "num_local_experts" in data:  # the name in version 5 of transformers
        data = {"num_experts": data["num_local_experts"], **data}
    rules = {**_NO_WINDOW, "mlp_only_layers": ([], "[]")}
    data = {**data, "mlp_only_layers": data.get("mlp_only_layers") or []}
    config = _read(_Qwen3Moe, data, source, ("head_dim", "num_key_value_heads"), rules)
    experts = _experts(config, config.num_experts, config.moe_intermediate_size, every=config.decoder_sparse_step)
    return {**_common(config), "query_norm": True, "experts": experts, **_rope(config, source)}


def _mixtral(data: Mapping[str, Any], source: Source) -> Fields:
    rules = {**_PLAIN, "sliding_window": (None, "null")}
    config = _read(_Mixtral, data, source, ("sliding_window", "num_key_value_heads"), rules)
    experts = _experts(config, config.num_local_experts, config.intermediate_size)
    return {**_common(config), "experts": experts, **_rope(config, source)}


def _gpt_oss(data: Mapping[str, Any], source: Source) -> Fields:
    """Attention, the router and the experts have biases, and each head a sink; YaRN stretches positions."""
    rules = {**_PLAIN, "attention_bias": (True, "true")}
    config = _read(_GptOss, _without_quantization(data, "mxfp4"), source, rules=rules)
    queries, keys, _ = _widths(config)
    others = config.hidden_size + config.num_attention_heads + config.num_local_experts
    return {
        **_common(config), "vectors": queries + 2 * keys + others,
        "experts": _experts(config, config.num_local_experts, config.intermediate_size, biased=True, clamped=True),
        "window": config.sliding_window or 0, "global_every": _global_every(config, source, default=2),
        "rope_theta": _rope_base(config, default=150_000.0), "yarn": True,
    }  # fmt: skip


def _llama4_text(data: Mapping[str, Any], source: Source) -> Fields:
    """Its chunks of attention are taken for windows. Norms of queries and keys have no weights."""
    config = _read(_Llama4, data, source)
    every, width, chunk = config.interleave_moe_layer_step, config.intermediate_size, config.attention_chunk_size or 0
    if (config.moe_layers or None) not in (None, list(range(every - 1, config.num_hidden_layers, every))):
        raise SpecError(f"{source}: moe_layers must be each {every}-th, got {config.moe_layers}; {source.remedy}")
    return {
        **_common(config), "ffn_dim": config.intermediate_size_mlp,
        "experts": _experts(config, config.num_local_experts, width, shared_ffn_dim=width, every=every),
        "window": chunk, "global_every": config.no_rope_layer_interval if chunk else 0,
        "rope_theta": _rope_base(config, default=5e5),
    }  # fmt: skip


def _glm4_moe(data: Mapping[str, Any], source: Source) -> Fields:
    """Queries, keys and values have biases; half of each head is rotated."""
    config = _read(_WithShared, {**data, "attention_bias": False}, source)
    queries, keys, _ = _widths(config)
    return {
        **_common(config), "query_norm": config.use_qk_norm, "experts": _with_shared(config),
        "vectors": queries + 2 * keys if data.get("attention_bias") else 0, "rope_theta": _rope_base(config),
    }  # fmt: skip


def _deepseek(data: Mapping[str, Any], source: Source) -> Fields:
    """V3's own file is of weights kept in fp8, which a plan's precision is not taken from."""
    rules = {**_PLAIN, "moe_layer_freq": (1, "1")}
    config = _read(_Deepseek, _without_quantization(data, "fp8"), source, rules=rules)
    latent = {
        "query_rank": config.q_lora_rank or 0,
        "kv_rank": config.kv_lora_rank,
        "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "value_dim": config.v_head_dim,
    }
    # Its head_dim is that of the rotated part, or that of nothing.
    common = _common(msgspec.structs.replace(config, head_dim=None))
    experts = {**_with_shared(config), "groups": config.n_group or 1, "active_groups": config.topk_group or 1}
    return {**common, "experts": experts, "latent": latent, "rope_theta": _rope_base(config)}


def _gemma2(data: Mapping[str, Any], source: Source) -> Fields:
    """Scores and logits are capped, which adds no parameters."""
    given = {"vocab_size": 256_000, "rope_theta": 1e4, **data, "sliding_window_pattern": 2}
    given |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return {**_gemma3_text(given, source), "query_norm": False}


def _gemma3_text(data: Mapping[str, Any], source: Source) -> Fields:
    rules = {
        **_PLAIN,
        "hidden_activation": (_TANH_GELU, f"'{_TANH_GELU}'"),
        "attn_logit_softcapping": (None, "null"),
        "final_logit_softcapping": (None, "null"),
        "use_bidirectional_attention": (False, "false"),
    }
    data = {**data, "use_bidirectional_attention": data.get("use_bidirectional_attention") or False}
    config = _read(_Gemma, data, source, rules=rules)
    every = _global_every(config, source, default=config.sliding_window_pattern or 6)
    return {
        **_common(config), "query_norm": True, "extra_norms": True, "window": config.sliding_window or 0,
        "global_every": every, "rope_theta": _rope_base(config, default=1e6),
    }  # fmt: skip


def _text(read: Read, data: Mapping[str, Any], source: Source) -> Fields:
    """The text of a model that sees images too."""
    inner = data.get("text_config")
    if not isinstance(inner, dict):
        raise SpecError(f"{source}: text_config must be given for {data['model_type']}, got {inner!r}; add it")
    return read(inner, source)


_FAMILIES: dict[str, Read] = {
    "llama": _llama, "mistral": _mistral, "phi3": _phi3, "smollm3": _smollm3, "olmo2": _olmo2, "qwen2": _qwen2,
    "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "glm4_moe": _glm4_moe, "gpt_oss": _gpt_oss,
    "llama4": partial(_text, _llama4_text), "llama4_text": _llama4_text, "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek, "kimi_k2": _deepseek, "gemma2": _gemma2, "gemma3": partial(_text, _gemma3_text),
    "gemma3_text": _gemma3_text,
}  # fmt: skip
"""By ``model_type``."""
FAMILIES = tuple(sorted(_FAMILIES))
"""Every ``model_type`` that can be read."""


def _common(config: _Config) -> Fields:
    heads = config.num_attention_heads
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_kv_heads": heads if config.num_key_value_heads is None else config.num_key_value_heads,
        "head_dim": config.head_dim or 0,
        "ffn_dim": config.intermediate_size,
        "vocab": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "tied": config.tie_word_embeddings,
    }


def _widths(config: _Config) -> tuple[int, int, int]:
    """Elements of a token's queries, of its keys, and of a head."""
    width = config.head_dim or config.hidden_size // max(1, config.num_attention_heads)
    keys = config.num_attention_heads if config.num_key_value_heads is None else config.num_key_value_heads
    return config.num_attention_heads * width, keys * width, width


def _without_quantization(data: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """The configuration of weights that are kept as ``method`` has them: a plan has a precision of its own."""
    given = data.get("quantization_config")
    kept = given.get("quant_method") if isinstance(given, dict) else None
    return {**data, "quantization_config": None} if kept == method else data


def _experts(config: _Mixture, count: int, ffn_dim: int, **others: int) -> Fields:
    return {"count": count, "active": config.num_experts_per_tok, "ffn_dim": ffn_dim, **others}


def _with_shared(config: _WithShared) -> Fields:
    width, shared = config.moe_intermediate_size, config.n_shared_experts or 0
    dense = config.first_k_dense_replace
    return _experts(config, config.n_routed_experts, width, shared_ffn_dim=shared * width, dense_layers=dense)


def _read(
    kind: type[Known], data: Mapping[str, Any], source: Source, given: tuple[str, ...] = (), rules: Rules | None = None
) -> Known:
    """The configuration; its ``given`` fields must be there, and those of ``rules`` have values that a spec expresses.

    Raises:
        SpecError: a field is missing, or has another value.
    """
    _check_given(data, given, str(data.get("model_type")), source)
    config = convert(data, kind, where=str(source))
    _check(config, _PLAIN if rules is None else rules, source)
    return config


def _check_given(data: Mapping[str, Any], fields: tuple[str, ...], family: str, source: Source) -> None:
    """Check that fields are there for which transformers has a default of its own, such as a window of 4,096."""
    for field in fields:
        if field not in data:
            or_null = "set it to null, or " + source.remedy if field == "sliding_window" else "add it"
            raise SpecError(f"{source}: {field} must be given for {family}, got nothing; {or_null}")


def _check(config: _Config, rules: Rules, source: Source) -> None:
    """Check every field that changes what is computed.

    Raises:
        SpecError: one has a value that a model's spec cannot express.
    """
    for field, (wanted, words) in rules.items():
        if (given := getattr(config, field)) != wanted:
            raise SpecError(f"{source}: {field} must be {words}, got {given!r}; {source.remedy}")


def _check_architecture(data: Mapping[str, Any], source: Source) -> None:
    allowed = (
        ("ForCausalLM", "ForConditionalGeneration") if data["model_type"] in ("gemma3", "llama4") else ("ForCausalLM",)
    )
    names = data.get("architectures")
    for name in names if isinstance(names, list) else ():
        if not str(name).endswith(allowed):
            raise SpecError(
                f"{source}: architectures must end in {' or '.join(allowed)}, got '{name}'; {source.remedy}"
            )


def _global_every(config: _Gemma | _GptOss, source: Source, default: int) -> int:
    """Which layers attend to everything, by ``layer_types``, which older files do not have."""
    if config.layer_types is None:
        return default
    whole = [index for index, kind in enumerate(config.layer_types, 1) if kind == "full_attention"]
    every = whole[0] if whole else 0
    if len(config.layer_types) != config.num_hidden_layers or whole != _multiples(every, config.num_hidden_layers):
        raise SpecError(
            f"{source}: layer_types must have 'full_attention' in each K-th of {config.num_hidden_layers} layers, got "
            f"it in {whole} of {len(config.layer_types)}; {source.remedy}"
        )
    return every


def _multiples(number: int, most: int) -> list[int]:
    return list(range(number, most + 1, number)) if number else []


def _rope_base(config: _Config, default: float = 10000.0) -> float:
    given = config.rope_parameters or {}
    given = given.get("full_attention", given)  # version 5 of transformers, of layers that differ
    theta = given.get("rope_theta", config.rope_theta)
    return default if theta is None else float(theta)


def _rope(config: _Config, source: Source) -> Fields:
    """The base of the rotations, and their scaling. Version 5 of transformers writes both as ``rope_parameters``."""
    given = {**(config.rope_scaling or {}), **(config.rope_parameters or {})}
    theta = given.get("rope_theta", config.rope_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    base = 10000.0 if theta is None else theta
    if given.get("partial_rotary_factor", config.partial_rotary_factor) != 1.0 or kind not in ("default", "llama3"):
        return {"rope_theta": base, "other_rotations": True}
    if kind == "default":
        return {"rope_theta": base, "rope_scaling": None}
    names = {"original_context": "original_max_position_embeddings"}
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
    if missing := next((names.get(f, f) for f in fields if names.get(f, f) not in given), None):
        raise SpecError(f"{source}: {missing} must be given for rope_type 'llama3', got nothing; add it")
    return {"rope_theta": base, "rope_scaling": {field: given[names.get(field, field)] for field in fields}}
