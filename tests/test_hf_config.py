"""A Hugging Face config.json as a model: the same dimensions, or a refusal that names the field."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refshard.errors import SpecError
from refshard.models.llama import Llama
from refshard.specs.model import (
    Experts,
    LatentAttention,
    ModelSpec,
    check_trainable,
    known_dimensions,
    load_model,
    model_file,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": 16,
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "use_cache": True,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 257, "rms_norm_eps": 1e-6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 257,
    "sliding_window": 16,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
PHI3 = {
    **LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 4096,
    "sliding_window": 2047, "pad_token_id": 0,
}  # fmt: skip
SMOLLM3 = {
    **LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
OLMO2 = {**LLAMA, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
GLM: dict[str, Any] = {
    **LLAMA, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
    "partial_rotary_factor": 0.5, "use_qk_norm": True, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **LLAMA, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True,
    "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
}  # fmt: skip
LLAMA4_TEXT: dict[str, Any] = {
    **LLAMA, "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 5,
    "intermediate_size_mlp": 160, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    **GEMMA3, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def write(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"rope_parameters": {**STRETCHED, "rope_theta": 5e5}, "max_position_embeddings": 65536},
        {"model_type": "mistral", "sliding_window": None},
    ],
    ids=["plain", "tied", "ungrouped", "stretched", "mistral"],
)
def test_what_transformers_saves_is_read_as_the_model_that_transformers_builds(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'peers'")
    fields = {**without(LLAMA, "architectures"), **changes}
    config = transformers.AutoConfig.for_model(**fields)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
        spec = load_model(str(tmp_path))
        ours = Llama(spec)
    assert spec.params == sum(parameter.numel() for parameter in theirs.parameters())
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert (spec.rope_theta, spec.norm_eps, spec.tied) == (5e5, 1e-5, fields["tie_word_embeddings"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "published",
    [
        QWEN3, {**QWEN3, "tie_word_embeddings": True}, QWEN3_MOE, MIXTRAL, DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None},
        GEMMA3, {**QWEN3_MOE, "decoder_sparse_step": 2}, {**DEEPSEEK, "model_type": "deepseek_v2"}, PHI3, SMOLLM3,
        OLMO2, QWEN2, GLM, {**GLM, "attention_bias": False, "use_qk_norm": False}, GPT_OSS, LLAMA4_TEXT,
        {**LLAMA4_TEXT, "interleave_moe_layer_step": 1}, GEMMA2, {**MISTRAL, "sliding_window": 16},
    ],
    ids=lambda published: published["model_type"],
)  # fmt: skip
def test_a_family_has_the_parameters_that_transformers_builds(published: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'peers'")
    config = transformers.AutoConfig.for_model(**deepcopy(without(published, "architectures")))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    saved, as_published = load_model(f"hf:{tmp_path}"), load_model(write(tmp_path, published))
    assert msgspec.structs.replace(saved, source="") == msgspec.structs.replace(as_published, source="")
    assert saved.params == sum(parameter.numel() for parameter in theirs.parameters())
    if published["model_type"] == "qwen3":
        with torch.device("meta"):
            ours = Llama(saved)
        assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


def test_fields_of_each_family_become_those_of_the_spec(tmp_path: Path) -> None:
    qwen = load_model(write(tmp_path, QWEN3_MOE))
    assert (qwen.head_dim, qwen.query_norm, qwen.rope_theta) == (32, True, 5e5)
    assert qwen.experts == Experts(count=8, active=2, ffn_dim=32)
    mixtral = load_model(write(tmp_path, MIXTRAL))
    assert mixtral.experts == Experts(count=4, active=2, ffn_dim=96)
    deepseek = load_model(write(tmp_path, {**DEEPSEEK, "quantization_config": {"quant_method": "fp8"}}))
    assert deepseek.experts == Experts(
        count=8, active=2, ffn_dim=32, shared_ffn_dim=64, dense_layers=1, groups=2, active_groups=1
    )
    assert deepseek.latent == LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12)
    assert deepseek.head_dim == 12
    gemma = load_model(write(tmp_path, {"model_type": "gemma3", "text_config": without(GEMMA3, "model_type")}))
    assert (gemma.window, gemma.global_every, gemma.global_layers, gemma.tied) == (16, 6, 1, True)
    assert gemma == load_model(write(tmp_path, {**GEMMA3, "sliding_window_pattern": 6}))
    whole = load_model(write(tmp_path, {**GEMMA3, "layer_types": ["sliding_attention"] * 7}))
    assert (whole.global_every, whole.global_layers) == (0, 0)


def test_windows_rotations_and_experts_of_further_families(tmp_path: Path) -> None:
    def read(**config: Any) -> ModelSpec:
        return load_model(write(tmp_path, config))

    assert (read(**PHI3).window, read(**{**PHI3, "sliding_window": 4096}).window) == (2047, 0)
    assert read(**{**MISTRAL, "sliding_window": 4096}).window == 4096
    assert (read(**GEMMA2).window, read(**GEMMA2).global_every, read(**GEMMA2).rope_theta) == (16, 2, 1e4)
    oss = read(**{**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}})
    experts = Experts(count=8, active=2, ffn_dim=96, biased=True, clamped=True)
    assert (oss.window, oss.global_every, oss.experts, oss.yarn) == (16, 2, experts, True)
    text = read(model_type="llama4", architectures=["Llama4ForConditionalGeneration"], text_config=LLAMA4_TEXT)
    assert text.experts == Experts(count=4, active=1, ffn_dim=96, shared_ffn_dim=96, every=2)
    assert (text.ffn_dim, text.window, text.global_every, text.expert_layers) == (160, 8192, 4, 2)
    kimi = {**DEEPSEEK, "model_type": "kimi_k2", "rope_scaling": {"type": "yarn", "factor": 32}}
    assert read(**kimi) == read(**DEEPSEEK)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"rope_parameters": {**STRETCHED, "rope_type": "yarn"}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ],
)
def test_a_model_with_other_rotations_can_be_planned_but_not_trained(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = load_model(write(tmp_path, {**LLAMA, **changes}))
    assert spec.params == load_model(write(tmp_path, LLAMA)).params
    with pytest.raises(SpecError, match="model: other_rotations must be false for training, got true"):
        check_trainable(spec)


def test_gemma3_4b_leaves_out_what_is_its_default(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    read = load_model(write(tmp_path, published))
    assert msgspec.structs.replace(read, source="") == msgspec.structs.replace(load_model("gemma3-4b"), source="")


def test_a_prefix_makes_any_name_a_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-tiny").mkdir()
    write(Path("llama-tiny"), LLAMA)
    Path("llama-tiny/config.json").rename("llama-tiny/odd")
    assert load_model("hf:llama-tiny/odd").dim == 64
    assert model_file("hf:llama-tiny/odd") == Path("llama-tiny/odd")
    write(Path("llama-tiny"), QWEN3)
    assert known_dimensions("hf:llama-tiny") == load_model("llama-tiny/config.json")
    with pytest.raises(SpecError, match=r"none: cannot be read"):
        load_model("hf:none")


def test_files_of_older_versions_name_the_base_and_the_scaling_apart_or_leave_them_out(tmp_path: Path) -> None:
    new = load_model(write(tmp_path, {**LLAMA, "rope_parameters": {**STRETCHED, "rope_theta": 5e5}}))
    assert new.rope_scaling is not None
    older = {**without(LLAMA, "rope_parameters"), "rope_theta": 5e5, "rope_scaling": STRETCHED}
    assert load_model(write(tmp_path, older)) == new
    oldest = load_model(write(tmp_path, without(LLAMA, "rope_parameters", "num_key_value_heads", "attention_bias")))
    assert (oldest.rope_theta, oldest.rope_scaling, oldest.n_kv_heads) == (1e4, None, 4)


def test_llama3_8b_is_the_preset(tmp_path: Path) -> None:
    published = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "vocab_size": 128256,
    }  # fmt: skip
    read = load_model(write(tmp_path, published))
    assert msgspec.structs.replace(read, source="") == msgspec.structs.replace(load_model("llama3-8b"), source="")


def test_a_folder_stands_for_the_config_in_it_and_a_preset_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "llama-tiny"):
        Path(name).mkdir()
        write(Path(name), LLAMA)
    assert model_file("mine") == Path("mine/config.json")
    assert load_model("mine").dim == 64
    assert model_file("llama-tiny") is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "model_type": "qwen9"}, "'qwen3', 'qwen3_moe', 'smollm3', got 'qwen9'"),
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window must be false, got True"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias must be true, got False"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
        ({**LLAMA4_TEXT, "moe_layers": [0]}, "moe_layers must be each 2-th, got [0]"),
        ({**LLAMA, "attention_bias": True}, "attention_bias must be false, got True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias must be false, got True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "must end in ForCausalLM"),
        ({**QWEN3, "use_sliding_window": True}, "use_sliding_window must be false, got True"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers must be [], got [0]"),
        ({**MIXTRAL, "sliding_window": 4096}, "sliding_window must be null, got 4096"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({**DEEPSEEK, "quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'silu'"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping must be null, got 30.0"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention must be false, got True"),
        ({**GEMMA3, "layer_types": ["full_attention", *["sliding_attention"] * 6]}, "in [1] of 7"),
        ({**GEMMA3, "architectures": ["Gemma3ForConditionalGeneration"]}, "must end in ForCausalLM, got"),
    ],
)
def test_another_architecture_is_refused_by_the_field_and_the_remedy(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        load_model(write(tmp_path, config))
    assert words in str(refused.value)
    assert "package.module:factory" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "must hold a JSON object, got a list"),
        (without(LLAMA, "vocab_size"), "vocab_size is missing; add it"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size: expected `int`, got `str` (got '64')"),
        ({**without(LLAMA, "head_dim"), "num_attention_heads": 0}, "n_heads must be >= 1, got 0"),
        ({**LLAMA, "num_key_value_heads": 0}, "n_kv_heads must be >= 1, got 0"),
        (without(MISTRAL, "sliding_window"), "sliding_window must be given for mistral"),
        (without(MISTRAL, "num_key_value_heads"), "num_key_value_heads must be given for mistral"),
        (without(QWEN3, "head_dim"), "head_dim must be given for qwen3"),
        (without(QWEN3_MOE, "num_experts"), "num_experts is missing; add it"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "active must be at most count = 8, got 9"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "n_kv_heads must be n_heads = 4 with latent, got 2"),
        ({"model_type": "gemma3"}, "text_config must be given for gemma3, got None"),
        ({**LLAMA, "rope_parameters": without(STRETCHED, "factor")}, "factor must be given for rope_type 'llama3'"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        load_model(write(tmp_path, config))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_or_torn_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.json: cannot be read \(No such file or directory\)"):
        load_model(str(tmp_path / "none.json"))
    path = tmp_path / "torn.json"
    path.write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_model(str(path))


def test_a_factory_has_no_closed_form() -> None:
    with pytest.raises(SpecError, match=r"refshard dryrun --cluster NAME --model mine.models:build --strategy fsdp2"):
        load_model("mine.models:build")
