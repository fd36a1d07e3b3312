"""The dimensions of a Llama-family model, the presets that ship with refshard, and what else a model's name can mean.

A name is a preset's, a TOML file's, that of a Hugging Face ``config.json`` or of the folder that holds it, or a factory
``package.module:function``, which makes a module of the user's own.
"""

import re
from pathlib import Path

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.hf_config import CONFIG, read_config
from refshard.specs.reading import convert, read_toml, within

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Llama 3.1's stretching of RoPE wavelengths (source: the ``rope_scaling`` of each model's published config).

    Wavelengths over ``original_context / low_freq_factor`` tokens are divided by ``factor``, those under
    ``original_context / high_freq_factor`` stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of a Llama-family model.

    ``params`` is the exact number of parameters, a tied embedding counted once. ``source`` says where the numbers
    come from.
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

    def __post_init__(self) -> None:
        for field in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab", "params"):
            within(field, getattr(self, field), 1)
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(
                f"dim must be n_heads times an even head dimension, got dim = {self.dim}, n_heads = {self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads = {self.n_heads}, got {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    def reduced(self, layers: int) -> "ModelSpec":
        """A model of the same shape that is small: no more than ``layers`` layers, heads of 16, as many heads, and a
        vocabulary of 2,048.
        """
        n_layers, head_dim, vocab = min(self.n_layers, layers), min(self.head_dim, 16), min(self.vocab, 2048)
        dim = self.n_heads * head_dim
        ffn_dim = -(-self.ffn_dim * dim // self.dim // 64) * 64
        changes = {"dim": dim, "n_layers": n_layers, "ffn_dim": ffn_dim, "vocab": vocab}
        small = msgspec.structs.replace(self, source=f"reduced from: {self.source}", **changes)
        return msgspec.structs.replace(small, params=parameter_count(small))


def parameter_count(model: ModelSpec) -> int:
    """Number of parameters in closed form, a tied embedding counted once."""
    attention = 2 * model.dim * model.dim + 2 * model.dim * model.n_kv_heads * model.head_dim
    block = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    embeddings = model.vocab * model.dim * (1 if model.tied else 2)
    return model.n_layers * block + embeddings + model.dim


def is_factory(name: str) -> bool:
    """Whether a model's name is that of a factory.

    >>> is_factory("mypackage.models:build"), is_factory("llama3-8b"), is_factory("odd:name.toml")
    (True, False, False)
    """
    return model_file(name) is None and _FACTORY.fullmatch(name) is not None


def model_file(name: str) -> Path | None:
    """The file that a model's name stands for, relative to the current folder; None for a preset and a factory."""
    if name.endswith((".toml", ".json")):
        return Path(name)
    if name not in resources.model_profiles() and (config := Path(name) / CONFIG).is_file():
        return config
    return None


def known_dimensions(name: str) -> ModelSpec | None:
    """As :func:`load_model`; None for a factory, whose module need not be a Llama.

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
    if path is not None and path.suffix == ".json":
        spec = convert({**read_config(path), "params": 1}, ModelSpec, where=str(path))
        return msgspec.structs.replace(spec, params=parameter_count(spec))
    if path is not None:
        return convert(read_toml(path), ModelSpec, where=f"model {name}")
    if is_factory(name):
        raise SpecError(
            f"model: closed forms need the dimensions of a Llama, got the factory '{name}'; dry-run it instead: "
            f"refshard dryrun --cluster NAME --model {name} --strategy fsdp2"
        )
    presets = resources.model_profiles()
    if name not in presets:
        raise SpecError(f"model: no preset '{name}'; {nearest(name, list(presets))}")
    return convert(read_toml(presets[name]), ModelSpec, where=f"model {name}")
