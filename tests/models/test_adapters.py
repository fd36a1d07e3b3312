"""Adapters that start alike everywhere, and 4-bit layers."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.specs.layers import checkpointing_of
from refshard.specs.tuning import Lora
from tests.models import small_spec

pytestmark = [
    pytest.mark.skipif(find_spec(package) is None, reason=f"{package} comes with the extra 'peers'")
    for package in ("peft", "bitsandbytes")
] + [pytest.mark.processes]  # they take seconds to import

TOKENS = torch.arange(48).view(4, 12) * 7 % 100


def make(*, four_bits: bool = False, seed: int = 0) -> Llama:
    from refshard.models.adapters import adapt, switch_dropout
    from refshard.models.nf4 import quantise

    model = Llama(small_spec(n_layers=2))
    initialise(model, seed)
    if four_bits:
        quantise(model)
    adapt(model, Lora(), seed)
    switch_dropout(model, on=False)
    return model


def step(model: Llama) -> torch.Tensor:
    loss = next_token_loss(model(TOKENS), TOKENS)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4, projections=("q_proj", "down_proj"))], ids=["all", "some"])
def test_adapters_alone_are_trained_on_the_linear_layers_that_are_named(lora: Lora) -> None:
    from refshard.models.adapters import adapt, adapter_layers

    model = Llama(small_spec(n_layers=2))
    initialise(model, 0)
    state = torch.random.get_rng_state()
    adapt(model, lora, 0)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator stays where it was"
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(lora.projections)
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert all(any(f".{one}." in name for one in lora.projections) for name in trained)
    assert len(adapter_layers(model)) == 2 * len(lora.projections)
    step(model)
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_adapters_start_as_their_names_and_the_seed_say_and_change_nothing_yet() -> None:
    bare = Llama(small_spec(n_layers=2))
    initialise(bare, 0)
    one, same, other = make(), make(), make(seed=1)
    assert torch.equal(one(TOKENS), bare(TOKENS))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if ".lora_A." in name:
            assert not torch.equal(parameter, other.get_parameter(name))
            assert 0 < parameter.abs().max() <= parameter.shape[1] ** -0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_mean_what_bitsandbytes_says_forward_and_backward(dtype: torch.dtype) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from refshard.models.nf4 import Nf4Linear

    torch.manual_seed(0)
    weight, x = torch.randn(96, 64, dtype=dtype), torch.randn(5, 64, dtype=dtype, requires_grad=True)
    codes, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    meant = dequantize_4bit(codes, state)
    layer = Nf4Linear(weight)
    assert layer.weight.dtype == dtype
    assert layer.weight.nbytes < 0.6 * weight.numel()
    assert torch.equal(layer.dequantised(layer.weight, dtype), meant)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(layer(x), nn.functional.linear(x, meant))
    assert torch.equal(x.grad, torch.ones(5, 96, dtype=dtype) @ meant)
    assert not layer.weight.requires_grad


def test_training_goes_on_over_four_bits_after_an_evaluation() -> None:
    from refshard.models.adapters import switch_dropout

    model, other = make(four_bits=True), make(four_bits=True)
    with torch.no_grad():
        other.eval()
        other(TOKENS)
        other.train()
        switch_dropout(other, on=False)
    assert torch.equal(step(model), step(other))


def test_dropout_is_off_in_the_proof_on_after_it_and_drawn_again_alike_in_recomputation() -> None:
    from refshard.models.adapters import switch_dropout

    losses = []
    for policy in ("none", "full", "selective"):
        model = make()
        checkpoint_layers(model, checkpointing_of(policy, len(model.model.layers)))
        with torch.no_grad():  # B starts at 0, behind which nothing shows
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.01)
        quiet = step(model)
        assert torch.equal(quiet, next_token_loss(model(TOKENS), TOKENS))
        switch_dropout(model, on=True)
        model.zero_grad()
        torch.manual_seed(1)
        loss = step(model)
        assert loss != quiet
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        losses.append((loss, torch.cat([g.flatten() for g in gradients])))
    for loss, gradient in losses[1:]:
        assert torch.equal(loss, losses[0][0])
        assert torch.equal(gradient, losses[0][1])
