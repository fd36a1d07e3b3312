"""Accelerate 1.15: the YAML that ``accelerate launch --config_file`` reads. The training script is the user's own."""

from refshard.emit.tool import (
    HEAD,
    PORT,
    WHOLE,
    Emitted,
    Setting,
    above_one,
    applying,
    filled,
    reduces,
    refuse,
    refuse_job,
    tuned,
    uneven,
    unknown_checkpointing,
)
from refshard.quantities import GIB

VERSION = "1.15.0"
FILE = "accelerate.yaml"
SCRIPT = "train.py"
STRATEGIES = (*WHOLE, "fsdp1", "fsdp2", "accelerate")
POLICIES = ("none", "full")
EXPERTS = ", or emit for torchtitan, megatron or deepspeed"


def emit(setting: Setting) -> Emitted:
    """The YAML file, and the command of each node.

    Raises:
        SpecError: Accelerate cannot train so.
    """
    one, m, used = setting.job, setting.model, setting.used
    planned = one.implementation.reduction
    _check(setting)
    sharded = one.strategy not in WHOLE
    # One rank reads the weights; the others make the model on the meta device.
    on_meta = one.tp == 1 and one.precision != "fp8"
    unfused = sharded and one.checkpointing == "none" and one.precision != "fp32"
    normed = m.n_layers * (m.query_norm * (m.n_heads + m.n_kv_heads) * m.head_dim // one.tp)
    normed += (m.n_layers * (4 if m.extra_norms else 2) + 1) * m.dim
    norms = 4.0 * normed * one.microbatch * one.seq_len / one.cp if unfused else 0.0
    steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={one.microbatches} " if one.microbatches > 1 else ""
    nodes = f"--machine_rank $RANK_OF_NODE --main_process_ip {HEAD} --main_process_port {PORT} "
    reduced = "fp32" if one.precision == "fp32" or not sharded else "bf16"
    return Emitted(
        files={FILE: filled("accelerate.yaml.j2", setting, version=VERSION, on_meta=on_meta)},
        command=f"{steps}accelerate launch --config_file {FILE} {nodes if used.nodes > 1 else ''}{SCRIPT}",
        version=VERSION,
        notes=applying(
            (
                True,
                f"Model, optimizer and data come from your {SCRIPT}: give its DataLoader a batch size of "
                f"{one.microbatch}, with sequences of {one.seq_len} tokens.",
            ),
            (
                sharded,
                "Units are the blocks that your model lists in _no_split_modules, as transformers' models do.",
            ),
            (
                sharded and on_meta,
                "Only rank 0 loads weights: from_pretrained makes the model on the meta device of the others.",
            ),
            (
                sharded and not on_meta,
                "Each rank loads all weights into its host's memory: Accelerate cannot load on the meta device here.",
            ),
            (
                unfused,
                f"Norms of transformers' models keep copies in fp32: {norms / GIB:.2f} GiB more than the plan's.",
            ),
            (
                not sharded and one.checkpointing == "full",
                "Call model.gradient_checkpointing_enable(): Accelerate checkpoints only under FSDP.",
            ),
            (
                one.tp > 1,
                "Load the model with tp_plan='auto' and Accelerate's device mesh: Accelerate does not split it.",
            ),
            (
                one.tp > 1,
                "transformers' tp_plan of Llama does not split norms and residuals by sequence; the plan does.",
            ),
            (
                one.cp > 1,
                "Run each step under accelerator.maybe_context_parallel, with attn_implementation='sdpa'.",
            ),
            (
                reduced != planned,
                f"With this file, Accelerate reduces gradients in {reduced}; the plan reduces in {planned}.",
            ),
            tuned(setting),
            reduces(setting, "Accelerate", each=False),
        ),
        extra_bytes=norms,
    )


def _check(setting: Setting) -> None:
    one, node = setting.job, setting.cluster.ranks_per_node
    second = one.strategy in ("fsdp2", "accelerate")
    refuse_job("accelerate", setting, strategies=STRATEGIES, experts=EXPERTS, script=True)
    first = above_one(setting, "tp", "cp", remedy="plan with --strategy fsdp2")
    refuse(
        "accelerate",
        *above_one(setting, "pp", remedy="emit for torchtitan or megatron, which have pipelines"),
        unknown_checkpointing(setting, POLICIES),
        *uneven(setting),
        *(first if one.strategy in (*WHOLE, "fsdp1") else []),
        (
            one.strategy in WHOLE and one.offload,
            f"offload must be false for {one.strategy}, got true; plan with --strategy fsdp2",
        ),
        (
            second and one.dp_shard * one.cp == 1,
            "dp_shard * cp must be at least 2 for fsdp2, got 1; plan with --strategy ddp",
        ),
        (
            second and one.dp_shard == 1 < one.dp_replicate,
            f"dp_shard must be at least 2 where dp_replicate = {one.dp_replicate}, got 1; plan with "
            "fewer --dp-replicate",
        ),
        (
            one.strategy == "fsdp1" and one.dp_replicate > 1 and one.dp_shard != node,
            f"dp_shard must be a node's {node} ranks for fsdp1 with dp_replicate > 1, got {one.dp_shard}; plan "
            "with --strategy fsdp2",
        ),
    )
