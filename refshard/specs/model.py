"""The dimensions of a Llama-family model, and the presets that ship with refshard."""

from pathlib import Path

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.reading import convert, read_toml, within


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
        layer = 2 * dim * (dim + self.n_kv_heads * head_dim) + 3 * dim * ffn_dim + 2 * dim
        params = vocab * dim * (1 if self.tied else 2) + n_layers * layer + dim
        changes = {"dim": dim, "n_layers": n_layers, "ffn_dim": ffn_dim, "vocab": vocab, "params": params}
        return msgspec.structs.replace(self, source=f"reduced from: {self.source}", **changes)


def load_model(name: str) -> ModelSpec:
    """Read the model preset ``name`` from ``profiles/models/``, or a file of that name that ends in ``.toml``.

    Raises:
        SpecError: there is no such preset, or the file breaks the schema.
    """
    presets = resources.model_profiles()
    if name.endswith(".toml"):
        return convert(read_toml(Path(name)), ModelSpec, where=f"model {name}")
    if name not in presets:
        raise SpecError(f"model: no preset '{name}'; {nearest(name, list(presets))}")
    return convert(read_toml(presets[name]), ModelSpec, where=f"model {name}")
