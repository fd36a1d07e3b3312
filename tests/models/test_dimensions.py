"""Dimensions read off a factory's module: exact, or refused with the rule, the value and the remedy."""

import re
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from refshard.errors import SpecError
from refshard.models.dimensions import REMEDY, read_dimensions
from refshard.models.llama import Llama
from refshard.specs.model import Experts, ModelSpec, load_model, parameter_count

HERE = __name__
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MADE: dict[str, Any] = {}
"""What the factory :func:`made` returns, or a function that does."""


def made() -> Any:
    found = MADE["made"]
    return found() if callable(found) and not isinstance(found, nn.Module) else found


def read(factory: Any) -> ModelSpec:
    MADE["made"] = factory
    return read_dimensions(f"{HERE}:made")


class Heads:
    """A configuration as a plain object."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update({"num_attention_heads": 4, **fields})


class Attention(nn.Module):
    """Keys and values of ``kv`` elements each come from one product; heads are normed if ``norms``, their width."""

    def __init__(self, dim: int, kv: int, bias: bool, norms: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.key_value = nn.Linear(dim, 2 * kv, bias=bias)
        self.norms = nn.ModuleList(nn.RMSNorm(norms) for _ in range(2 if norms else 0))


class Block(nn.Module):
    """One layer."""

    def __init__(
        self, dim: int, ffn: int, *, gated: bool, kv: int, bias: bool, norms: int, after: bool, layer_norm: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self.after = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 if after else 0))
        self.attention_norm = nn.LayerNorm(dim) if layer_norm else nn.RMSNorm(dim)
        self.attention = Attention(dim, kv, bias, norms)
        self.norm = nn.LayerNorm(dim) if layer_norm else nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, ffn, bias=bias), nn.Linear(ffn, dim, bias=bias)
        if gated:
            self.gate = nn.Linear(dim, ffn, bias=bias)


class Decoder(nn.Module):
    """A decoder of one's own: no ``spec``, and a ``config`` of no known family."""

    def __init__(
        self, *, dim: int = 64, ffn: int = 160, vocab: int = 500, layers: int = 3, gated: bool = True, kv: int = 32,
        bias: bool = False, norms: int = 0, positions: int = 0, tied: bool = False, head: bool = True,
        after: bool = False, layer_norm: bool = False, **config: Any
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = Heads(**config)
        self.words = nn.Embedding(vocab, dim)
        if positions:
            self.places = nn.Embedding(positions, dim)
        self.layers = nn.ModuleList(
            Block(dim, ffn, gated=gated, kv=kv, bias=bias, norms=norms, after=after, layer_norm=bias or layer_norm)
            for _ in range(layers)
        )  # fmt: skip
        self.last = nn.LayerNorm(dim) if bias or layer_norm else nn.RMSNorm(dim)
        if head:
            self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize(
    "preset",
    ["llama3-8b", "llama3.2-1b", "llama3.1-405b", "qwen3-8b"],
)
def test_this_projects_own_module_has_its_spec(preset: str) -> None:
    spec = load_model(preset)
    assert read(lambda: Llama(spec)) == spec


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"gated": False, "layers": 1, "vocab": 123}, {"gated": False, "n_layers": 1, "vocab": 123}),
        ({"kv": 64}, {"n_kv_heads": 4}),
        ({"tied": True}, {"tied": True}),
        ({"bias": True, "gated": False, "positions": 40}, {"biased": True, "gated": False, "positions": 40}),
        ({"norms": 16}, {"query_norm": True}),
        ({"after": True}, {"extra_norms": True}),
        ({"layer_norm": True}, {"norm_biases": True}),
        ({"num_attention_heads": 8, "kv": 16}, {"n_heads": 8, "head_dim": 8}),
        ({"norm_eps": 1e-5, "rope_theta": 7}, {"norm_eps": 1e-5, "rope_theta": 7.0}),
    ],
)
def test_a_decoder_of_ones_own_is_read_off_its_shapes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    base = {
        "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 160, "vocab": 500,
        "norm_eps": 1e-6, "rope_theta": 10000.0, "tied": False, "source": f"the factory {HERE}:made", "params": 1,
    }  # fmt: skip
    spec = ModelSpec(**{**base, **expected})
    counted = sum(p.numel() for p in Decoder(**fields).parameters())
    assert parameter_count(spec) == counted
    assert read(lambda: Decoder(**fields)) == msgspec.structs.replace(spec, params=counted)


def families() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """By name: the class of transformers, what its configuration has more, and what its spec has more."""
    mixed = {"experts": Experts(count=8, active=2, ffn_dim=160)}
    return {
        "Llama": ("LlamaForCausalLM", {}, {}),
        "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}, {"head_dim": 32, "query_norm": True}),
        "Mixtral": ("MixtralForCausalLM", {"rope_theta": 1e4}, mixed),
        "Qwen3Moe": (
            "Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            {"query_norm": True, "experts": Experts(count=4, active=2, ffn_dim=32)},
        ),
        "Gemma3Text": (
            "Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 128},
            {"query_norm": True, "extra_norms": True, "tied": True, "window": 128, "rope_theta": 1e6},
        ),
        "Gemma": ("GemmaForCausalLM", {"head_dim": 32}, {"head_dim": 32, "tied": True}),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families()))
def test_models_of_transformers_are_read_off_their_configurations(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, config, more = families()[family]
    fields = {**SIZES, **config}
    if family == "Mixtral":
        fields = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

    def build() -> Any:
        print("a factory may print")
        return getattr(transformers, model)(getattr(transformers, f"{family}Config")(**fields)), lambda *_: {}

    spec = read(build)
    base = {
        "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 160, "vocab": 1000, "norm_eps": 1e-6,
        "rope_theta": 1e4, "tied": False, "params": spec.params, "source": spec.source,
    }  # fmt: skip
    assert msgspec.structs.replace(spec, norm_eps=1e-6) == ModelSpec(**{**base, **more})
    assert spec.params == parameter_count(spec) == sum(p.numel() for p in build()[0].parameters())


def test_a_wrapper_that_adds_the_loss_is_looked_into() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Llama(load_model("llama-tiny"))

    assert read(Loss) == load_model("llama-tiny")


def test_what_a_factory_prints_does_not_reach_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> nn.Module:
        print("noise")
        return Decoder()

    read(build)
    assert capsys.readouterr() == ("", "noise\n")


def test_a_model_of_any_size_takes_no_memory() -> None:
    """405B parameters in fp32 would be 1.6 TB."""
    assert read(lambda: Llama(load_model("llama3.1-405b"))).params == load_model("llama3.1-405b").params


class Odd(nn.Module):
    """Three attention matrices that no spec knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()
        self.more = nn.Linear(3, 3)


def frozen() -> nn.Module:
    module = Decoder()
    module.head.weight.requires_grad_(False)
    return module


def transformed(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Odd, r"dimensions read from the module \(3 layers of width 64, 4 heads of .* must give its [\d,]+ par"),
        (frozen, "every parameter must be trained, got 1 that are frozen"),
        (lambda: 7, r"the factory must return a module, or \(module, batch\), got int"),
        (lambda: torch.ones(1).item(), r"must run on the meta device, got RuntimeError: Tensor\.item\(\) cannot be"),
        (lambda: nn.Linear(3, 3), "blocks must be in an nn.ModuleList and have the same parameter shapes, got none"),
        (lambda: Decoder(head=False), "an nn.Linear with as many outputs as the .* got none"),
        (lambda: Decoder(num_attention_heads=None), "a config with num_attention_heads, got no config"),
        (lambda: Decoder(sliding_window=9), "sliding_window of its config must be absent, .* not show it, got 9"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2), "an nn.Embedding, and"),
        (lambda: Decoder(num_attention_heads=7), "n_heads"),
    ],
)  # fmt: skip
def test_what_is_no_decoder_that_can_be_recognised_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        read(factory)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("GPTNeoX", {}, r"must give its [\d,]+ parameters, got [\d,]+; give the dimensions in"),
        ("Llama", {"attention_bias": True}, "attention_bias must be false, got True"),
        ("Cohere2", {}, "sliding_window of its config must be absent, because parameter shapes do not show it"),
    ],
)  # fmt: skip
def test_what_a_spec_cannot_express_is_refused(family: str, config: dict[str, Any], message: str) -> None:
    """Norms that run beside each other, biases, and a window that the shapes do not show."""
    with pytest.raises(SpecError, match=message) as refused:
        read(transformed(family, **config))
    assert str(refused.value).endswith(REMEDY)


@pytest.mark.slow
def test_a_backbone_without_a_head_is_not_taken_for_a_tied_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    with pytest.raises(SpecError, match=re.escape("an nn.Linear with as many outputs")):
        read(lambda: transformers.LlamaModel(config))


def test_the_factory_runs_on_the_meta_device() -> None:
    devices = []

    def build() -> nn.Module:
        module = Decoder()
        devices.append(module.head.weight.device.type)
        return module

    read(build)
    assert devices == ["meta"]
