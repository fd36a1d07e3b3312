"""FLOPs conventions against torch's own counter and the published figures."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from refshard import flops
from refshard.models.llama import Llama, next_token_loss
from refshard.specs.model import ModelSpec, load_model
from refshard.specs.tuning import LORA
from tests.models import small_spec

SPECS = {
    "plain": small_spec(),
    "grouped": small_spec(n_kv_heads=2),
    "tied": small_spec(n_kv_heads=2, tied=True),
}


def norm_weights(spec: ModelSpec) -> int:
    """Parameters that take part in no matrix product."""
    return (2 * spec.n_layers + 1) * spec.dim


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


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_of_tuning_by_adapters_frozen_weights_have_no_gradients(spec: ModelSpec) -> None:
    """But for the queries, keys and values of the first block, whose input needs no gradient: torch counts less."""
    pytest.importorskip("peft", reason="adapters need the extra 'peers'")
    from refshard.models.adapters import adapt, switch_dropout

    batch, seq_len, rank = 2, 32, LORA.rank
    model = Llama(spec)
    adapt(model, 0)
    switch_dropout(model, on=False)
    assert flops.adapter_count(spec) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens_BT = torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BT), tokens_BT).backward()
    outputs = spec.dim + 2 * spec.n_kv_heads * spec.head_dim
    unneeded = 2 * outputs * spec.dim + 3 * 2 * rank * spec.dim
    exact = flops.flops_per_token(spec, seq_len, "A", tuning="lora") - 4 * norm_weights(spec) - unneeded
    assert counter.get_total_flops() == exact * batch * seq_len


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_conventions_differ_by_the_embedding_and_the_causal_half(spec: ModelSpec) -> None:
    a, b, c = (flops.flops_per_token(spec, 512, convention) for convention in ("A", "B", "C"))
    assert b - a == (0 if spec.tied else 6 * spec.vocab * spec.dim)
    assert a - c == 6 * spec.n_layers * spec.dim * 512


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
