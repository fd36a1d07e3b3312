"""The dimensions of a model, the presets that ship with refshard, and what else a model's name can mean.

A name is a preset's (also an alias, or its id on Hugging Face), a TOML file's, that of a Hugging Face ``config.json``
or of the folder that holds it (also as ``hf:PATH``), or a factory ``package.module:function``, which makes a module of
the user's own.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.hf_config import CONFIG, read_config
from refshard.specs.names import closest, profile_called
from refshard.specs.reading import convert, read_toml, within

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HF = "hf:"
"""Prefix of the path of a ``config.json``, under any name, or of its folder."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Llama 3.1's stretching of RoPE wavelengths (source: the ``rope_scaling`` of each model's published config).

    Wavelengths over ``original_context / low_freq_factor`` tokens are divided by ``factor``, those under
    ``original_context / high_freq_factor`` stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mixture of ``count`` gated feed-forwards of width ``ffn_dim``; a router picks ``active`` of them per token.

    One of width ``shared_ffn_dim`` (0: none) serves every token. The first ``dense_layers`` layers have a single
    feed-forward, of the model's own ``ffn_dim``, and so have those between each ``every``-th of the others. In GPT-OSS
    the experts' products are ``biased``, and the input of their activation is ``clamped``. If experts form ``groups``,
    a token's lie in at most ``active_groups`` of them (DeepSeek-V3's node-limited routing, arXiv 2412.19437, section
    2.1.2).
    """

    count: int
    active: int
    ffn_dim: int
    shared_ffn_dim: int = 0
    dense_layers: int = 0
    every: int = 1
    biased: bool = False
    clamped: bool = False
    groups: int = 1
    active_groups: int = 1

    def __post_init__(self) -> None:
        for field in ("count", "active", "ffn_dim", "every", "groups", "active_groups"):
            within(field, getattr(self, field), 1)
        for field in ("shared_ffn_dim", "dense_layers"):
            within(field, getattr(self, field), 0)
        if self.active > self.count:
            raise ValueError(f"active must be at most count = {self.count}, got {self.active}")
        if self.count % self.groups or self.active_groups > self.groups:
            raise ValueError(
                f"groups must divide count = {self.count} and be at least active_groups = {self.active_groups}, got "
                f"{self.groups}"
            )


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """DeepSeek's multi-head latent attention (arXiv 2412.19437, section 2.1.1).

    Keys and values of all heads are made from one vector of ``kv_rank`` per token, queries from one of ``query_rank``
    (0: from the hidden state). Of each query and key ``nope_dim`` elements are not rotated and ``rope_dim`` are; the
    rotated part of the key is shared by all heads. A value has ``value_dim`` elements.
    """

    query_rank: int = 0
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        within("query_rank", self.query_rank, 0)
        for field in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            within(field, getattr(self, field), 1)

    @property
    def query_dim(self) -> int:
        """Elements of one head's query."""
        return self.nope_dim + self.rope_dim


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Dimensions of a decoder. Without the optional fields it is a Llama, which refshard can train.

    ``params`` is the exact number of parameters, a tied embedding counted once. ``source`` says where the numbers
    come from.

    - ``head_dim`` is the width of a head; 0 stands for ``dim / n_heads``, and the spec then holds that value.
    - ``query_norm``: queries and keys are normed by head (Qwen 3, Gemma 3). ``extra_norms``: attention and
      feed-forward are normed after as well as before (Gemma 3).
    - ``gated``: the feed-forward has three products (SwiGLU, GeGLU), otherwise two (GPT, MPT, Nemotron).
    - ``norm_biases``: norms have biases (Nemotron). ``biased``: norms and products have (GPT-3), not the head's.
    - ``positions``: rows of a learned position embedding; 0 for rotary positions. Where there are any, ``rope_theta``
      means nothing.
    - ``yarn``: rotary positions are stretched by YaRN (arXiv 2309.00071), and queries and keys scaled with it.
    - ``window``: a token attends to this many tokens, itself included (0: to all before it), except in each
      ``global_every``-th layer (0: in none).
    - ``experts`` and ``latent``: a mixture of experts, and latent attention.
    - ``vectors``: elements of further vectors in each layer: biases of queries, keys and values (Qwen 2), attention's
      sinks (gpt-oss), norms of whole queries and keys in place of each head's (OLMo 2).
    - ``other_rotations``: positions are rotated otherwise than a Llama's, which is not described here: only a part of
      each head (GLM) or in some layers (SmolLM 3). Parameters and FLOPs are the same.
    - ``predictions``: modules of multi-token prediction. Each is one of the last layers, with a projection of two
      hidden states to one, and goes through the embedding and the head, too (arXiv 2412.19437, section 2.2).
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    params: int
    source: str
    rope_scaling: RopeScaling | None = None
    head_dim: int = 0
    query_norm: bool = False
    extra_norms: bool = False
    gated: bool = True
    norm_biases: bool = False
    biased: bool = False
    positions: int = 0
    yarn: bool = False
    window: int = 0
    global_every: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    vectors: int = 0
    other_rotations: bool = False
    predictions: int = 0

    def __post_init__(self) -> None:
        for field in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab", "params"):
            within(field, getattr(self, field), 1)
        for field in ("head_dim", "positions", "window", "global_every", "vectors", "predictions"):
            within(field, getattr(self, field), 0)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads = {self.n_heads}, got {self.n_kv_heads}")
        self._set_head_dim()
        if self.global_every and not self.window:
            raise ValueError(f"global_every must be 0 without a window, got {self.global_every}; add the window")
        if self.experts is not None and self.experts.dense_layers >= self.n_layers:
            raise ValueError(
                f"experts.dense_layers must be < n_layers = {self.n_layers}, got {self.experts.dense_layers}"
            )

    def _set_head_dim(self) -> None:
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.head_dim == 0 and (self.dim % self.n_heads or (self.dim // self.n_heads) % 2):
            raise ValueError(
                f"dim must be n_heads times an even head dimension, got dim = {self.dim}, n_heads = {self.n_heads}"
            )
        elif self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        width = self.latent.query_dim if self.latent is not None else self.dim // self.n_heads
        msgspec.structs.force_setattr(self, "head_dim", self.head_dim or width)

    def _check_latent(self, latent: LatentAttention) -> None:
        if self.head_dim not in (0, latent.query_dim):
            raise ValueError(
                f"head_dim must be latent's nope_dim + rope_dim = {latent.query_dim}, got {self.head_dim}; leave it out"
            )
        if self.n_kv_heads != self.n_heads:
            raise ValueError(f"n_kv_heads must be n_heads = {self.n_heads} with latent, got {self.n_kv_heads}")
        if self.query_norm or self.biased or self.norm_biases:
            raise ValueError("query_norm, biased and norm_biases must be false with latent, got true; leave them out")

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return 0 if self.experts is None else (self.n_layers - self.experts.dense_layers) // self.experts.every

    @property
    def global_layers(self) -> int:
        """How many layers attend to every token before."""
        if not self.window:
            return self.n_layers
        return self.n_layers // self.global_every if self.global_every else 0

    def reduced(self, layers: int) -> "ModelSpec":
        """A model of the same shape that is small: no more than ``layers`` layers, heads of 16, as many heads, and a
        vocabulary of 2,048.

        Raises:
            SpecError: it is not one that refshard trains.
        """
        check_trainable(self)
        n_layers, head_dim, vocab = min(self.n_layers, layers), min(self.head_dim, 16), min(self.vocab, 2048)
        dim = self.n_heads * head_dim
        ffn_dim = -(-self.ffn_dim * dim // self.dim // 64) * 64
        changes = {"dim": dim, "n_layers": n_layers, "ffn_dim": ffn_dim, "vocab": vocab, "head_dim": head_dim}
        small = msgspec.structs.replace(self, source=f"reduced from: {self.source}", **changes)
        return msgspec.structs.replace(small, params=parameter_count(small))


def parameter_count(model: ModelSpec) -> int:
    """Number of parameters in closed form, a tied embedding counted once.

    What no gradient trains is not counted: DeepSeek's correction of the router's scores, ``experts.count`` numbers a
    layer.
    """
    return _parameters(model, experts=0 if model.experts is None else model.experts.count)


def active_parameter_count(model: ModelSpec) -> int:
    """Number of parameters that one token uses: only the experts that its router picks, and the shared one.

    All rows of the embeddings and all of each router count, as in published figures.
    """
    return _parameters(model, experts=0 if model.experts is None else model.experts.active)


def position_parameters(model: ModelSpec) -> int:
    """Number of parameters of a learned position embedding."""
    return model.positions * model.dim


def prediction_parameters(model: ModelSpec) -> int:
    """Number of parameters that modules of multi-token prediction have besides their layer: a projection of two hidden
    states to one, a norm of each, and one before the head.
    """
    return model.predictions * (2 * model.dim**2 + 3 * model.dim)


def _parameters(model: ModelSpec, experts: int) -> int:
    norm = model.dim * (2 if model.biased or model.norm_biases else 1)
    norms = (4 if model.extra_norms else 2) * norm + (2 * model.head_dim if model.query_norm else 0)
    dense_layers = model.n_layers - model.expert_layers
    blocks = model.n_layers * (_attention_parameters(model) + norms + model.vectors)
    blocks += dense_layers * _feed_forward_parameters(model, model.ffn_dim, model.biased)
    if model.experts is not None:
        of_experts = _feed_forward_parameters(model, model.experts.ffn_dim, model.biased or model.experts.biased)
        mixed = experts * of_experts + model.experts.count * model.dim
        if model.experts.shared_ffn_dim:
            mixed += _feed_forward_parameters(model, model.experts.shared_ffn_dim, model.biased)
        blocks += model.expert_layers * mixed
    embeddings = model.vocab * model.dim * (1 if model.tied else 2)
    return blocks + embeddings + position_parameters(model) + norm + prediction_parameters(model)


def _attention_parameters(model: ModelSpec) -> int:
    if (latent := model.latent) is not None:
        queries = model.n_heads * latent.query_dim
        made = model.dim * queries
        if rank := latent.query_rank:
            made = model.dim * rank + rank + rank * queries
        compressed = model.dim * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        expanded = latent.kv_rank * model.n_heads * (latent.nope_dim + latent.value_dim)
        return made + compressed + expanded + model.n_heads * latent.value_dim * model.dim
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    biases = queries + 2 * keys + model.dim if model.biased else 0
    return 2 * model.dim * (queries + keys) + biases


def _feed_forward_parameters(model: ModelSpec, width: int, biased: bool) -> int:
    inward = 2 if model.gated else 1
    biases = inward * width + model.dim if biased else 0
    return (inward + 1) * model.dim * width + biases


_BEYOND_LLAMA = {
    "experts": "absent", "latent": "absent", "extra_norms": "false", "gated": "true", "norm_biases": "false",
    "biased": "false", "positions": "0 (rotary)", "window": "0", "global_every": "0", "query_norm": "false",
    "head_dim": "dim / n_heads", "vectors": "0", "other_rotations": "false", "predictions": "0", "yarn": "false",
}  # fmt: skip
"""What a Llama has in each optional field, in words."""
TRAINED = ("head_dim", "query_norm")
"""The optional fields that refshard's own module implements."""
CLOSED_FORM = "closed form only: refshard plan"
"""The remedy where a model cannot be built."""


def makes_scores(model: ModelSpec, *, fp32: bool, device: str) -> bool:
    """Whether attention makes every score. No fused kernel of CUDA takes grouped heads in fp32, so torch multiplies
    (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, torch 2.13).
    """
    return fp32 and device == "cuda" and model.n_kv_heads < model.n_heads


def beyond_llama(model: ModelSpec, allowed: Sequence[str] = ()) -> str | None:
    """The first optional field, except those ``allowed``, in which ``model`` differs from a Llama; None if in none."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelSpec)}
    for field in _BEYOND_LLAMA:
        plain = model.dim == model.n_heads * model.head_dim if field == "head_dim" else None
        same = plain if plain is not None else getattr(model, field) == defaults[field]
        if not same and field not in allowed:
            return field
    return None


def check_llama(model: ModelSpec, what: str, allowed: Sequence[str] = (), *, remedy: str = CLOSED_FORM) -> None:
    """Check that ``model`` is a Llama, except in fields that are ``allowed``; ``what`` needs one.

    Raises:
        SpecError: it is not; the message names the field, its value and the ``remedy``.
    """
    if (field := beyond_llama(model, allowed)) is not None:
        value = getattr(model, field)
        shown = str(value).lower() if isinstance(value, bool | int) else "a table"
        raise SpecError(f"model: {field} must be {_BEYOND_LLAMA[field]} for {what}, got {shown}; {remedy}")


def check_trainable(model: ModelSpec) -> None:
    """Check that refshard's own module implements ``model``.

    Raises:
        SpecError: it does not; the message names the field.
    """
    check_llama(model, "training", TRAINED)


def is_factory(name: str) -> bool:
    """Whether a model's name is that of a factory.

    >>> is_factory("mypackage.models:build"), is_factory("llama3-8b"), is_factory("odd:name.toml")
    (True, False, False)
    >>> is_factory("hf:here")
    False
    """
    return model_file(name) is None and _FACTORY.fullmatch(name) is not None


def model_file(name: str) -> Path | None:
    """The file that a model's name stands for, relative to the current folder; None for a preset and a factory."""
    if name.startswith(_HF):
        path = Path(name.removeprefix(_HF))
        return path / CONFIG if path.is_dir() else path
    if name.endswith((".toml", ".json")):
        return Path(name)
    if name not in resources.model_profiles() and (config := Path(name) / CONFIG).is_file():
        return config
    return None


def model_name(given: str) -> str:
    """The name of the preset called ``given``, which may be an alias, another spelling or an id on Hugging Face; the
    names of files and factories, and unknown ones, are their own.

    >>> model_name("meta-llama/Llama-3.2-3B-Instruct"), model_name("LLAMA3-8b"), model_name("my/model.toml")
    ('llama3.2-3b', 'llama3-8b', 'my/model.toml')
    """
    presets = resources.model_profiles()
    if given in presets or model_file(given) is not None or is_factory(given):
        return given
    return profile_called("models", given, presets) or given


def known_dimensions(name: str) -> ModelSpec | None:
    """As :func:`load_model`; None for a factory: its module need not be a Llama.

    Raises:
        SpecError: see :func:`load_model`.
    """
    return None if is_factory(name) else load_model(name)


def load_model(name: str) -> ModelSpec:
    """Read the model preset ``name`` from ``profiles/models/``, or the file that the name stands for.

    Raises:
        SpecError: there is no such preset, the file breaks the schema, or the name is a factory's.
    """
    path = model_file(name)
    if path is not None and (path.suffix == ".json" or name.startswith(_HF)):
        spec = convert({**read_config(path), "params": 1}, ModelSpec, where=str(path))
        return msgspec.structs.replace(spec, params=parameter_count(spec))
    if path is not None:
        return convert(read_toml(path), ModelSpec, where=f"model {name}")
    if is_factory(name):
        raise SpecError(
            f"model: closed forms need the dimensions of a Llama, got the factory '{name}'; dry-run it instead: "
            f"refshard dryrun --cluster NAME --model {name} --strategy fsdp2"
        )
    presets, name = resources.model_profiles(), model_name(name)
    if name not in presets:
        raise SpecError(f"model: no preset '{name}'; {closest('models', [(name, '{}')], presets)}")
    return convert(read_toml(presets[name]), ModelSpec, where=f"model {name}")
