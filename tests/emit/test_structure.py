"""The shape of what is emitted, without the tools: syntax, sizes, and Megatron's arguments."""

import ast
import json
import shlex
import subprocess
from math import prod

import pytest
import yaml

from refshard.emit.megatron import COMMIT
from refshard.emit.table import emit
from tests.emit import megatron_flags
from tests.emit.jobs import ACCELERATE, DEEPSPEED, MEGATRON, TORCHTITAN
from tests.emit.megatron_flags import FLAGS


def megatron_words(script: str) -> list[str]:
    """The arguments that a script passes to Megatron, without comments."""
    return shlex.split(script.partition("arguments=(\n")[2].partition("\n)\n")[0], comments=True)


@pytest.mark.parametrize("name", sorted(TORCHTITAN))
def test_torchtitan_gets_python_with_one_function(name: str) -> None:
    emitted, asked = emit("torchtitan", TORCHTITAN[name]), TORCHTITAN[name].job
    (text,) = emitted.files.values()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert functions == ["configuration"]
    assert emitted.command.endswith("-m torchtitan.train --module refshard_torchtitan --config configuration")
    degrees = {
        line.partition("parallel_")[2].partition("_degree")[0] + line.partition("_parallel_degree")[0][-7:]: int(size)
        for line, _, size in (row.partition(" = ") for row in text.splitlines())
        if line.endswith("_degree") and "expert" not in line
    }
    assert prod(degrees.values()) == asked.gpus


@pytest.mark.parametrize("name", sorted(ACCELERATE))
def test_accelerate_gets_yaml_of_all_ranks(name: str) -> None:
    asked = ACCELERATE[name].job
    (text,) = emit("accelerate", ACCELERATE[name]).files.values()
    settings = yaml.safe_load(text)
    assert settings["num_processes"] == asked.gpus == min(8, asked.gpus) * settings["num_machines"]
    assert settings["mixed_precision"] == {"fp32": "no", "bf16": "bf16", "fp8": "fp8"}[asked.precision]
    assert prod(settings.get("parallelism_config", {"all": asked.gpus}).values()) == asked.gpus


@pytest.mark.parametrize("name", sorted(DEEPSPEED))
def test_deepspeed_gets_batches_that_fit(name: str) -> None:
    asked = DEEPSPEED[name].job
    (text,) = emit("deepspeed", DEEPSPEED[name]).files.values()
    settings = json.loads(text)
    per_rank = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]
    assert settings["train_batch_size"] == per_rank * asked.gpus == asked.global_batch


@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_megatron_gets_arguments_that_it_has(name: str) -> None:
    (script,) = emit("megatron", MEGATRON[name]).files.values()
    words = megatron_words(script)
    while words:
        takes = FLAGS[words.pop(0).removeprefix("--")]
        if isinstance(takes, tuple):
            assert words.pop(0) in takes
        elif takes is not None:
            takes(words.pop(0))


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_megatrons_script_is_a_shells(name: str) -> None:
    (script,) = emit("megatron", MEGATRON[name]).files.values()
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_argument_listed_is_written() -> None:
    scripts = [text for job in MEGATRON.values() for text in emit("megatron", job).files.values()]
    written = {word.removeprefix("--") for script in scripts for word in megatron_words(script) if word[:2] == "--"}
    assert written == FLAGS.keys()
    assert COMMIT in (megatron_flags.__doc__ or "")


def test_megatron_pads_no_vocabulary_that_divides() -> None:
    (script,) = emit("megatron", MEGATRON["1f1b"]).files.values()
    words = megatron_words(script)
    divisor = int(words[words.index("--make-vocab-size-divisible-by") + 1])
    assert 128256 % (8 * divisor) == 0
