"""A Hugging Face config.json as a model: the same dimensions, or a refusal that names the field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refshard.errors import SpecError
from refshard.models.llama import Llama
from refshard.specs.model import load_model, model_file

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
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


def write(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}


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
        ({**LLAMA, "model_type": "qwen2"}, "model_type must be 'llama' or 'mistral', got 'qwen2'"),
        ({**LLAMA, "attention_bias": True}, "attention_bias must be false, got True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias must be false, got True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        ({**LLAMA, "head_dim": 32}, "head_dim must be hidden_size / num_attention_heads = 16, got 32"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "got 'linear'"),
        ({**LLAMA, "rope_parameters": {**STRETCHED, "rope_type": "yarn"}}, "rope_type must be 'default' or 'llama3'"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "must end in ForCausalLM"),
        ({**MISTRAL, "sliding_window": 4096}, "sliding_window must be null, got 4096"),
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
