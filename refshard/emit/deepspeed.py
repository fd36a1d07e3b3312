"""DeepSpeed 0.19.8: the JSON that ``deepspeed.initialize`` reads. The training script is the user's own."""

import json
from typing import Any

from refshard.emit.job import (
    Emitted,
    Job,
    reduces_each,
    reduces_once,
    refuse_above_one,
    refuse_experts,
    refuse_strategy,
)
from refshard.errors import SpecError

VERSION = "0.19.8"
FILE = "ds_config.json"
HOSTS = "hostfile"
SCRIPT = "train.py"
STAGES = {
    "ddp": 0, "deepspeed-zero1": 1, "deepspeed-zero2": 2, "deepspeed-zero3": 3, "fsdp1": 3, "fsdp2": 3,
    "refshard-zero1": 1, "refshard-zero2": 2, "refshard-fsdp": 3,
}  # fmt: skip
"""The ZeRO stage that shards what a strategy shards."""


def emit(job: Job) -> Emitted:
    """The JSON file, and the command.

    Raises:
        SpecError: DeepSpeed cannot train so.
    """
    _check(job)
    text = json.dumps(_settings(job), indent=2) + "\n"
    used = job.used
    hosts = f"--hostfile {HOSTS} --num_nodes {used.nodes} " if used.nodes > 1 else ""
    command = f"deepspeed {hosts}--num_gpus {used.ranks_per_node} {SCRIPT} --deepspeed --deepspeed_config {FILE}"
    return Emitted(files={FILE: text}, command=command, version=VERSION, notes=_notes(job))


def _check(job: Job) -> None:
    asked = job.configuration
    refuse_strategy("deepspeed", job, tuple(STAGES))
    refuse_experts("deepspeed", job)
    refuse_above_one("deepspeed", job, "pipeline", "tensor", "context", remedy="emit for torchtitan or megatron")
    if asked.precision == "fp8":
        raise SpecError("deepspeed: precision must be 'bf16' or 'fp32', got 'fp8'; plan with --dtype bf16")
    stage = STAGES[asked.strategy]
    if asked.replicate > 1 and stage in (1, 2):
        raise SpecError(
            f"deepspeed: replicate must be 1 for ZeRO-{stage}, which shards over all ranks, got {asked.replicate}; "
            "plan with --replicas 1"
        )
    if asked.offload and stage == 0:
        raise SpecError(f"deepspeed: offload needs ZeRO, got {asked.strategy}; plan with --strategy fsdp2")


def _settings(job: Job) -> dict[str, Any]:
    asked = job.configuration
    bf16 = asked.precision == "bf16"
    settings: dict[str, Any] = {
        "train_batch_size": asked.global_batch,
        "train_micro_batch_size_per_gpu": asked.microbatch,
        "gradient_accumulation_steps": asked.microbatches,
        "bf16": {"enabled": bf16},
        "communication_data_type": asked.reduction,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": _zero(job),
    }
    if asked.offload:
        settings["zero_force_ds_cpu_optimizer"] = False
    if asked.checkpointing != "none":
        settings["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return settings


def _zero(job: Job) -> dict[str, Any]:
    asked, stage = job.configuration, STAGES[job.configuration.strategy]
    zero: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return zero
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage == 3 and asked.replicate > 1:
        zero["zero_hpz_partition_size"] = asked.shard
    if asked.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if asked.offload and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _notes(job: Job) -> tuple[str, ...]:
    asked, stage = job.configuration, STAGES[job.configuration.strategy]
    notes = [
        f"Model, optimizer and data come from your {SCRIPT}: give it batches of {asked.microbatch} x {job.seq_len} "
        "tokens."
    ]
    if job.used.nodes > 1:
        notes.append(f"List the nodes in {HOSTS}, one a line: HOST slots={job.used.ranks_per_node}.")
    if not asked.strategy.startswith("deepspeed"):
        what = f"ZeRO-{stage} shards what {asked.strategy} shards" if stage else "Stage 0 replicates as ddp does"
        notes.append(f"{what}, with DeepSpeed's own code: the plan's time and memory are those of {asked.strategy}.")
    if asked.checkpointing != "none":
        notes.append(f"Your script must checkpoint, with the policy '{asked.checkpointing}': the file does not.")
    if stage == 3 and asked.replicate > 1:
        notes.append("hpZ gathers parameters within a node, but shards gradients and optimizer state over all ranks.")
    if stage == 3 and not asked.reshard:
        notes.append("ZeRO-3 frees gathered parameters after forward; the plan keeps them.")
    if asked.compiled:
        notes.append("The file does not compile blocks: call engine.compile() in your script.")
    return (*notes, *(reduces_each if stage >= 2 else reduces_once)(job, "DeepSpeed"))
