"""Megatron-LM core_v0.16.1: a shell script that starts ``pretrain_gpt.py``.

The wheel of megatron-core has no parser of these arguments. They are defined in Megatron-LM's
``megatron/training/arguments.py`` at commit 55ac7082517c3878ae653c07c09c534b8aed49f6, the tag core_v0.16.1.
"""

import math

from refshard.emit.job import (
    Emitted,
    Job,
    reduces_each,
    reduces_once,
    refuse_above_one,
    refuse_beyond_llama,
    refuse_experts,
    refuse_strategy,
    refuse_uneven,
)
from refshard.errors import SpecError
from refshard.specs.model import ModelSpec, is_factory

VERSION = "0.16.1"
COMMIT = "55ac7082517c3878ae653c07c09c534b8aed49f6"
FILE = "pretrain.sh"
STRATEGIES = ("ddp", "megatron", "megatron-fsdp", "refshard-zero1")
ROPE = (1.0, 4.0, 8192)
"""The low and high frequency factors and the original context that ``--use-rope-scaling`` has."""
Flag = tuple[str, str | int | float | None]
"""An argument and its value; None for a switch."""


def emit(job: Job) -> Emitted:
    """The script, and its command on each node.

    Raises:
        SpecError: Megatron-LM cannot train so.
    """
    _check(job)
    groups = {
        "Model": _model(job.model, job.configuration.tensor),
        "Sequence and batch": _batch(job),
        "Parallelism": _parallelism(job),
        "Data parallelism": _data_parallelism(job),
        "Recomputation and precision": [*_recomputation(job), *_precision(job)],
        "Stand-ins: replace them with your data, tokenizer and learning rate": _stand_ins(job.model),
    }
    lines = ["#!/bin/bash", f"# {job.title}: written by refshard for Megatron-LM core_v{VERSION}.", "set -eu"]
    lines += _environment(job)
    lines.append("arguments=(")
    for title, flags in groups.items():
        lines += [f"    # {title}", *(f"    {_word(flag)}" for flag in flags)]
    lines += [")", f'{job.torchrun} pretrain_gpt.py "${{arguments[@]}}" "$@"']
    return Emitted(
        files={FILE: "\n".join(lines) + "\n"}, command=f"bash {FILE}", version=f"core_v{VERSION}", notes=_notes(job)
    )


def _word(flag: Flag) -> str:
    name, value = flag
    return f"--{name}" if value is None else f"--{name} {value}"


def _check(job: Job) -> None:
    asked = job.configuration
    refuse_strategy("megatron", job, STRATEGIES)
    refuse_experts("megatron", job)
    refuse_beyond_llama("megatron", job, ("head_dim",))
    refuse_uneven("megatron", job)
    if asked.schedule == "zero-bubble" and asked.pipeline > 1:
        raise SpecError(
            "megatron: schedule must be '1f1b' or 'interleaved', got 'zero-bubble'; plan with --schedule "
            "1f1b,interleaved"
        )
    if asked.interleave > 1 and asked.microbatches % asked.pipeline:
        raise SpecError(
            f"megatron: microbatches must be a multiple of pipeline = {asked.pipeline} for schedule 'interleaved', got "
            f"{asked.microbatches}; plan with --schedule 1f1b"
        )
    if asked.strategy == "ddp" and asked.offload:
        raise SpecError("megatron: offload needs the distributed optimizer, got ddp; plan with --strategy megatron")
    if asked.strategy == "megatron-fsdp":
        refuse_above_one("megatron", job, "replicate", "pipeline", remedy="plan with --strategy megatron")
        if asked.offload:
            raise SpecError(
                "megatron: offload must be false for megatron-fsdp, got true; plan with --strategy megatron"
            )
    _recomputation(job)


def _environment(job: Job) -> list[str]:
    """Tensor and context parallelism order kernels by one hardware queue; Megatron-FSDP needs several."""
    asked = job.configuration
    if asked.strategy == "megatron-fsdp" or asked.tensor * asked.context == 1:
        return []
    return ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]


def _model(model: ModelSpec, tensor: int) -> list[Flag]:
    flags: list[Flag] = [
        ("num-layers", model.n_layers),
        ("hidden-size", model.dim),
        ("ffn-hidden-size", model.ffn_dim),
        ("num-attention-heads", model.n_heads),
        ("kv-channels", model.head_dim),
        ("group-query-attention", None),
        ("num-query-groups", model.n_kv_heads),
        ("position-embedding-type", "rope"),
        ("rotary-base", round(model.rope_theta)),
        ("normalization", "RMSNorm"),
        ("norm-epsilon", model.norm_eps),
        ("swiglu", None),
        ("disable-bias-linear", None),
        ("attention-dropout", 0.0),
        ("hidden-dropout", 0.0),
        ("make-vocab-size-divisible-by", math.gcd(128, model.vocab // tensor) if model.vocab % tensor == 0 else 1),
    ]
    if not model.tied:
        flags.append(("untie-embeddings-and-output-weights", None))
    if model.rope_scaling is not None:
        flags += [("use-rope-scaling", None), ("rope-scaling-factor", model.rope_scaling.factor)]
    return flags


def _batch(job: Job) -> list[Flag]:
    return [
        ("seq-length", job.seq_len),
        ("max-position-embeddings", job.seq_len),
        ("micro-batch-size", job.configuration.microbatch),
        ("global-batch-size", job.configuration.global_batch),
    ]


def _parallelism(job: Job) -> list[Flag]:
    asked = job.configuration
    flags: list[Flag] = [
        ("tensor-model-parallel-size", asked.tensor),
        ("pipeline-model-parallel-size", asked.pipeline),
        ("context-parallel-size", asked.context),
    ]
    if asked.tensor > 1:
        flags.append(("sequence-parallel", None))
    if asked.interleave > 1:
        stretch = job.model.n_layers // (asked.pipeline * asked.interleave)
        flags.append(("num-layers-per-virtual-pipeline-stage", stretch))
    return flags


def _data_parallelism(job: Job) -> list[Flag]:
    asked = job.configuration
    if asked.strategy == "ddp":
        return [("overlap-grad-reduce", None)]
    flags: list[Flag] = [("use-distributed-optimizer", None), ("overlap-grad-reduce", None)]
    flags.append(("overlap-param-gather", None))
    if asked.strategy == "megatron-fsdp":
        flags += [
            ("use-megatron-fsdp", None),
            ("data-parallel-sharding-strategy", "optim_grads_params" if asked.reshard else "optim_grads"),
            ("no-gradient-accumulation-fusion", None),
            ("ckpt-format", "fsdp_dtensor"),
        ]
    if asked.replicate > 1:
        flags.append(("num-distributed-optimizer-instances", asked.replicate))
    if asked.offload:
        flags += [("optimizer-cpu-offload", None), ("use-precision-aware-optimizer", None)]
    return flags


def _recomputation(job: Job) -> list[Flag]:
    """The flags of a policy. Megatron's ``block`` counts the layers of a model chunk, of which a rank has several
    where stages interleave.

    Raises:
        SpecError: Megatron-LM does not have the policy.
    """
    asked = job.configuration
    policy = asked.checkpointing
    if policy == "none":
        return []
    if policy == "full":
        method, layers = "uniform", 1
    elif policy.isdecimal() and int(policy) % asked.interleave == 0:
        method, layers = "block", int(policy) // asked.interleave
    elif policy.isdecimal():
        raise SpecError(
            f"megatron: checkpointing must be a multiple of interleave = {asked.interleave} layers, got {policy}; "
            "plan with --checkpoint full or --schedule 1f1b"
        )
    else:
        raise SpecError(
            f"megatron: checkpointing must be 'none', 'full' or a number of layers, got '{policy}': its own selective "
            "recomputation keeps other activations; plan with --checkpoint auto"
        )
    return [("recompute-granularity", "full"), ("recompute-method", method), ("recompute-num-layers", layers)]


def _precision(job: Job) -> list[Flag]:
    asked = job.configuration
    if asked.precision == "fp32":
        return []
    flags: list[Flag] = [("bf16", None)]
    if asked.precision == "fp8":
        flags += [("fp8-format", "hybrid"), ("fp8-recipe", "tensorwise")]
    flags.append(("grad-reduce-in-bf16" if asked.reduction == "bf16" else "accumulate-allreduce-grads-in-fp32", None))
    return flags


def _stand_ins(model: ModelSpec) -> list[Flag]:
    """Made-up data; the stand-in tokenizer adds one word to its vocabulary."""
    return [
        ("mock-data", None),
        ("tokenizer-type", "NullTokenizer"),
        ("vocab-size", model.vocab - 1),
        ("train-iters", 100),
        ("lr", 3e-4),
    ]


def _notes(job: Job) -> tuple[str, ...]:
    asked, scaling = job.configuration, job.model.rope_scaling
    notes = [f"Run the script in a checkout of Megatron-LM at the tag core_v{VERSION}, with Transformer Engine."]
    if is_factory(job.model_name):
        notes.append(f"The script trains a Llama of the dimensions of {job.model_name}: compare norms and activation.")
    if asked.strategy == "refshard-zero1":
        notes.append("Megatron's distributed optimizer shards what refshard-zero1 shards, with its own buckets.")
    if not asked.compiled:
        notes.append("Megatron fuses elementwise kernels by itself; the plan prices them one by one.")
    if scaling is not None and (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context) != ROPE:
        notes.append("Megatron scales RoPE with the frequency factors 1 and 4 and an original context of 8,192 only.")
    if asked.precision == "fp8":
        notes.append("fp8 is Transformer Engine's hybrid format, scaled by tensor.")
    if asked.offload:
        notes.append("Megatron offloads the optimizer's state and masters; gradients stay on the GPU.")
    if asked.precision == "fp32" and asked.reduction == "bf16":
        notes.append("Megatron reduces gradients in fp32 where it computes in fp32.")
    reduces = reduces_each if asked.strategy == "megatron-fsdp" else reduces_once
    return (*notes, *reduces(job, "Megatron"))
