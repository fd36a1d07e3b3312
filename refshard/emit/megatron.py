"""Megatron-LM core_v0.19.0: a shell script that starts ``pretrain_gpt.py``.

The wheel of megatron-core has no parser of these arguments. They are defined in Megatron-LM's
``megatron/training/arguments.py`` at commit 5be9626709af2722333bf54797c954c09edeada3, the tag core_v0.19.0.
"""

import math

from refshard.emit.tool import (
    WHOLE,
    Emitted,
    Setting,
    above_one,
    applying,
    filled,
    preset,
    reduces,
    refuse,
    refuse_job,
    uneven,
)
from refshard.specs.model import is_factory

VERSION = "0.19.0"
COMMIT = "5be9626709af2722333bf54797c954c09edeada3"
FILE = "pretrain.sh"
STRATEGIES = (*WHOLE, "megatron", "megatron-fsdp", "refshard-zero1")
MODELS = ("head_dim", "query_norm", "experts", "latent")
"""The optional fields of a model, beyond a Llama's, that Megatron-LM has arguments for."""
SIGMOID = "deepseek-v3"
"""The preset with routing of its own, which has no fields (DeepSeek-V3's config.json)."""
ROPE = (1.0, 4.0, 8192)
"""The low and high frequency factors and the original context that ``--use-rope-scaling`` has."""


def emit(setting: Setting) -> Emitted:
    """The script, and its command on each node.

    Raises:
        SpecError: Megatron-LM cannot train so.
    """
    one, model, scaling = setting.job, setting.model, setting.model.rope_scaling
    _check(setting)
    sigmoid = preset(model, (SIGMOID,)) is not None
    divisor = math.gcd(128, model.vocab // one.tp) if model.vocab % one.tp == 0 else 1
    return Emitted(
        files={FILE: filled("megatron.sh.j2", setting, version=VERSION, vocabulary_divisor=divisor, sigmoid=sigmoid)},
        command=f"bash {FILE}",
        version=f"core_v{VERSION}",
        notes=applying(
            (True, f"Run the script in a checkout of Megatron-LM at the tag core_v{VERSION}, with Transformer Engine."),
            (
                is_factory(one.model),
                f"The script trains a Llama of the dimensions of {one.model}: compare norms and activation.",
            ),
            (
                model.experts is not None and not sigmoid,
                "Experts are chosen by softmax over the best scores, as by Mixtral and Qwen3; set the coefficient of "
                "the balancing loss to your model's.",
            ),
            (
                one.ep > 1 and not one.implementation.dispatch.startswith("copies"),
                "Tokens go to experts by all-to-all; the plan sends each once to a rank. If DeepEP is installed, add "
                "--moe-token-dispatcher-type flex.",
            ),
            (
                one.strategy == "refshard-zero1",
                "Megatron's distributed optimizer shards what refshard-zero1 shards, with its own buckets.",
            ),
            (
                not one.implementation.compiled,
                "Megatron fuses elementwise kernels by itself; the plan prices them one by one.",
            ),
            (
                scaling is not None
                and (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context) != ROPE,
                "Megatron scales RoPE with the frequency factors 1 and 4 and an original context of 8,192 only.",
            ),
            (one.precision == "fp8", "fp8 is Transformer Engine's hybrid format, scaled by tensor."),
            (
                one.precision == "nvfp4",
                "NVFP4 is Transformer Engine's recipe for all layers, without any left in bf16.",
            ),
            (one.offload, "Megatron offloads the optimizer's state and masters; gradients stay on the GPU."),
            (
                one.precision == "fp32" and one.implementation.reduction == "bf16",
                "Megatron reduces gradients in fp32 where it computes in fp32.",
            ),
            reduces(setting, "Megatron", each=one.strategy == "megatron-fsdp"),
        ),
    )


def _check(setting: Setting) -> None:
    one, model, policy = setting.job, setting.model, str(setting.job.checkpointing)
    fsdp = one.strategy == "megatron-fsdp"
    biases = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim  # of queries, keys and values, as in Qwen 2.5
    refuse_job(
        "megatron",
        setting,
        strategies=STRATEGIES,
        llama=(*MODELS, *(["vectors"] if model.vectors == biases else [])),
    )
    refuse(
        "megatron",
        *uneven(setting),
        (
            one.schedule == "zero-bubble" and one.pp > 1,
            "schedule must be '1f1b' or 'interleaved', got 'zero-bubble'; plan with --schedule 1f1b,interleaved",
        ),
        (
            one.interleave > 1 and one.microbatches % one.pp > 0,
            f"microbatches must be a multiple of pp = {one.pp} for schedule 'interleaved', got "
            f"{one.microbatches}; plan with --schedule 1f1b",
        ),
        (
            one.strategy in WHOLE and one.offload,
            f"offload needs the distributed optimizer, got {one.strategy}; plan with --strategy megatron",
        ),
        *(above_one(setting, "dp_replicate", "pp", remedy="plan with --strategy megatron") if fsdp else []),
        (fsdp and one.offload, "offload must be false for megatron-fsdp, got true; plan with --strategy megatron"),
        (
            policy.startswith("first-") and int(policy[6:]) % one.interleave > 0,
            f"checkpointing must be first-N with N a multiple of interleave = {one.interleave}, got '{policy}'; "
            "plan with --checkpointing full or --schedule 1f1b",
        ),
        (
            not policy.startswith("first-") and policy not in ("none", "full"),
            f"checkpointing must be 'none', 'full' or 'first-N', got '{policy}': its own selective "
            "recomputation keeps other activations; plan with --checkpointing auto",
        ),
    )
