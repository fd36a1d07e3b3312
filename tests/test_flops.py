"""FLOPs conventions against torch's own counter and the published figures."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from refshard import flops
from refshard.errors import SpecError
from refshard.measure.trainer import freeze
from refshard.models.llama import Llama, next_token_loss
from refshard.specs.model import Experts, LatentAttention, ModelSpec, load_model
from refshard.specs.tuning import PROJECTIONS, Lora, frozen_of
from tests.models import small_spec

SPECS = {
    "plain": small_spec(),
    "grouped": small_spec(n_kv_heads=2),
    "tied": small_spec(n_kv_heads=2, tied=True),
    "wide heads": small_spec(n_kv_heads=2, head_dim=32),
    "normed queries": small_spec(n_kv_heads=2, query_norm=True),
}


def norm_weights(spec: ModelSpec) -> int:
    """Parameters that take part in no matrix product."""
    return (2 * spec.n_layers + 1) * spec.dim + 2 * spec.n_layers * spec.head_dim * spec.query_norm


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_convention_a_less_the_norms_is_what_torch_counts(spec: ModelSpec) -> None:
    batch, seq_len = 2, 32
    with torch.device("meta"):
        model = Llama(spec)
        tokens_BT = torch.zeros(batch, seq_len, dtype=torch.int64)
    # The math backend is made of matrix products that the counter sees, and recomputes nothing in backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BT), tokens_BT).backward()
    exact = flops.flops_per_token(spec, seq_len, "A") - 6 * norm_weights(spec)
    assert counter.get_total_flops() == exact * batch * seq_len


@pytest.mark.parametrize("parts", ["embedding", "head", "first-1", "first-2,head"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_backward_computes_nothing_for_frozen_parts(spec: ModelSpec, parts: str) -> None:
    batch, seq_len, frozen = 2, 32, frozen_of(parts)
    with torch.device("meta"):
        model = Llama(spec)
        tokens_BT = torch.zeros(batch, seq_len, dtype=torch.int64)
    freeze(model, frozen)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BT), tokens_BT).backward()
    of_layers = frozen.layers * (norm_weights(spec) - spec.dim) // spec.n_layers
    exact = flops.flops_per_token(spec, seq_len, "A", frozen=frozen) - 6 * norm_weights(spec) + 4 * of_layers
    assert counter.get_total_flops() == exact * batch * seq_len


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_convention_a_of_inference_less_the_norms_is_what_torch_counts_in_forward(spec: ModelSpec) -> None:
    batch, seq_len = 2, 32
    with torch.device("meta"):
        model = Llama(spec)
        tokens_BT = torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        next_token_loss(model(tokens_BT), tokens_BT)
    exact = flops.flops_per_token(spec, seq_len, "A", "inference") - 2 * norm_weights(spec)
    assert counter.get_total_flops() == exact * batch * seq_len


@pytest.mark.slow
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4, projections=PROJECTIONS[:4])], ids=["all", "attention"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_of_tuning_by_adapters_frozen_weights_have_no_gradients(spec: ModelSpec, lora: Lora) -> None:
    """But for the queries, keys and values of the first block, whose input needs no gradient: torch counts less."""
    pytest.importorskip("peft", reason="adapters need the extra 'peers'")
    from refshard.models.adapters import adapt, switch_dropout

    batch, seq_len, rank = 2, 32, lora.rank
    model = Llama(spec)
    adapt(model, lora, 0)
    switch_dropout(model, on=False)
    assert flops.adapter_count(spec, lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens_BT = torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BT), tokens_BT).backward()
    outputs = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    unneeded = 2 * outputs * spec.dim + 3 * 2 * rank * spec.dim
    exact = flops.flops_per_token(spec, seq_len, "A", lora=lora) - 4 * norm_weights(spec) - unneeded
    assert counter.get_total_flops() == exact * batch * seq_len


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_conventions_differ_by_the_embedding_and_the_causal_half(spec: ModelSpec) -> None:
    a, b, c = (flops.flops_per_token(spec, 512, convention) for convention in ("A", "B", "C"))
    assert b - a == (0 if spec.tied else 6 * spec.vocab * spec.dim)
    assert a - c == 6 * spec.n_layers * spec.n_heads * spec.head_dim * 512


# torchtitan's 6 (N - E) + 12 L d T, worked out from each model's published dimensions.
CONVENTION_A_AT_8192 = {
    "llama3-8b": 57_914_449_920,
    "llama3-70b": 481_442_709_504,
    "llama3.1-405b": 2_625_449_459_712,
    "llama3.2-3b": 27_732_215_808,
}


@pytest.mark.parametrize("name", CONVENTION_A_AT_8192)
def test_convention_a_is_torchtitans(name: str) -> None:
    assert flops.flops_per_token(load_model(name), 8192, "A") == CONVENTION_A_AT_8192[name]


@pytest.mark.parametrize(("name", "exact"), [("llama3-8b", 57_912_852_480), ("llama3-70b", 481_434_796_032)])
def test_convention_a_counts_norms_as_matrices(name: str, exact: int) -> None:
    spec = load_model(name)
    assert flops.flops_per_token(spec, 8192, "A") - 6 * norm_weights(spec) == exact


LATENT = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12)
FAMILIES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    # Every token picks all experts, so that it does not matter which tokens an expert sees.
    "qwen3_moe": (
        small_spec(query_norm=True, head_dim=32, experts=Experts(count=4, active=4, ffn_dim=32)),
        {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    ),
    "deepseek_v3": (
        small_spec(latent=LATENT, experts=Experts(count=4, active=4, ffn_dim=32, shared_ffn_dim=64, dense_layers=1)),
        {
            "n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
        },
    ),
    "gpt2": (
        small_spec(gated=False, biased=True, positions=64, tied=True),
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 64},
    ),
    "nemotron": (small_spec(gated=False, norm_biases=True), {}),
    "gemma3_text": (
        small_spec(query_norm=True, extra_norms=True, tied=True, head_dim=32), {"query_pre_attn_scalar": 32},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_convention_a_less_what_is_no_product_is_what_torch_counts(family: str) -> None:
    """In transformers' own module of a family, whose parameters are also as many as the spec says."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'peers'")
    spec, fields = FAMILIES[family]
    same = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 96, "vocab_size": 256, "tie_word_embeddings": spec.tied, "head_dim": spec.head_dim,
    }  # fmt: skip
    own = {"vocab_size", "tie_word_embeddings"} if family == "gpt2" else set(same)
    if family == "deepseek_v3":
        own = own - {"head_dim"}
    config = transformers.AutoConfig.for_model(family, **{name: same[name] for name in own}, **fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    batch, seq_len = 2, 32
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.params
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, seq_len, dtype=torch.int64), use_cache=False)
    no_products = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    exact = flops.flops_per_token(spec, seq_len, "A", "inference") - 2 * no_products
    # transformers multiplies positions by frequencies in a product.
    assert counter.get_total_flops() == pytest.approx(exact * batch * seq_len, rel=2e-4)


def test_a_token_pays_for_the_experts_that_it_uses() -> None:
    """What torchtitan counts for its deepseek_v3 671B: 6 (N active - E) + 6 L H (192 + 128) T."""
    spec = load_model("deepseek-v3")
    by_hand = 6 * (37_552_282_624 - 129_280 * 7168) + 6 * 61 * 128 * (192 + 128) * 4096
    assert flops.flops_per_token(spec, 4096, "A") == by_hand
    # Megatron's: attention's causal half, and no router (256 x 7168 in 58 layers).
    assert flops.flops_per_token(spec, 4096, "C") == by_hand - 3 * 61 * 128 * (192 + 128) * 4096


@pytest.mark.parametrize(("seq_len", "mean_keys"), [(16, 8), (64, 16 * (1 - 16 / 128)), (4096, 16 * (1 - 16 / 8192))])
def test_a_window_bounds_what_a_token_attends_to(seq_len: int, mean_keys: float) -> None:
    spec = small_spec(n_layers=6, window=16, global_every=6)
    full = small_spec(n_layers=6)
    per_key = 12 * spec.n_heads * spec.head_dim
    count = flops.attention_flops_per_token
    assert count(spec, seq_len) == per_key * (seq_len + 5 * min(16, seq_len))
    assert count(spec, seq_len, causal_half=True) == per_key * (seq_len / 2 + 5 * mean_keys)
    assert flops.flops_per_token(full, seq_len, "A") - flops.flops_per_token(spec, seq_len, "A") == per_key * 5 * (
        seq_len - min(16, seq_len)
    )


def test_positions_are_looked_up() -> None:
    spec, plain = small_spec(positions=64), small_spec()
    counts = {c: flops.flops_per_token(spec, 32, c) - flops.flops_per_token(plain, 32, c) for c in ("A", "B", "C")}
    assert counts == {"A": 0, "B": 6 * 64 * 64, "C": 0}


def test_adapters_are_of_layers_that_the_blocks_have() -> None:
    with pytest.raises(
        SpecError, match=r"lora_targets: adapters of this model are known for .*, got gate_proj; choose"
    ):
        flops.flops_per_token(small_spec(gated=False), 32, lora=Lora())
