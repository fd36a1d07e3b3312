"""Accelerate 1.15: the YAML that ``accelerate launch --config_file`` reads. The training script is the user's own."""

from refshard.emit.job import (
    HEAD,
    PORT,
    Emitted,
    Job,
    reduces_once,
    refuse_above_one,
    refuse_checkpointing,
    refuse_experts,
    refuse_strategy,
    refuse_uneven,
)
from refshard.errors import SpecError
from refshard.specs.configuration import Configuration
from refshard.specs.model import beyond_llama, is_factory

VERSION = "1.15.0"
FILE = "accelerate.yaml"
SCRIPT = "train.py"
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "accelerate")
POLICIES = ("none", "full")
BLOCK = "LlamaDecoderLayer"
"""The class of transformers' Llama that is a unit."""
Value = bool | int | str | dict[str, "Value"]


def emit(job: Job) -> Emitted:
    """The YAML file, and the command of each node.

    Raises:
        SpecError: Accelerate cannot train so.
    """
    _check(job)
    asked, used = job.configuration, job.used
    settings: dict[str, Value] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if asked.strategy == "ddp" else "FSDP",
        "mixed_precision": {"fp32": "no", "bf16": "bf16", "fp8": "fp8"}[asked.precision],
        "num_machines": used.nodes,
        "num_processes": asked.world_size,
        "main_training_function": "main",
        "rdzv_backend": "static" if used.nodes == 1 else "c10d",
    }
    if asked.strategy != "ddp":
        settings["fsdp_config"] = _fsdp1(job) if asked.strategy == "fsdp1" else _fsdp2(job)
    if asked.strategy in ("fsdp2", "accelerate") and asked.world_size > asked.shard:
        settings["parallelism_config"] = _mesh(asked)
    if asked.precision == "fp8":
        settings["fp8_config"] = {"fp8_backend": "AO"}
    if asked.compiled:
        settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    text = f"# {job.title}: written by refshard for Accelerate {VERSION}.\n" + "".join(_yaml(settings))
    return Emitted(files={FILE: text}, command=_command(job), version=VERSION, notes=_notes(job))


def _check(job: Job) -> None:
    asked = job.configuration
    refuse_strategy("accelerate", job, STRATEGIES)
    refuse_experts("accelerate", job)
    refuse_above_one("accelerate", job, "pipeline", remedy="emit for torchtitan or megatron, which have pipelines")
    refuse_checkpointing("accelerate", job, POLICIES)
    refuse_uneven("accelerate", job)
    if asked.strategy in ("ddp", "fsdp1"):
        refuse_above_one("accelerate", job, "tensor", "context", remedy="plan with --strategy fsdp2")
    if asked.strategy == "ddp" and asked.offload:
        raise SpecError("accelerate: offload must be false for ddp, got true; plan with --strategy fsdp2")
    if asked.strategy in ("fsdp2", "accelerate") and asked.shard * asked.context == 1:
        raise SpecError("accelerate: shard * context must be at least 2 for fsdp2, got 1; plan with --strategy ddp")
    if asked.strategy in ("fsdp2", "accelerate") and asked.shard == 1 < asked.replicate:
        raise SpecError(
            f"accelerate: shard must be at least 2 where replicate = {asked.replicate}, got 1; plan with "
            "fewer --replicas"
        )
    if asked.strategy == "fsdp1" and asked.replicate > 1 and asked.shard != job.cluster.ranks_per_node:
        raise SpecError(
            f"accelerate: shard must be a node's {job.cluster.ranks_per_node} ranks for fsdp1 with replicas, got "
            f"{asked.shard}; plan with --strategy fsdp2"
        )


def _fsdp1(job: Job) -> dict[str, Value]:
    asked = job.configuration
    sharded, kept = ("FULL_SHARD", "SHARD_GRAD_OP") if asked.replicate == 1 else ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    return {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": sharded if asked.reshard else kept,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        **_wrapping(job),
    }


def _fsdp2(job: Job) -> dict[str, Value]:
    return {"fsdp_version": 2, "fsdp_reshard_after_forward": job.configuration.reshard, **_wrapping(job)}


def _wrapping(job: Job) -> dict[str, Value]:
    """Blocks as units: without a class, Accelerate takes those that the model itself says not to split."""
    asked = job.configuration
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": BLOCK} if _is_llama(job) else {}),
        "fsdp_activation_checkpointing": asked.checkpointing == "full",
        "fsdp_offload_params": asked.offload,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _is_llama(job: Job) -> bool:
    return beyond_llama(job.model, ("head_dim",)) is None and not is_factory(job.model_name)


def _mesh(asked: Configuration) -> dict[str, Value]:
    sizes = {"dp_replicate": asked.replicate, "dp_shard": asked.shard, "tp": asked.tensor, "cp": asked.context}
    return {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}


def _yaml(settings: dict[str, Value], indent: str = "") -> list[str]:
    """Lines of YAML. Words and numbers only; ``no`` is quoted, because YAML reads it as false."""
    lines: list[str] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", *_yaml(value, f"{indent}  ")]
        else:
            word = str(value).lower() if isinstance(value, bool) else f'"{value}"' if value == "no" else str(value)
            lines.append(f"{indent}{key}: {word}\n")
    return lines


def _command(job: Job) -> str:
    asked, used = job.configuration, job.used
    steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={asked.microbatches} " if asked.microbatches > 1 else ""
    nodes = f"--machine_rank $RANK_OF_NODE --main_process_ip {HEAD} --main_process_port {PORT} "
    return f"{steps}accelerate launch --config_file {FILE} {nodes if used.nodes > 1 else ''}{SCRIPT}"


def _notes(job: Job) -> tuple[str, ...]:
    asked = job.configuration
    notes = [
        f"Model, optimizer and data come from your {SCRIPT}: give its DataLoader a batch size of {asked.microbatch}, "
        f"with sequences of {job.seq_len} tokens."
    ]
    if asked.strategy != "ddp" and not _is_llama(job):
        notes.append("Units are the blocks that your model lists in _no_split_modules, as transformers' models do.")
    if asked.strategy == "ddp" and asked.checkpointing == "full":
        notes.append("Call model.gradient_checkpointing_enable(): Accelerate does not checkpoint under DDP.")
    if asked.tensor > 1:
        notes.append("Load the model with tp_plan='auto' and Accelerate's device mesh: Accelerate does not split it.")
        notes.append("transformers' tp_plan of Llama does not split norms and residuals by sequence; the plan does.")
    if asked.context > 1:
        notes.append("Run each step under accelerator.maybe_context_parallel, with attn_implementation='sdpa'.")
    reduced = "fp32" if asked.precision == "fp32" or asked.strategy == "ddp" else "bf16"
    if reduced != asked.reduction:
        notes.append(
            f"With this file, Accelerate reduces gradients in {reduced}; the plan reduces in {asked.reduction}."
        )
    return (*notes, *reduces_once(job, "Accelerate"))
