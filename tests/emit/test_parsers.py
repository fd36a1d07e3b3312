"""Each tool's own parser reads what is emitted for it: those that are installed.

Accelerate is in the extra ``peers``, DeepSpeed in ``deepspeed``; torchtitan gets an environment of its own.
Megatron-LM's parser needs a checkout of the tag core_v0.19.0 on PYTHONPATH.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refshard.emit.table import emit
from refshard.emit.tool import WHOLE
from tests.emit.jobs import ACCELERATE, DEEPSPEED, MEGATRON, TORCHTITAN
from tests.emit.test_structure import megatron_words

MEGATRON_PARSER = """
import json, sys
import megatron.training.arguments as arguments
arguments.get_device_arch_version = lambda: 9  # it asks a GPU
arguments.torch.cuda.get_device_capability = lambda: (9, 0)
names, sys.argv = json.loads(sys.argv[2]), ["pretrain_gpt.py", *json.loads(sys.argv[1])]
parsed = arguments.parse_args()
arguments.validate_args(parsed, {})
print(json.dumps({name: getattr(parsed, name) for name in names}))
"""


def written(tool: str, files: dict[str, str], folder: Path) -> Path:
    """The one file of ``files``, in ``folder``."""
    ((name, text),) = files.items()
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(TORCHTITAN))
def test_torchtitan_parses_its_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("torchtitan.config")
    job, emitted = TORCHTITAN[name], emit("torchtitan", TORCHTITAN[name])
    if job.job.precision == "fp8":  # its converters ask for a GPU that has it
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    module = written("torchtitan", emitted.files, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    parsed = config.ConfigManager().parse_args(emitted.command.partition("-m torchtitan.train ")[2].split())
    asked, model = job.job, parsed.model_spec.model
    assert (model.dim, len(model.layers), model.vocab_size) == (job.model.dim, job.model.n_layers, job.model.vocab)
    last, experts = model.layers[-1], job.model.experts
    if experts is None:
        assert last.feed_forward.w1.out_features == job.model.ffn_dim
    else:
        assert last.moe.num_experts == experts.count
    assert model.enable_weight_tying == job.model.tied
    assert parsed.training.num_tokens_per_train_step == asked.global_batch * asked.seq_len
    assert parsed.training.max_context_length == asked.seq_len
    axes = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
    degrees = [getattr(parsed.parallelism, f"{axis}_degree") for axis in axes]
    shard = [asked.data_ranks, 1] if asked.strategy == "ddp" else [asked.dp_replicate, asked.dp_shard]
    assert degrees == [*shard, asked.cp, asked.tp, asked.pp, asked.ep]
    if asked.strategy == "simplefsdp":
        assert parsed.compile.memory_policy == {"none": "default", "selective": "eager"}[str(asked.checkpointing)]
        return
    policy = {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}[str(asked.checkpointing)]
    assert type(parsed.activation_checkpoint).__qualname__ == policy


@pytest.mark.parametrize("name", sorted(ACCELERATE))
def test_accelerate_parses_its_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher reads the file and sets variables; from these its plugins are made in each rank."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    if ACCELERATE[name].job.precision == "fp8":
        pytest.importorskip("torchao")
    asked, emitted = ACCELERATE[name].job, emit("accelerate", ACCELERATE[name])
    file = written("accelerate", emitted.files, tmp_path)
    line = (
        emitted.command.partition("accelerate launch ")[2].replace("$RANK_OF_NODE", "0").replace(file.name, str(file))
    )
    arguments, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(shlex.split(line)))
    environment = prepare_multi_gpu_env(arguments)
    assert arguments.num_processes == asked.gpus
    assert environment["ACCELERATE_MIXED_PRECISION"] == {"fp32": "no"}.get(asked.precision, asked.precision)
    assert (environment["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == "True") == asked.implementation.compiled
    if asked.strategy in WHOLE:
        assert "ACCELERATE_USE_FSDP" not in environment
        return
    for key, value in environment.items():
        if key.startswith("FSDP"):
            monkeypatch.setenv(key, value)
    on_meta = asked.tp == 1 and asked.precision != "fp8"
    assert (
        environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == environment["FSDP_SYNC_MODULE_STATES"] == str(on_meta).lower()
    )
    for key in ("SYNC_MODULE_STATES", "CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(f"FSDP_{key}", "false")  # it would look for a device
    check_plugin(FullyShardedDataParallelPlugin(), name)
    if (mesh := check_mesh(environment, monkeypatch)) is not None:
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (asked.dp_replicate, asked.dp_shard)
        assert (mesh.tp_size, mesh.cp_size, mesh.total_size) == (asked.tp, asked.cp, asked.gpus)


def check_plugin(plugin: Any, name: str) -> None:
    """The plugin that a rank makes shards as asked."""
    asked = ACCELERATE[name].job
    assert plugin.fsdp_version == (1 if asked.strategy == "fsdp1" else 2)
    assert plugin.activation_checkpointing == (asked.checkpointing == "full")
    if asked.strategy == "fsdp1":
        assert plugin.sharding_strategy.name == "HYBRID_SHARD"
        return
    assert plugin.reshard_after_forward is asked.implementation.reshard
    assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if asked.offload else "OffloadPolicy")


def check_mesh(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The mesh that a rank makes; None without one."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") != "true":
        return None
    from accelerate.parallelism_config import ParallelismConfig

    for key, value in environment.items():
        if key.startswith("PARALLELISM"):
            monkeypatch.setenv(key, value)
    return ParallelismConfig()


class DataRanks:
    """What DeepSpeed asks for the number of data-parallel ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        return self.ranks


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(DEEPSPEED))
def test_deepspeed_parses_its_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    asked = DEEPSPEED[name].job
    (text,) = emit("deepspeed", DEEPSPEED[name]).files.values()
    parsed = config.DeepSpeedConfig(json.loads(text), mpu=DataRanks(asked.data_ranks))
    assert (parsed.world_size, parsed.train_batch_size) == (asked.gpus, asked.global_batch)
    assert parsed.gradient_accumulation_steps == asked.microbatches
    assert parsed.zero_config.zero_hpz_partition_size == (
        asked.dp_shard if asked.dp_replicate > 1 and name == "hpz" else 1
    )
    assert (parsed.zero_config.offload_optimizer is not None) == asked.offload
    assert parsed.gradient_clipping == 1.0
    assert parsed.expert_parallel_config.autoep_size == asked.ep
    assert (
        str(parsed.communication_data_type)
        == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[asked.implementation.reduction]
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_megatron_parses_and_validates_its_arguments(name: str) -> None:
    pytest.importorskip("megatron.training", reason="needs a checkout of Megatron-LM core_v0.19.0 on PYTHONPATH")
    asked = MEGATRON[name].job
    (script,) = emit("megatron", MEGATRON[name]).files.values()
    expected = {
        "data_parallel_size": asked.data_ranks,
        "virtual_pipeline_model_parallel_size": asked.interleave if asked.interleave > 1 else None,
        "sequence_parallel": asked.tp > 1,
        "global_batch_size": asked.global_batch,
        "num_experts": experts.count if (experts := MEGATRON[name].model.experts) else None,
        "expert_model_parallel_size": asked.ep,
    }
    variables = {"WORLD_SIZE": str(asked.gpus), "RANK": "0", "LOCAL_RANK": "0"}
    if "CUDA_DEVICE_MAX_CONNECTIONS" in script:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON_PARSER, json.dumps(megatron_words(script))]
    done = subprocess.run(
        [*command, json.dumps(list(expected))], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
