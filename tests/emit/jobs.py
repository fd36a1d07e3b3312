"""Jobs that the tests emit: a small grid over what each tool can be asked for."""

from typing import Any

from refshard.emit.tool import Setting
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from tests.plan.made import job as made_job


def job(*, cluster: str = "dgx-h100x32", **fields: Any) -> Setting:
    """A job; by default of Llama 3 8B with sequences of 8,192 tokens."""
    made = made_job(cluster=cluster, **fields)
    return Setting(job=made, model=load_model(made.model), cluster=load_cluster(cluster))


TORCHTITAN: dict[str, Setting] = {
    "fsdp": job(dp_shard=8, checkpointing="selective"),
    "hybrid": job(dp_shard=8, dp_replicate=4, microbatch=2, microbatches=2, checkpointing="full", reshard=False),
    "ddp": job(strategy="ddp", dp_shard=8),
    "tensor-context": job(dp_shard=2, tp=4, cp=4, compiled=True, checkpointing="full"),
    "interleaved": job(
        model="llama3-70b", dp_shard=8, tp=8, pp=4, interleave=2, schedule="interleaved", microbatches=16,
        checkpointing="full", reshard=False,
    ),
    "1f1b": job(model="llama3-70b", dp_shard=4, pp=2, microbatches=4, offload=True),
    "zero-bubble": job(dp_shard=2, pp=4, interleave=2, schedule="zero-bubble", microbatches=8),
    "1b": job(model="llama3.2-1b", dp_shard=8, precision="fp32", strategy="fsdp2-compiled"),
    "3b": job(model="llama3.2-3b", dp_shard=8, strategy="fsdp2-tuned"),
    "405b": job(model="llama3.1-405b", dp_shard=16, tp=8, checkpointing="full"),
    "simplefsdp": job(strategy="simplefsdp", dp_shard=8, checkpointing="selective"),
    "fp8": job(dp_shard=8, precision="fp8", compiled=True),
    "qwen3": job(model="qwen3-32b", dp_shard=4, tp=2, checkpointing="full"),
    "experts": job(model="qwen3-30b-a3b", dp_shard=8, ep=8, checkpointing="full"),
    "experts-simplefsdp": job(model="qwen3-235b-a22b", strategy="simplefsdp", dp_shard=32, ep=16),
    "latent": job(
        model="deepseek-v3", dp_shard=32, dp_replicate=2, tp=2, ep=64, checkpointing="full", precision="fp8",
        compiled=True,
    ),
}  # fmt: skip
ACCELERATE: dict[str, Setting] = {
    "fsdp": job(dp_shard=8, checkpointing="full", microbatches=4),
    "hybrid": job(dp_shard=8, dp_replicate=2, reshard=False),
    "tensor": job(dp_shard=2, tp=4, precision="fp32"),
    "context": job(dp_shard=4, cp=2, compiled=True),
    "offload": job(strategy="accelerate", dp_shard=8, offload=True),
    "fp8": job(dp_shard=8, precision="fp8", compiled=True),
    "fsdp1": job(strategy="fsdp1", dp_shard=8, dp_replicate=2),
    "ddp": job(strategy="ddp", dp_shard=8, microbatches=2),
    "experts": job(model="mixtral-8x7b", dp_shard=16, checkpointing="full"),
    "single": job(strategy="single", model="llama3.2-1b", tuning="qlora", optimizer="adamw-8bit"),
    "gemma": job(model="gemma3-12b", dp_shard=8, tuning="lora"),
}
MEGATRON: dict[str, Setting] = {
    "distributed": job(strategy="megatron", dp_shard=8, microbatches=4),
    "instances": job(strategy="megatron", dp_shard=4, dp_replicate=2, reduction="bf16", checkpointing="full"),
    "interleaved": job(
        strategy="megatron", model="llama3.1-405b", dp_shard=8, tp=8, cp=2, pp=7, interleave=9,
        schedule="interleaved", microbatches=14, checkpointing="first-9", precision="fp8", cluster="dgx-h100x112",
    ),
    "1f1b": job(strategy="megatron", model="llama3-70b", dp_shard=2, tp=8, pp=4, microbatches=8, offload=True),
    "tied": job(strategy="refshard-zero1", model="llama3.2-1b", dp_shard=8, checkpointing="first-4", precision="fp32"),
    "ddp": job(strategy="ddp", dp_shard=8),
    "fsdp": job(strategy="megatron-fsdp", dp_shard=8),
    "nvfp4": job(strategy="megatron", dp_shard=8, precision="nvfp4", cluster="gb200-nvl72"),
    "qwen3": job(strategy="megatron", model="qwen3-8b", dp_shard=4, tp=2),
    "qwen2.5": job(strategy="megatron", model="qwen2.5-7b", dp_shard=4, tp=2),
    "mixtral": job(strategy="megatron", model="mixtral-8x7b", dp_shard=4, tp=2, pp=4, microbatches=4),
    "experts": job(strategy="megatron", model="qwen3-30b-a3b", dp_shard=4, tp=2, ep=8, checkpointing="full"),
    "latent": job(strategy="megatron", model="deepseek-v3", dp_shard=16, tp=4, ep=32, checkpointing="full"),
}  # fmt: skip
DEEPSPEED: dict[str, Setting] = {
    "zero3": job(dp_shard=8, microbatch=2, microbatches=4, checkpointing="full"),
    "hpz": job(strategy="deepspeed-zero3", dp_shard=8, dp_replicate=4, reshard=False),
    "zero2": job(strategy="deepspeed-zero2", dp_shard=8, reduction="bf16", compiled=True),
    "zero1-offload": job(strategy="deepspeed-zero1", dp_shard=8, offload=True),
    "zero3-offload": job(strategy="refshard-fsdp", dp_shard=8, offload=True),
    "ddp": job(strategy="ddp", dp_shard=8, precision="fp32", microbatches=2),
    "mixtral": job(strategy="deepspeed-zero2", model="mixtral-8x7b", dp_shard=32, ep=8),
    "experts": job(model="qwen3-30b-a3b", dp_shard=8, ep=8, checkpointing="full", optimizer="adamw-8bit"),
    "latent": job(model="deepseek-v3", dp_shard=256, ep=32, checkpointing="full"),
}
REFSHARD: dict[str, Setting] = {
    "fsdp": job(dp_shard=8, checkpointing="selective"),
    "hybrid": job(
        strategy="refshard-yafsdp", dp_shard=8, dp_replicate=4, microbatch=2, microbatches=2, reduce_each=False,
    ),
    "tensor": job(dp_shard=8, tp=8, checkpointing="first-5"),
    "ddp": job(strategy="ddp", dp_shard=8, reduction="bf16", reduce_each=False),
    "engine-tensor": job(strategy="refshard-zero1", dp_shard=4, tp=2),
    "pipeline": job(
        dp_shard=2, dp_replicate=2, tp=2, cp=2, pp=2, interleave=2, schedule="interleaved", microbatches=4,
        checkpointing="first-3",
    ),
    "zero-bubble": job(dp_shard=4, pp=2, schedule="zero-bubble", microbatches=4),
    "ddp-pipeline": job(strategy="ddp", dp_shard=2, cp=2, pp=2, microbatches=2, checkpointing="full"),
}  # fmt: skip
EVERY: dict[str, dict[str, Setting]] = {
    "torchtitan": TORCHTITAN,
    "accelerate": ACCELERATE,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "refshard": REFSHARD,
}
