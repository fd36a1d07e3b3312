"""The model against its closed form, the published dimensions, and Hugging Face's implementation."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refshard import resources
from refshard.errors import SpecError, UnsupportedError
from refshard.models.llama import Llama, initialise, next_token_loss, rotary_tables, rotate
from refshard.specs.model import TRAINED, ModelSpec, RopeScaling, beyond_llama, load_model, parameter_count
from tests.models import small_spec

PRESETS = sorted(name for name in resources.model_profiles() if beyond_llama(load_model(name), TRAINED) is None)

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
"""With heads of 16 and theta 10,000, some frequencies are kept, some interpolated and some divided."""

PARITY = {
    "plain": small_spec(),
    "grouped": small_spec(n_kv_heads=2),
    "one key-value head": small_spec(n_kv_heads=1),
    "tied": small_spec(n_kv_heads=2, tied=True),
    "scaled rope": small_spec(n_kv_heads=2, rope_scaling=SCALING),
    "wide heads": small_spec(n_kv_heads=2, head_dim=32),
    "qwen 3": small_spec(n_kv_heads=2, head_dim=32, query_norm=True),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_closed_form(name: str) -> None:
    spec = load_model(name)
    with torch.device("meta"):
        model = Llama(spec)
    assert sum(p.numel() for p in model.parameters()) == spec.params == parameter_count(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", PARITY.values(), ids=PARITY.keys())
@pytest.mark.processes
def test_logits_and_gradients_equal_hugging_face(spec: ModelSpec) -> None:
    ours, theirs = _twins(spec)
    tokens_BT, targets_BT = torch.randint(spec.vocab, (2, 2, 160), generator=torch.Generator().manual_seed(1))

    logits_BTV, reference_BTV = ours(tokens_BT), theirs(tokens_BT).logits
    assert _relative_error(logits_BTV, reference_BTV) < 1e-5

    next_token_loss(logits_BTV, targets_BT).backward()
    F.cross_entropy(reference_BTV.view(-1, spec.vocab), targets_BT.view(-1)).backward()
    references = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert _relative_error(parameter.grad, references.pop(name).grad) < 1e-5, name
    assert not references


def test_scaling_changes_the_frequencies_in_every_regime() -> None:
    """Without this, parity under scaling could hold because scaling did nothing."""
    one = torch.zeros(())
    plain = rotary_tables(small_spec(), 2, one)[1][1, 0, 8:].asin()
    scaled = rotary_tables(small_spec(rope_scaling=SCALING), 2, one)[1][1, 0, 8:].asin()
    ratio = plain / scaled
    assert ratio[0] == pytest.approx(1.0)
    assert 1.0 < ratio[1] < 8.0
    assert ratio[-1] == pytest.approx(8.0)


def test_rotary_tables_keep_far_positions_apart_in_bf16() -> None:
    cos_T1Q, _ = rotary_tables(small_spec(), 4096, torch.zeros((), dtype=torch.bfloat16))
    assert cos_T1Q.dtype == torch.bfloat16
    exact = torch.arange(4096, dtype=torch.float64).cos()
    assert (cos_T1Q[:, 0, 0].double() - exact).abs().max() < 2**-8


def test_rotated_products_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(2)).double()
    cos_T1Q, sin_T1Q = rotary_tables(small_spec(), 10, q)
    q_TQ, k_TQ = (rotate(x.expand(1, 10, 1, 16), cos_T1Q, sin_T1Q)[0, :, 0] for x in (q, k))
    scores_TT = q_TQ @ k_TQ.T
    torch.testing.assert_close(scores_TT[1:, 1:], scores_TT[:-1, :-1], rtol=0, atol=1e-5)
    assert scores_TT[:, 0].std() > 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_used_only_inside_the_call_of_its_own_module(tied: bool) -> None:
    """What a sharding engine relies on: outside its module's forward, a weight may hold anything."""
    model = Llama(small_spec(tied=tied))
    initialise(model, seed=0)
    tokens_BT = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model(tokens_BT)
        calls = _poison_outside_calls(model)
        actual = model(tokens_BT)
    assert torch.equal(actual, expected)
    owners = [name for name, module in model.named_modules() if module._parameters]
    assert sorted(calls) == sorted(owners)


def test_tied_weights_are_one_parameter_and_stay_so() -> None:
    with torch.device("meta"):
        model = Llama(small_spec(tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.to_empty(device="cpu")
    initialise(model, seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert "lm_head.weight" in model.state_dict()


@pytest.mark.parametrize("spec", [small_spec(), small_spec(tied=True)], ids=["untied", "tied"])
def test_initialise_gives_a_meta_model_the_values_of_a_real_one(spec: ModelSpec) -> None:
    real = Llama(spec)
    with torch.device("meta"):
        late = Llama(spec)
    late.to_empty(device="cpu")
    for model in (real, late):
        initialise(model, seed=3)
    late_values = late.state_dict()
    assert all(torch.equal(value, late_values[name]) for name, value in real.state_dict().items())


def test_initialise_draws_the_documented_distribution() -> None:
    spec = small_spec(n_layers=8)
    model = Llama(spec)
    before = torch.get_rng_state()
    initialise(model, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.06), name
        assert abs(parameter.mean().item()) < 0.1 * expected, name


def test_parameters_and_seeds_have_values_of_their_own() -> None:
    first, second = Llama(small_spec()), Llama(small_spec())
    initialise(first, seed=0)
    initialise(second, seed=1)
    weights = [p for model in (first, second) for p in model.parameters() if p.shape == (64, 64)]
    assert len(weights) == 2 * 3 * 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(weights, 2))


def test_initialise_refuses_the_meta_device() -> None:
    with torch.device("meta"):
        model = Llama(small_spec())
    with pytest.raises(SpecError, match=r"needs storage.*embed_tokens.*to_empty"):
        initialise(model, seed=0)


@pytest.mark.slow
def test_transformers_llama_has_no_norms_of_queries_and_keys() -> None:
    pytest.importorskip("transformers", reason="the parity tests need refshard[test]")
    from refshard.models.transformers_llama import llama_for_causal_lm

    with pytest.raises(UnsupportedError, match="has no norms of queries and keys, got query_norm = true"):
        llama_for_causal_lm(Llama(small_spec(query_norm=True)))


def test_loss_is_the_mean_cross_entropy_in_fp32() -> None:
    logits_BTV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets_BT = torch.arange(10).view(2, 5) % 7
    loss = next_token_loss(logits_BTV, targets_BT)
    picked_BT = logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-picked_BT.mean().item(), rel=1e-6)


def _twins(spec: ModelSpec) -> tuple[Llama, Any]:
    """The same random weights, wide enough that each matters, in our model and in Hugging Face's."""
    transformers = pytest.importorskip("transformers", reason="the parity tests need refshard[test]")
    ours = Llama(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.15, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    if spec.query_norm:
        theirs = transformers.Qwen3ForCausalLM(_hugging_face_config(spec, transformers.Qwen3Config))
    else:
        theirs = transformers.LlamaForCausalLM(_hugging_face_config(spec, transformers.LlamaConfig))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def _hugging_face_config(spec: ModelSpec, config: Any) -> Any:
    scaling = spec.rope_scaling and {
        "rope_type": "llama3",
        "factor": spec.rope_scaling.factor,
        "low_freq_factor": spec.rope_scaling.low_freq_factor,
        "high_freq_factor": spec.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": spec.rope_scaling.original_context,
    }
    return config(
        hidden_size=spec.dim,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.ffn_dim,
        vocab_size=spec.vocab,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=scaling,
        tie_word_embeddings=spec.tied,
        max_position_embeddings=1024,
        attn_implementation="eager",
    )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(actual - expected).item() / torch.linalg.vector_norm(expected).item())


def _poison_outside_calls(model: nn.Module) -> list[str]:
    """Keep each weight NaN but during its own module's forward; returns a list that fills with the calls."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if module._parameters:
            _poison(module, name, calls)
    for parameter in model.parameters():
        parameter.fill_(math.nan)
    return calls


def _poison(module: nn.Module, name: str, calls: list[str]) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    value = weight.detach().clone()

    def restore(*_: object) -> None:
        calls.append(name)
        weight.copy_(value)

    def poison(*_: object) -> None:
        weight.fill_(math.nan)

    module.register_forward_pre_hook(restore)
    module.register_forward_hook(poison)
