"""Jobs that the tests emit: a small grid over what each tool can be asked for."""

from typing import Any

from refshard.emit.job import Job
from refshard.specs.cluster import load_cluster
from refshard.specs.configuration import Configuration
from refshard.specs.model import load_model


def job(*, model: str = "llama3-8b", cluster: str = "dgx-h100x32", seq_len: int = 8192, **fields: Any) -> Job:
    """A job; by default of Llama 3 8B with sequences of 8,192 tokens."""
    return Job(
        configuration=Configuration(**{"strategy": "fsdp2", **fields}),
        model=load_model(model),
        model_name=model,
        cluster=load_cluster(cluster),
        cluster_name=cluster,
        seq_len=seq_len,
    )


TORCHTITAN: dict[str, Job] = {
    "fsdp": job(shard=8, checkpointing="selective"),
    "hybrid": job(shard=8, replicate=4, microbatch=2, microbatches=2, checkpointing="full", reshard=False),
    "ddp": job(strategy="ddp", replicate=8),
    "tensor-context": job(shard=2, tensor=4, context=4, compiled=True, checkpointing="full"),
    "interleaved": job(
        model="llama3-70b", shard=8, tensor=8, pipeline=4, interleave=2, schedule="interleaved", microbatches=16,
        checkpointing="full", reshard=False,
    ),
    "1f1b": job(model="llama3-70b", shard=4, pipeline=2, microbatches=4, offload=True),
    "zero-bubble": job(shard=2, pipeline=4, interleave=2, schedule="zero-bubble", microbatches=8),
    "1b": job(model="llama3.2-1b", shard=8, precision="fp32", strategy="fsdp2-compiled"),
    "3b": job(model="llama3.2-3b", shard=8, strategy="fsdp2-tuned"),
    "405b": job(model="llama3.1-405b", shard=16, tensor=8, checkpointing="full"),
    "simplefsdp": job(strategy="simplefsdp", shard=8, checkpointing="selective"),
    "fp8": job(shard=8, precision="fp8", compiled=True),
}  # fmt: skip
ACCELERATE: dict[str, Job] = {
    "fsdp": job(shard=8, checkpointing="full", microbatches=4),
    "hybrid": job(shard=8, replicate=2, reshard=False),
    "tensor": job(shard=2, tensor=4, precision="fp32"),
    "context": job(shard=4, context=2, compiled=True),
    "offload": job(strategy="accelerate", shard=8, offload=True),
    "fp8": job(shard=8, precision="fp8", compiled=True),
    "fsdp1": job(strategy="fsdp1", shard=8, replicate=2),
    "ddp": job(strategy="ddp", replicate=8, microbatches=2),
}
MEGATRON: dict[str, Job] = {
    "distributed": job(strategy="megatron", shard=8, microbatches=4),
    "instances": job(strategy="megatron", shard=4, replicate=2, reduction="bf16", checkpointing="full"),
    "interleaved": job(
        strategy="megatron", model="llama3.1-405b", shard=8, tensor=8, context=2, pipeline=7, interleave=9,
        schedule="interleaved", microbatches=14, checkpointing="9", precision="fp8", cluster="dgx-h100x112",
    ),
    "1f1b": job(strategy="megatron", model="llama3-70b", shard=2, tensor=8, pipeline=4, microbatches=8, offload=True),
    "tied": job(strategy="refshard-zero1", model="llama3.2-1b", shard=8, checkpointing="4", precision="fp32"),
    "ddp": job(strategy="ddp", replicate=8),
    "fsdp": job(strategy="megatron-fsdp", shard=8),
}  # fmt: skip
DEEPSPEED: dict[str, Job] = {
    "zero3": job(shard=8, microbatch=2, microbatches=4, checkpointing="full"),
    "hpz": job(strategy="deepspeed-zero3", shard=8, replicate=4, reshard=False),
    "zero2": job(strategy="deepspeed-zero2", shard=8, reduction="bf16", compiled=True),
    "zero1-offload": job(strategy="deepspeed-zero1", shard=8, offload=True),
    "zero3-offload": job(strategy="refshard-fsdp", shard=8, offload=True),
    "ddp": job(strategy="ddp", replicate=8, precision="fp32", microbatches=2),
}
REFSHARD: dict[str, Job] = {
    "fsdp": job(shard=8, checkpointing="selective"),
    "hybrid": job(strategy="refshard-yafsdp", shard=8, replicate=4, microbatch=2, microbatches=2, reduce_each=False),
    "tensor": job(shard=8, tensor=8, checkpointing="5"),
    "ddp": job(strategy="ddp", replicate=8, reduction="bf16", reduce_each=False),
    "engine-tensor": job(strategy="refshard-zero1", shard=4, tensor=2),
    "pipeline": job(
        shard=2, replicate=2, tensor=2, context=2, pipeline=2, interleave=2, schedule="interleaved", microbatches=4,
        checkpointing="3",
    ),
    "zero-bubble": job(shard=4, pipeline=2, schedule="zero-bubble", microbatches=4),
    "ddp-pipeline": job(strategy="ddp", replicate=2, context=2, pipeline=2, microbatches=2, checkpointing="full"),
}  # fmt: skip
EVERY: dict[str, dict[str, Job]] = {
    "torchtitan": TORCHTITAN,
    "accelerate": ACCELERATE,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "refshard": REFSHARD,
}
