"""``refshard dryrun --model``: the command that trains a model under one strategy, on the fake device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.dryrun_model import PROGRAM, Training, training_command
from refshard.errors import SpecError
from refshard.measure.dry.train import read_case
from refshard.specs.case import Case
from tests.fakecuda.needs import needs_device

OWN = "tests.strategies.test_own_models:tied"


def test_the_command_describes_the_case_and_is_read_back() -> None:
    training = Training(model="llama-tiny", strategy="ddp", seq_len=64, microbatch=3, checkpointing="every-2")
    (dash, program, *arguments), tokens = training_command(training, "dgx-h100x2", None)
    assert (dash, program, tokens) == ("-m", PROGRAM, 16 * 3 * 64)
    assert read_case(arguments) == Case.of(
        strategy="ddp", gpus=16, model="llama-tiny", global_batch=48, seq_len=64, precision="bf16",
        checkpointing="every-2", fidelity="dryrun", cluster="dgx-h100x2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "llama-tinyy"}, "model: no preset 'llama-tinyy'; did you mean 'llama-tiny'?"),
        ({"model": "deepseek-v3"}, "model: experts must be absent for training, got a table; closed form only:"),
        ({"model": "gpt3-175b"}, "model: gated must be true for training, got false; closed form only:"),
        ({"strategy": "fsdp3"}, "strategy: no strategy 'fsdp3'; did you mean"),
        ({"model": OWN, "strategy": "pipeline"}, "strategy: refshard does not support pipeline with"),
        ({"model": "no_such.models:build"}, "needs the module 'no_such'"),
        ({"precision": "fp16"}, "precision"),
        ({"microbatch": 0}, "dryrun: global_batch must be >= 1, got 0"),
    ],
)
def test_what_cannot_run_is_refused_before_the_device_is_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        training_command(Training(**{"model": "llama-tiny", **fields}), "dgx-h100", None)
    assert words in str(refused.value)


def test_a_model_and_a_script_exclude_each_other() -> None:
    done = CliRunner().invoke(app, ["dryrun", "--cluster", "dgx-h100", "--model", "llama-tiny", "--", "train.py"])
    assert "leave one out" in str(done.exception)


@pytest.mark.processes
@needs_device
@pytest.mark.parametrize("model", [OWN, pytest.param("config.json", marks=pytest.mark.full)])
def test_a_factory_and_a_config_are_dry_run_without_a_script(model: str, tmp_path: Path) -> None:
    if model == "config.json":
        model = str(tmp_path / "config.json")
        config = {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        Path(model).write_text(json.dumps(config))
    words = ["dryrun", "--cluster", "dgx-h100", "--model", model, "--strategy", "fsdp2", "--seq-len", "8", "--json"]
    done = subprocess.run([sys.executable, "-m", "refshard", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found = found.get("data", found)
    assert found["answer"]["outcome"] == "stepped"
    assert found["fits"]
    assert found["tokens_per_s_gpu"] == pytest.approx(8 / found["step_s"])
