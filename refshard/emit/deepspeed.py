"""DeepSpeed 0.19.8: the JSON that ``deepspeed.initialize`` reads. The training script is the user's own."""

import json
from typing import Any

from refshard.emit.tool import Emitted, Setting, above_one, applying, reduces, refuse, refuse_job, tuned
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.quantities import GIB
from refshard.specs.model import ModelSpec

VERSION = "0.19.8"
FILE = "ds_config.json"
HOSTS = "hostfile"
SCRIPT = "train.py"
STAGES = {
    "single": 0, "ddp": 0, "deepspeed-zero1": 1, "deepspeed-zero2": 2, "deepspeed-zero3": 3, "fsdp1": 3, "fsdp2": 3,
    "refshard-zero1": 1, "refshard-zero2": 2, "refshard-fsdp": 3,
}  # fmt: skip
"""The ZeRO stage that shards what a strategy shards."""
CLIPPING = 1.0
"""The largest norm of gradients: the default of DeepSpeed, torchtitan and Megatron."""


def emit(setting: Setting) -> Emitted:
    """The JSON file, and the command.

    Raises:
        SpecError: DeepSpeed cannot train so.
    """
    one, used = setting.job, setting.used
    refuse_job("deepspeed", setting, strategies=tuple(STAGES), script=True)
    stage = STAGES[one.strategy]
    refuse(
        "deepspeed",
        *above_one(setting, "pp", "tp", "cp", remedy="emit for torchtitan or megatron"),
        (one.precision == "fp8", "precision must be 'bf16' or 'fp32', got 'fp8'; plan with --precision bf16"),
        (
            one.dp_replicate > 1 and stage in (1, 2),
            f"dp_replicate must be 1 for ZeRO-{stage}, which shards over all ranks, got {one.dp_replicate}; plan with "
            "--dp-replicate 1",
        ),
        (
            one.dp_replicate > 1 and one.ep > 1,
            f"dp_replicate must be 1 where ep = {one.ep}, got {one.dp_replicate}; plan with --dp-replicate 1",
        ),
        (one.offload and stage == 0, f"offload needs ZeRO, got {one.strategy}; plan with --strategy fsdp2"),
    )
    hosts = f"--hostfile {HOSTS} --num_nodes {used.nodes} " if used.nodes > 1 else ""
    extra = _extra(setting) if stage == 3 and one.tuning == "full" else 0.0
    what = f"ZeRO-{stage} shards what {one.strategy} shards" if stage else f"Stage 0 replicates as {one.strategy} does"
    return Emitted(
        files={FILE: json.dumps(_settings(setting, stage), indent=2) + "\n"},
        command=f"deepspeed {hosts}--num_gpus {used.ranks_per_node} {SCRIPT} --deepspeed --deepspeed_config {FILE}",
        version=VERSION,
        notes=applying(
            (
                True,
                f"Model, optimizer and data come from your {SCRIPT}: give it batches of {one.microbatch} x "
                f"{one.seq_len} tokens.",
            ),
            (
                used.nodes > 1,
                f"List the nodes in {HOSTS}, one a line: HOST slots={used.ranks_per_node}. For the other nodes, write "
                f"{EXPANDABLE_SEGMENTS} to .deepspeed_env.",
            ),
            (
                not one.strategy.startswith("deepspeed"),
                f"{what}, with DeepSpeed's own code: the plan's time and memory are those of {one.strategy}.",
            ),
            (
                one.checkpointing != "none",
                f"Your script must checkpoint, with the policy '{one.checkpointing}': the file does not.",
            ),
            (
                one.ep > 1,
                f"AutoEP divides the experts of transformers' models of the type {_preset(setting)}, from transformers "
                "5.0 on.",
            ),
            (
                stage == 3 and one.dp_replicate > 1,
                "hpZ gathers parameters within a node, but shards gradients and optimizer state over all ranks.",
            ),
            (
                stage == 3 and not one.implementation.reshard,
                "ZeRO-3 frees gathered parameters after forward; the plan keeps them.",
            ),
            (
                extra > 0,
                f"ZeRO-3 also keeps parameters in {one.precision}, gradients in fp32 and two buckets of them: "
                f"{extra / GIB:.2f} GiB more than a plan of fsdp2.",
            ),
            tuned(setting),
            (one.implementation.compiled, "The file does not compile blocks: call engine.compile() in your script."),
            reduces(setting, "DeepSpeed", each=stage >= 2),
        ),
        extra_bytes=extra,
    )


def _layer(model: ModelSpec) -> int:
    """The size of buckets in parameters: a layer's, in the mean, but no more than by default."""
    return min(500_000_000, (model.params - model.vocab * model.dim * (1 if model.tied else 2)) // model.n_layers)


def _extra(setting: Setting) -> float:
    """Bytes of ZeRO-3 that FSDP2 does without, as a dry run shows them."""
    one, element = setting.job, 4 if setting.job.precision == "fp32" else 2
    shard = setting.model.params / one.data_ranks
    cast = 0 if one.precision == "fp32" else element
    return shard * (0 if one.offload else cast + 4) + 2 * element * _layer(setting.model)


def _preset(setting: Setting) -> str:
    """AutoEP's name of the model's family (``deepspeed/module_inject/auto_ep_presets``), which is transformers' too."""
    return "deepseek_v3" if setting.model.latent else "qwen3_moe" if setting.model.query_norm else "mixtral"


def _settings(setting: Setting, stage: int) -> dict[str, Any]:
    one, on_host = setting.job, {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        layer = _layer(setting.model)
        zero |= {"reduce_bucket_size": layer, "stage3_prefetch_bucket_size": layer}
        zero |= {"stage3_max_live_parameters": 2 * layer, "stage3_max_reuse_distance": layer}
    if stage == 3 and one.dp_replicate > 1:
        zero["zero_hpz_partition_size"] = one.dp_shard
    if one.offload:
        zero |= {"offload_optimizer": on_host} | ({"offload_param": on_host} if stage == 3 else {})
    settings: dict[str, Any] = {
        "train_batch_size": one.global_batch,
        "train_micro_batch_size_per_gpu": one.microbatch,
        "gradient_accumulation_steps": one.microbatches,
        "bf16": {"enabled": one.precision == "bf16"},
        "communication_data_type": one.implementation.reduction,
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
    }
    if one.ep > 1:
        settings["expert_parallel"] = {"enabled": True, "autoep_size": one.ep, "preset_model": _preset(setting)}
    if one.offload:
        settings["zero_force_ds_cpu_optimizer"] = False
    if one.checkpointing != "none":
        settings["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return settings
