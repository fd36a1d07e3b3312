"""The dimensions of a decoder that a factory makes, for closed forms.

The factory runs on the meta device, so that a model of any size takes seconds and no memory. Dimensions come from the
first of these that the module has:

1. ``spec``, a :class:`~refshard.specs.model.ModelSpec`, as this project's own Llama.
2. ``config``, of a family that is read from a ``config.json`` too, as models of transformers.
3. Shapes of a decoder's parameters: blocks that repeat, the embedding, attention and feed-forward. Shapes do not show
   how many heads there are: a ``config`` must, by Hugging Face's names. A field of the ``config`` that changes the
   computation and no shape, such as a sliding window, is refused.

They are only trusted if their closed form has exactly as many parameters as the module.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from refshard.errors import SpecError
from refshard.models.own import find_factory, line_of
from refshard.specs.hf_config import FAMILIES, Source, config_fields
from refshard.specs.model import ModelSpec, parameter_count
from refshard.specs.reading import convert, is_count

REMEDY = "give the dimensions in a TOML file instead: --model mine.toml (docs/how-to/measure.md)"


class NotRecognisedError(SpecError):
    """The module is no decoder with dimensions that closed forms know."""


def read_dimensions(name: str) -> ModelSpec:
    """The dimensions of the module that the factory ``name`` returns, alone or before its batch.

    Raises:
        SpecError: there is no such factory, it fails on the meta device, or has frozen parameters.
        NotRecognisedError: what it makes is no decoder that can be recognised.
    """
    module = _made(name)
    if frozen := sum(not parameter.requires_grad for parameter in module.parameters()):
        raise _refused(name, f"every parameter must be trained, got {frozen} that are frozen")
    try:
        spec, counted = _spec_of(module, name), _count(module)
    except SpecError as error:
        raise NotRecognisedError(str(error)) from None
    if (expected := parameter_count(spec)) != counted:
        heads = f"{spec.n_heads} heads of {spec.head_dim}, {spec.n_kv_heads} of keys"
        read = f"{spec.n_layers} layers of width {spec.dim}, {heads}, feed-forward {spec.ffn_dim}"
        problem = (
            f"the dimensions read from the module ({read}, vocabulary {spec.vocab}) must give its {counted:,} "
            f"parameters, got {expected:,}"
        )
        raise NotRecognisedError(str(_refused(name, problem)))
    return msgspec.structs.replace(spec, params=counted)


def _made(name: str) -> nn.Module:
    """The module, on the meta device. The factory's prints go to standard error."""
    factory = find_factory(name)
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):
            made = factory()
    except Exception as error:
        raise _refused(name, f"the factory must run on the meta device, got {line_of(error)}") from error
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise _refused(name, f"the factory must return a module, or (module, batch), got {type(made).__name__}")
    return module


def _spec_of(module: nn.Module, name: str) -> ModelSpec:
    """Its dimensions, or if it only adds a loss, those of the module inside that has all parameters."""
    for inner in (one for one in module.modules() if _count(one) == _count(module)):
        spec: Any = getattr(inner, "spec", None)
        if isinstance(spec, ModelSpec):
            return spec
        config = _config_of(inner)
        if config.get("model_type") in FAMILIES and _leads_to(inner, config.get("vocab_size")):
            source = Source(name=f"model: the configuration of '{name}'", remedy=REMEDY)
            # In files a missing head_dim may be a default; a module's parameters show it.
            return _converted(config_fields({"head_dim": None, **config}, source), name)
    try:
        fields = _spec_of_shapes(module)
    except ValueError as error:
        raise _refused(name, str(error)) from None
    return _converted(fields, name)


def _converted(fields: Mapping[str, Any], name: str) -> ModelSpec:
    return convert({**fields, "source": f"the factory {name}", "params": 1}, ModelSpec, where=f"model '{name}'")


def _refused(name: str, problem: str) -> SpecError:
    return SpecError(f"model: to plan for the factory '{name}', {problem}; {REMEDY}")


_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_UNSEEN = ("sliding_window", "attn_logit_softcapping", "num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a configuration that change the computation and no shape."""
_DEFAULT_EPS, _DEFAULT_BASE = 1e-6, 10000.0
"""Epsilon of norms and base of rotations, if not configured. Neither changes a plan."""
Kind = TypeVar("Kind", bound=nn.Module)
Config = Mapping[str, Any]
Fields = dict[str, Any]


def _spec_of_shapes(module: nn.Module) -> Fields:
    """The fields of a :class:`~refshard.specs.model.ModelSpec`, except ``params`` and ``source``.

    Raises:
        ValueError: its shapes are not a decoder's; the message has the rule and the value.
    """
    config = next((found for inner in module.modules() if (found := _config_of(inner))), {})
    if field := next((field for field in _UNSEEN if config.get(field)), None):
        raise ValueError(
            f"{field} of its config must be absent, because parameter shapes do not show it, got {config[field]}"
        )
    blocks = max(_outside(module, nn.ModuleList), key=_count, default=nn.ModuleList())
    kinds = {tuple((path, tuple(p.shape)) for path, p in block.named_parameters()) for block in blocks}
    if len(kinds) != 1:
        got = f"{len(kinds)} different kinds" if kinds else "none"
        raise ValueError(f"its blocks must be in an nn.ModuleList and have the same parameter shapes, got {got}")
    tables = sorted(_outside(module, nn.Embedding), key=lambda table: -table.num_embeddings)
    if not tables or not _leads_to(module, tables[0].num_embeddings):
        raise ValueError(
            "outside its blocks it must have an nn.Embedding, and an nn.Linear with as many outputs as the embedding "
            "has rows, got none"
        )
    words, *places = tables
    return {
        "dim": words.embedding_dim, "vocab": words.num_embeddings,
        "tied": any(head.weight is words.weight for head in _outside(module, nn.Linear)),
        "positions": sum(table.num_embeddings for table in places),
        "n_layers": len(blocks), **_block(blocks[0], words.embedding_dim, config),
        "norm_eps": _real(config, _NORM_EPS, _DEFAULT_EPS),
        "rope_theta": _real({**config, **(config.get("rope_parameters") or {})}, ("rope_theta",), _DEFAULT_BASE),
    }  # fmt: skip


def _config_of(module: nn.Module) -> Config:
    """A module's ``config`` as a dictionary; empty if it has none."""
    config: Any = getattr(module, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _count(module: nn.Module) -> int:
    """Its parameters, a shared one counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _leads_to(module: nn.Module, vocab: object) -> bool:
    """Whether a product outside of its blocks leads to the vocabulary."""
    return any(head.out_features == vocab for head in _outside(module, nn.Linear))


def _outside(module: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Its modules of a kind that are in no list of modules."""
    lists = tuple(f"{path}." for path, inner in module.named_modules() if isinstance(inner, nn.ModuleList))
    return (
        inner for path, inner in module.named_modules() if isinstance(inner, kind) and not path.startswith(lists)
    )  # fmt: skip


def _block(block: nn.Module, dim: int, config: Config) -> Fields:
    """Heads, feed-forward, norms and biases of one block."""
    named = dict(block.named_parameters())
    if odd := next((path for path, p in named.items() if p.dim() not in (1, 2)), None):
        raise ValueError(f"a block's parameters must be matrices and vectors, got '{odd}' of {named[odd].dim()}-D")
    matrices = {path: p for path, p in named.items() if p.dim() == 2}
    attention = [p for path, p in matrices.items() if _attends(path)]
    heads = _number(config, _HEADS)
    if not attention or heads is None:
        lacks = "no config with it" if attention else "no such module"
        raise ValueError(
            "a block must have a module with 'attn' or 'attention' in its name, and the model a config with "
            f"num_attention_heads, got {lacks}"
        )
    width = _number(config, ("head_dim",)) or dim // heads
    of_keys = sum(p.numel() for p in attention) // dim - 2 * heads * width
    # Two products lead into a gated feed-forward, or one of twice the width.
    feed_forward = [p for path, p in matrices.items() if not _attends(path)]
    widths = sorted(p.shape[0] if p.shape[1] == dim else p.shape[1] for p in feed_forward)
    products = sum(widths) / widths[0] if widths else 0
    if products not in (2, 3):
        shapes = ", ".join(f"{tuple(p.shape)}" for p in feed_forward) or "none"
        raise ValueError(f"a block's feed-forward must be two products, or three if it is gated, got {shapes}")
    # The exact number of norms and biases is checked by the total.
    biases = [path for path in named if path not in matrices and path.endswith("bias")]
    norms = [path for path in named if path not in matrices and path not in biases]
    biased = any(f"{path.removesuffix('bias')}weight" in matrices for path in biases)
    return {
        "n_heads": heads, "head_dim": width,
        "n_kv_heads": _number(config, _KV_HEADS) or max(of_keys // width // 2, 1),
        "ffn_dim": widths[0], "gated": products == 3,
        "biased": biased, "norm_biases": bool(biases) and not biased,
        "query_norm": any(map(_attends, norms)), "extra_norms": sum(not _attends(path) for path in norms) == 4,
    }  # fmt: skip


def _attends(path: str) -> bool:
    """Whether a parameter is an attention's, by its modules' names; a norm called after it is not."""
    *outer, last = path.split(".")[:-1] or [""]
    return any("attn" in part or "attention" in part for part in (*outer, "" if "norm" in last else last))


def _number(config: Config, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if is_count(value := config.get(name))), None)


def _real(config: Config, names: tuple[str, ...], default: float) -> float:
    return next((float(config[name]) for name in names if isinstance(config.get(name), int | float)), default)
