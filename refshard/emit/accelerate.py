"""Accelerate 1.15: the YAML that ``accelerate launch --config_file`` reads. The training script is the user's own."""

from refshard.emit.job import (
    HEAD,
    PORT,
    Emitted,
    Job,
    above_one,
    applying,
    filled,
    reduces,
    refuse,
    refuse_job,
    uneven,
    unknown_checkpointing,
)
from refshard.specs.model import beyond_llama, is_factory

VERSION = "1.15.0"
FILE = "accelerate.yaml"
SCRIPT = "train.py"
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "accelerate")
POLICIES = ("none", "full")
BLOCK = "LlamaDecoderLayer"
"""The class of transformers' Llama that is a unit. Other models name theirs in ``_no_split_modules``."""


def emit(job: Job) -> Emitted:
    """The YAML file, and the command of each node.

    Raises:
        SpecError: Accelerate cannot train so.
    """
    one, used = job.configuration, job.used
    _check(job)
    llama = beyond_llama(job.model, ("head_dim",)) is None and not is_factory(job.model_name)
    steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={one.microbatches} " if one.microbatches > 1 else ""
    nodes = f"--machine_rank $RANK_OF_NODE --main_process_ip {HEAD} --main_process_port {PORT} "
    reduced = "fp32" if one.precision == "fp32" or one.strategy == "ddp" else "bf16"
    return Emitted(
        files={FILE: filled("accelerate.yaml.j2", job, version=VERSION, llama=llama, block=BLOCK)},
        command=f"{steps}accelerate launch --config_file {FILE} {nodes if used.nodes > 1 else ''}{SCRIPT}",
        version=VERSION,
        notes=applying(
            (
                True,
                f"Model, optimizer and data come from your {SCRIPT}: give its DataLoader a batch size of "
                f"{one.microbatch}, with sequences of {job.seq_len} tokens.",
            ),
            (
                one.strategy != "ddp" and not llama,
                "Units are the blocks that your model lists in _no_split_modules, as transformers' models do.",
            ),
            (
                one.strategy == "ddp" and one.checkpointing == "full",
                "Call model.gradient_checkpointing_enable(): Accelerate does not checkpoint under DDP.",
            ),
            (
                one.tensor > 1,
                "Load the model with tp_plan='auto' and Accelerate's device mesh: Accelerate does not split it.",
            ),
            (
                one.tensor > 1,
                "transformers' tp_plan of Llama does not split norms and residuals by sequence; the plan does.",
            ),
            (
                one.context > 1,
                "Run each step under accelerator.maybe_context_parallel, with attn_implementation='sdpa'.",
            ),
            (
                reduced != one.reduction,
                f"With this file, Accelerate reduces gradients in {reduced}; the plan reduces in {one.reduction}.",
            ),
            reduces(job, "Accelerate", each=False),
        ),
    )


def _check(job: Job) -> None:
    one, node = job.configuration, job.cluster.ranks_per_node
    second = one.strategy in ("fsdp2", "accelerate")
    refuse_job("accelerate", job, strategies=STRATEGIES)
    first = above_one(job, "tensor", "context", remedy="plan with --strategy fsdp2")
    refuse(
        "accelerate",
        *above_one(job, "pipeline", remedy="emit for torchtitan or megatron, which have pipelines"),
        unknown_checkpointing(job, POLICIES),
        *uneven(job),
        *(first if one.strategy in ("ddp", "fsdp1") else []),
        (
            one.strategy == "ddp" and one.offload,
            "offload must be false for ddp, got true; plan with --strategy fsdp2",
        ),
        (
            second and one.shard * one.context == 1,
            "shard * context must be at least 2 for fsdp2, got 1; plan with --strategy ddp",
        ),
        (
            second and one.shard == 1 < one.replicate,
            f"shard must be at least 2 where replicate = {one.replicate}, got 1; plan with fewer --replicas",
        ),
        (
            one.strategy == "fsdp1" and one.replicate > 1 and one.shard != node,
            f"shard must be a node's {node} ranks for fsdp1 with replicas, got {one.shard}; plan with --strategy fsdp2",
        ),
    )
