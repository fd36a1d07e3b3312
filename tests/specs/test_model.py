"""The dimensions of models beyond Llama: published totals, closed forms, and what is refused."""

from typing import Any

import msgspec
import pytest

from refshard import resources
from refshard.errors import SpecError
from refshard.models.llama import Llama
from refshard.specs.model import (
    Experts,
    LatentAttention,
    ModelSpec,
    active_parameter_count,
    beyond_llama,
    check_trainable,
    load_model,
    parameter_count,
)
from refshard.specs.reading import convert
from refshard.specs.writing import to_toml
from tests.models import small_spec

PUBLISHED = {
    # Totals of the weights on Hugging Face. Of Gemma's larger models less the vision tower and its projector, of
    # DeepSeek V3 the main model's 671 B of 37 B active (arXiv 2412.19437).
    "qwen3-0.6b": (596_049_920, 0.6e9),
    "qwen3-1.7b": (1_720_574_976, 1.7e9),
    "qwen3-4b": (4_022_468_096, 4.0e9),
    "qwen3-8b": (8_190_735_360, 8.2e9),
    "qwen3-14b": (14_768_307_200, 14.8e9),
    "qwen3-32b": (32_762_123_264, 32.8e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "qwen3-235b-a22b": (235_093_634_560, 22e9),
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
    "mixtral-8x22b": (140_620_634_112, 39e9),
    "deepseek-v3": (671_026_404_352, 37e9),
    "gemma3-1b": (999_885_952, 1.0e9),
    "gemma3-4b": (4_300_079_472 - 419_816_304, 3.9e9),
    "gemma3-12b": (11_766_034_176, 11.8e9),
    "gemma3-27b": (27_009_346_304, 27.0e9),
    # Of Llama 4 less the vision tower and its projector; of GLM less the layer of multi-token prediction and the
    # routers' correction biases (see below). Published active parameters of gpt-oss and DeepSeek V2 do not count the
    # embedding, those of GLM neither that nor the head.
    "qwen2.5-0.5b": (494_032_768, 0.49e9),
    "qwen2.5-1.5b": (1_543_714_304, 1.54e9),
    "qwen2.5-3b": (3_085_938_688, 3.09e9),
    "qwen2.5-7b": (7_615_616_512, 7.61e9),
    "qwen2.5-14b": (14_770_033_664, 14.7e9),
    "qwen2.5-32b": (32_763_876_352, 32.5e9),
    "qwen2.5-72b": (72_706_203_648, 72.7e9),
    "gpt-oss-20b": (20_914_757_184, 3.61e9 + 201_088 * 2880),
    "gpt-oss-120b": (116_829_156_672, 5.13e9 + 201_088 * 2880),
    "glm4.5": (352_797_814_784, 32e9 + 2 * 151_552 * 5120),
    "glm4.5-air": (106_852_245_504, 12e9 + 2 * 151_552 * 4096),
    "phi4": (14_659_507_200, 14.7e9),
    "phi3.5-mini": (3_821_079_552, 3.8e9),
    "olmo2-1b": (1_484_916_736, 1.5e9),
    "olmo2-7b": (7_298_617_344, 7.3e9),
    "olmo2-13b": (13_716_198_400, 13.7e9),
    "olmo2-32b": (32_234_279_936, 32.2e9),
    "smollm2-135m": (134_515_008, 135e6),
    "smollm2-360m": (361_821_120, 362e6),
    "smollm2-1.7b": (1_711_376_384, 1.71e9),
    "smollm3-3b": (3_075_098_624, 3.08e9),
    "llama3.1-8b": (8_030_261_248, 8.0e9),
    "llama3.1-70b": (70_553_706_496, 70.6e9),
    "llama4-scout": (108_641_793_536 - 871_932_416, 17e9),
    "llama4-maverick": (401_583_781_376 - 871_932_416, 17e9),
    "gemma2-2b": (2_614_341_888, 2.6e9),
    "gemma2-9b": (9_241_705_984, 9.2e9),
    "gemma2-27b": (27_227_128_320, 27.2e9),
    "deepseek-v2-lite": (15_706_484_224, 2.4e9 + 102_400 * 2048),
    # Megatron's 12 L h^2 (1 + 13 / 12h + (V + s) / 12 L h) of arXiv 2104.04473, and the final norm's 2 h.
    "gpt3-175b": (12 * 96 * 12288**2 + 13 * 96 * 12288 + (51200 + 2048) * 12288 + 2 * 12288, 174.6e9),
    # 3.2 B of embeddings and 12.5 B beside them; 9.4 B and 331.6 B (the papers of Nemotron-4 15B and 340B).
    "nemotron4-15b": (15_628_775_424, 15.6e9),
    "nemotron4-340b": (341_029_195_776, 341e9),
}
LATENT = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12)
EXPERTS = Experts(count=8, active=2, ffn_dim=32)
BEYOND: dict[str, Any] = {
    "extra_norms": True, "gated": False, "norm_biases": True, "biased": True, "positions": 64, "window": 16,
    "experts": EXPERTS, "latent": LATENT, "vectors": 64, "other_rotations": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(resources.model_profiles()))
def test_a_presets_parameters_are_those_of_its_closed_form(name: str) -> None:
    spec = load_model(name)
    assert spec.params == parameter_count(spec)
    assert "Hugging Face" in spec.source or name in PUBLISHED or name.startswith("llama")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_presets_parameters_are_the_published_ones(name: str) -> None:
    spec, (total, active) = load_model(name), PUBLISHED[name]
    assert spec.params == total
    assert active_parameter_count(spec) == pytest.approx(active, rel=0.02)


def test_kimi_k2_is_published_with_its_fp8_scales_and_correction_biases() -> None:
    """Each linear layer that is kept in fp8 has a scale for each 128 x 128 of its elements."""
    spec = load_model("kimi-k2")
    assert spec.params + 60 * 384 + spec.params / 128**2 == pytest.approx(1_026_470_731_056, rel=1e-5)
    assert active_parameter_count(spec) == pytest.approx(32.6e9, rel=0.02)


@pytest.mark.parametrize(("name", "published"), [("glm4.5", 358_337_791_296), ("glm4.5-air", 110_468_824_832)])
def test_glm_is_published_with_a_layer_of_multi_token_prediction(name: str, published: int) -> None:
    spec = load_model(name)
    assert spec.experts is not None
    longer = msgspec.structs.replace(spec, n_layers=spec.n_layers + 1)
    biases = (longer.expert_layers) * spec.experts.count
    copies = 2 * spec.vocab * spec.dim
    assert parameter_count(longer) + biases + copies + 2 * spec.dim**2 + 3 * spec.dim == published


def test_embeddings_of_nemotron_are_as_published() -> None:
    for name, embeddings, others in (("nemotron4-15b", 3.2e9, 12.5e9), ("nemotron4-340b", 9.4e9, 331.6e9)):
        spec = load_model(name)
        both = 2 * spec.vocab * spec.dim
        assert both == pytest.approx(embeddings, rel=0.02)
        assert spec.params - both == pytest.approx(others, rel=0.005)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3-27b", "gpt3-175b", "llama3-8b", "nemotron4-15b", "qwen3-32b"])
def test_a_spec_reads_back_as_it_was_written(name: str) -> None:
    from tomllib import loads

    spec = load_model(name)
    assert convert(loads(to_toml(spec)), ModelSpec, where="model") == spec


def test_a_head_dimension_that_is_not_given_is_the_width_of_a_head() -> None:
    assert small_spec().head_dim == 16
    assert small_spec(n_heads=3, n_kv_heads=3, head_dim=32).head_dim == 32
    assert small_spec(latent=LATENT).head_dim == 12
    assert msgspec.structs.replace(small_spec(head_dim=32), n_layers=1).head_dim == 32


def test_parameters_of_a_block_counted_by_hand() -> None:
    """A model of width 64 with 3 layers, 4 heads, a feed-forward of 96 and 256 tokens."""
    plain = small_spec().params
    assert small_spec(head_dim=32).params - plain == 3 * 4 * 64 * 64
    assert small_spec(query_norm=True).params - plain == 3 * 2 * 16
    assert small_spec(extra_norms=True).params - plain == 3 * 2 * 64
    assert small_spec(gated=False).params - plain == -3 * 64 * 96
    assert small_spec(norm_biases=True).params - plain == (3 * 2 + 1) * 64
    assert small_spec(biased=True).params - plain == (3 * 2 + 1) * 64 + 3 * (4 * 64 + 2 * 96 + 64)
    assert small_spec(positions=32).params - plain == 32 * 64
    assert small_spec(window=8, global_every=3).params == small_spec(other_rotations=True).params == plain
    assert small_spec(vectors=7).params - plain == 3 * 7
    mixed = small_spec(experts=Experts(count=8, active=2, ffn_dim=32, shared_ffn_dim=48, dense_layers=1))
    assert mixed.params - plain == 2 * (8 * 3 * 64 * 32 + 8 * 64 + 3 * 64 * 48 - 3 * 64 * 96)
    assert mixed.params - active_parameter_count(mixed) == 2 * 6 * 3 * 64 * 32
    biased = small_spec(experts=msgspec.structs.replace(EXPERTS, biased=True))
    assert biased.params - small_spec(experts=EXPERTS).params == 3 * 8 * (2 * 32 + 64)
    alternate = small_spec(experts=msgspec.structs.replace(EXPERTS, every=2))
    assert (alternate.expert_layers, alternate.params - plain) == (1, 8 * 3 * 64 * 32 + 8 * 64 - 3 * 64 * 96)
    latent = small_spec(latent=LATENT)
    by_hand = 64 * 24 + 24 + 24 * 4 * 12 + 64 * (16 + 4) + 16 + 16 * 4 * (8 + 12) + 4 * 12 * 64
    assert latent.params - plain == 3 * (by_hand - 4 * 64 * 64)
    whole = small_spec(latent=msgspec.structs.replace(LATENT, query_rank=0))
    assert latent.params - whole.params == 3 * (64 * 24 + 24 + 24 * 48 - 64 * 48)


def test_layers_that_attend_to_everything() -> None:
    assert [small_spec(n_layers=26, window=8, global_every=every).global_layers for every in (0, 2, 6)] == [0, 13, 4]
    assert small_spec(n_layers=26).global_layers == 26


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_heads": 3, "n_kv_heads": 3},
            "dim must be n_heads times an even head dimension, got dim = 64, n_heads = 3",
        ),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"head_dim": -2}, "head_dim must be >= 0, got -2"),
        ({"positions": -1}, "positions must be >= 0, got -1"),
        ({"global_every": 6}, "global_every must be 0 without a window, got 6; add the window"),
        ({"experts": {"count": 2, "active": 3, "ffn_dim": 8}}, "experts.active must be at most count = 2, got 3"),
        ({"experts": {"count": 2, "active": 0, "ffn_dim": 8}}, "experts.active must be >= 1, got 0"),
        (
            {"experts": {"count": 2, "active": 1, "ffn_dim": 8, "dense_layers": 3}},
            "experts.dense_layers must be < n_layers = 3, got 3",
        ),
        ({"experts": {"counts": 2}}, "experts has the unknown key 'counts'; did you mean 'count'?"),
        (
            {"latent": LATENT, "head_dim": 16},
            "head_dim must be latent's nope_dim + rope_dim = 12, got 16; leave it out",
        ),
        ({"latent": LATENT, "n_kv_heads": 2}, "n_kv_heads must be n_heads = 4 with latent, got 2"),
        ({"latent": LATENT, "biased": True}, "query_norm, biased and norm_biases must be false with latent"),
        ({"gate": False}, "unknown key 'gate'; did you mean 'gated'?"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {**msgspec.to_builtins(msgspec.structs.replace(small_spec(), head_dim=0)), "head_dim": 0}
    given |= {name: msgspec.to_builtins(value) for name, value in changes.items()}
    with pytest.raises(SpecError) as refused:
        convert(given, ModelSpec, where="model test")
    assert message in str(refused.value)


@pytest.mark.parametrize("field", BEYOND)
def test_what_refshard_cannot_train_is_refused_by_the_field_its_value_and_the_remedy(field: str) -> None:
    spec = small_spec(**{field: BEYOND[field]})
    shown = {True: "true", False: "false", 64: "64", 16: "16"}.get(BEYOND[field], "a table")
    with pytest.raises(SpecError) as refused:
        Llama(spec)
    assert str(refused.value).startswith(f"model: {field} must be ")
    assert str(refused.value).endswith(f" for training, got {shown}; closed form only: refshard plan")
    for attempt in (lambda: spec.reduced(2), lambda: check_trainable(spec)):
        with pytest.raises(SpecError, match=f"model: {field} must be"):
            attempt()


def test_a_reduced_model_keeps_its_shape() -> None:
    small = load_model("qwen3-32b").reduced(2)
    assert (small.n_layers, small.n_heads, small.n_kv_heads, small.head_dim, small.query_norm) == (2, 64, 8, 16, True)
    assert small.params == parameter_count(small)
    assert beyond_llama(small, ("query_norm",)) is None
