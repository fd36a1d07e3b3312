"""Exports against transformers, both ways, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from refshard.errors import CheckpointError, SpecError
from refshard.models.hugging_face import config_of, export, fill, read, read_spec
from refshard.models.llama import Llama, initialise
from refshard.specs.model import ModelSpec, RopeScaling, load_model
from tests.models import small_spec

transformers = pytest.importorskip("transformers", reason="these tests need refshard[test]")

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
SPECS = {
    "untied": small_spec(n_kv_heads=2),
    "tied": small_spec(tied=True),
    "scaled": small_spec(rope_theta=5e5, norm_eps=1e-6, rope_scaling=SCALING),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(spec: ModelSpec, seed: int = 0) -> Llama:
    model = Llama(spec)
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that attention and norms matter
    return model


def tokens_of(spec: ModelSpec) -> torch.Tensor:
    return torch.randint(spec.vocab, (2, 160), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours: Llama, theirs: Any) -> None:
    with torch.no_grad():
        a, b = ours(tokens_of(ours.spec)), theirs(tokens_of(ours.spec)).logits
    assert torch.linalg.vector_norm(a - b) < 1e-5 * torch.linalg.vector_norm(b)


def assert_same_weights(found: Llama, expected: Llama) -> None:
    values = found.state_dict()
    assert all(torch.equal(values[name], value) for name, value in expected.state_dict().items())


@each_spec
def test_transformers_computes_the_same_with_an_export(tmp_path: Path, spec: ModelSpec) -> None:
    ours = make(spec)
    export(tmp_path / "hf", spec, ours.state_dict())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), "nothing missing, unexpected or mismatched"
    assert theirs.dtype == torch.float32
    assert_same_logits(ours, theirs)


@each_spec
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_what_transformers_saved_can_be_read(tmp_path: Path, spec: ModelSpec, shard_size: str) -> None:
    export(tmp_path / "hf", spec, make(spec).state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file() == (shard_size == "100KB")
    found = read_spec(tmp_path / "theirs")
    ours = Llama(found)
    fill(ours, tmp_path / "theirs")
    assert found.params == spec.params
    assert_same_weights(ours, make(spec))
    assert_same_logits(ours, theirs)


@each_spec
def test_an_export_read_back_is_the_model(tmp_path: Path, spec: ModelSpec) -> None:
    for seed in (0, 1):  # the second replaces the first
        export(tmp_path / "hf", spec, make(spec, seed).state_dict())
        ours = make(spec, seed=2)
        fill(ours, tmp_path / "hf")
        assert_same_weights(ours, make(spec, seed))
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_bf16_files_fill_an_fp32_model(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    rounded = make(spec).bfloat16()
    export(tmp_path / "hf", spec, rounded.state_dict())
    assert {tensor.dtype for _, tensor in read(tmp_path / "hf")} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    ours = make(spec, seed=1)
    fill(ours, tmp_path / "hf")
    assert_same_weights(ours, rounded.float())


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3.1-405b", "llama2-7b"])
def test_a_configuration_is_that_of_its_spec(tmp_path: Path, name: str) -> None:
    spec = load_model(name)
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec)))
    found = read_spec(tmp_path)
    assert found.params == spec.params
    assert config_of(found) == config_of(spec)


def test_weights_of_another_model_are_refused_and_nothing_changed(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    weights = make(spec).state_dict()
    export(tmp_path / "hf", spec, weights)
    for changes, message in (
        ({"rope_theta": 5.0}, r"rope_theta = 10000\.0, but this one has 5\.0; build it from read_spec"),
        ({"n_layers": 4}, r"n_layers = 3, but this one has 4"),
        ({"tied": True}, r"tied = False, but this one has True"),
    ):
        other = make(small_spec(**{"n_kv_heads": 2, **changes}), seed=1)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            fill(other, tmp_path / "hf")
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())

    for wrong, message in (
        ({n: w for n, w in weights.items() if "norm" not in n}, r"lack 'model\.layers\.0\..*norm\.weight' of shape"),
        ({**weights, "extra.bias": torch.zeros(3)}, r"have 'extra\.bias' of shape \(3,\), which the model"),
        ({**weights, "model.norm.weight": torch.zeros(3)}, r"'model\.norm\.weight' with shape \(3,\), but .* \(64,\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / "hf", spec, wrong)
    fill(make(spec, seed=1), tmp_path / "hf")  # what was there is still there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"model_type must be 'llama', got 'mistral'"),
        ({"attention_bias": True}, r"attention_bias must be False, got True"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            r"rope_type must be 'default' or 'llama3', got 'yarn'",
        ),
        ({"head_dim": 128}, r"head_dim must be 16 = dim / n_heads, got 128"),
        ({"hidden_size": "wide"}, r"Expected `int`, got `str` - at `\$\.dim`"),
    ],
)
def test_what_llama_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of(small_spec()), **changes}))
    with pytest.raises(SpecError, match=message):
        read_spec(tmp_path)


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SpecError, match="hidden_size is missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        fill(make(spec), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        fill(make(spec), tmp_path)


def test_an_index_that_lists_more_than_there_is_is_refused(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    export(tmp_path, spec, make(spec).state_dict())
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.lost.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists 'model\.lost\.weight' in model\.safetensors, which lacks it"):
        dict(read(tmp_path))


def test_the_rotary_table_of_an_early_export_is_passed_over(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    export(tmp_path, spec, make(spec).state_dict())
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**make(spec).state_dict(), **table}, tmp_path / "model.safetensors")
    ours = make(spec, seed=1)
    fill(ours, tmp_path)
    assert_same_weights(ours, make(spec))


def test_a_tokenizer_in_the_folder_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds 'tokenizer\.json', which replacing the folder would delete"):
        export(tmp_path, small_spec(), make(small_spec()).state_dict())
    assert (tmp_path / "tokenizer.json").is_file()
