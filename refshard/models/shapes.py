"""A decoder's dimensions from its parameters' shapes: blocks that repeat, the embedding, attention and feed-forward.

Shapes do not tell how many heads there are: a ``config`` must, by Hugging Face's names. What changes the computation
and no shape, such as a sliding window, is refused where the ``config`` names it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from refshard.specs.reading import is_count

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_UNSEEN = ("sliding_window", "attn_logit_softcapping", "num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a configuration that change what is computed, and that no shape tells."""
_DEFAULT_EPS, _DEFAULT_BASE = 1e-6, 10000.0
"""Of norms and of rotations, where the configuration says nothing. Neither changes a plan."""
Kind = TypeVar("Kind", bound=nn.Module)
Config = Mapping[str, Any]
Parameters = Mapping[str, Tensor]
Fields = dict[str, Any]


def spec_of_shapes(module: nn.Module) -> Fields:
    """The fields of a :class:`~refshard.specs.model.ModelSpec`, but for ``params`` and ``source``.

    Raises:
        ValueError: the module is no decoder that shapes tell; the message says the rule and the value.
    """
    config = next((found for inner in module.modules() if (found := config_of(inner))), {})
    if field := next((field for field in _UNSEEN if config.get(field)), None):
        raise ValueError(
            f"{field} of its config must be absent, because parameter shapes do not show it, got {config[field]}"
        )
    blocks = _blocks(module)
    ends = _ends(module)
    return {
        **ends, "n_layers": len(blocks), **_block(blocks[0], ends["dim"], config),
        "norm_eps": _real(config, _NORM_EPS, _DEFAULT_EPS),
        "rope_theta": _real({**config, **(config.get("rope_parameters") or {})}, ("rope_theta",), _DEFAULT_BASE),
    }  # fmt: skip


def config_of(module: nn.Module) -> Config:
    """A module's ``config`` as a dictionary; empty if it has none."""
    config: Any = getattr(module, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def count(module: nn.Module) -> int:
    """Its parameters, a shared one counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def leads_to(module: nn.Module, vocab: object) -> bool:
    """Whether a product outside of its blocks leads to the vocabulary."""
    return any(head.out_features == vocab for head in _outside(module, nn.Linear))


def _outside(module: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Its modules of a kind that are in no list of modules."""
    lists = tuple(f"{path}." for path, inner in module.named_modules() if isinstance(inner, nn.ModuleList))
    return (
        inner for path, inner in module.named_modules() if isinstance(inner, kind) and not path.startswith(lists)
    )  # fmt: skip


def _blocks(module: nn.Module) -> nn.ModuleList:
    blocks = max(_outside(module, nn.ModuleList), key=count, default=nn.ModuleList())
    kinds = {tuple((path, tuple(p.shape)) for path, p in block.named_parameters()) for block in blocks}
    if len(kinds) != 1:
        got = f"{len(kinds)} different kinds" if kinds else "none"
        raise ValueError(f"its blocks must be in an nn.ModuleList and have the same parameter shapes, got {got}")
    return blocks


def _ends(module: nn.Module) -> Fields:
    """What lies around the blocks: the embedding of words, that of positions, and the head."""
    tables = sorted(_outside(module, nn.Embedding), key=lambda table: -table.num_embeddings)
    if not tables or not leads_to(module, tables[0].num_embeddings):
        raise ValueError(
            "outside its blocks it must have an nn.Embedding, and an nn.Linear with as many outputs as the embedding "
            "has rows, got none"
        )
    words, *places = tables
    return {
        "dim": words.embedding_dim, "vocab": words.num_embeddings,
        "tied": any(head.weight is words.weight for head in _outside(module, nn.Linear)),
        "positions": sum(table.num_embeddings for table in places),
    }  # fmt: skip


def _block(block: nn.Module, dim: int, config: Config) -> Fields:
    named = dict(block.named_parameters())
    if odd := next((path for path, p in named.items() if p.dim() not in (1, 2)), None):
        raise ValueError(f"a block's parameters must be matrices and vectors, got '{odd}' of {named[odd].dim()}-D")
    matrices = {path: p for path, p in named.items() if p.dim() == 2}
    return {
        **_attention({path: p for path, p in matrices.items() if _attends(path)}, dim, config),
        **_feed_forward({path: p for path, p in matrices.items() if not _attends(path)}, dim),
        **_vectors([path for path in named if path not in matrices], matrices),
    }  # fmt: skip


def _attends(path: str) -> bool:
    """Whether a parameter is an attention's, by its modules' names; a norm called after it is not."""
    *outer, last = path.split(".")[:-1] or [""]
    return any("attn" in part or "attention" in part for part in (*outer, "" if "norm" in last else last))


def _attention(matrices: Parameters, dim: int, config: Config) -> Fields:
    heads = _number(config, _HEADS)
    if not matrices or heads is None:
        lacks = "no config with it" if matrices else "no such module"
        raise ValueError(
            "a block must have a module with 'attn' or 'attention' in its name, and the model a config with "
            f"num_attention_heads, got {lacks}"
        )
    width = _number(config, ("head_dim",)) or dim // heads
    rest = sum(p.numel() for p in matrices.values()) // dim - 2 * heads * width
    return {"n_heads": heads, "head_dim": width, "n_kv_heads": _number(config, _KV_HEADS) or max(rest // width // 2, 1)}


def _feed_forward(matrices: Parameters, dim: int) -> Fields:
    """Its width. If it is gated, two products lead in, or one of twice the width."""
    widths = sorted(p.shape[0] if p.shape[1] == dim else p.shape[1] for p in matrices.values())
    products = sum(widths) / widths[0] if widths else 0
    if products not in (2, 3):
        shapes = ", ".join(f"{tuple(p.shape)}" for p in matrices.values()) or "none"
        raise ValueError(f"a block's feed-forward must be two products, or three if it is gated, got {shapes}")
    return {"ffn_dim": widths[0], "gated": products == 3}


def _vectors(vectors: list[str], matrices: Parameters) -> Fields:
    """Norms and biases. Their exact number is held to the whole later."""
    biases = [path for path in vectors if path.endswith("bias")]
    norms = [path for path in vectors if path not in biases]
    biased = any(f"{path.removesuffix('bias')}weight" in matrices for path in biases)
    return {
        "biased": biased, "norm_biases": bool(biases) and not biased,
        "query_norm": any(map(_attends, norms)), "extra_norms": sum(not _attends(path) for path in norms) == 4,
    }  # fmt: skip


def _number(config: Config, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if is_count(value := config.get(name))), None)


def _real(config: Config, names: tuple[str, ...], default: float) -> float:
    return next((float(config[name]) for name in names if isinstance(config.get(name), int | float)), default)
