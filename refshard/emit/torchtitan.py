"""torchtitan 0.3.0: a Python module with one configuration function, which ``--module`` and ``--config`` name.

torchtitan's wheel has no configuration files since 0.3.0; its ``ConfigManager`` imports the module from the folder in
which the job starts.
"""

from refshard.emit.tool import (
    Emitted,
    Setting,
    above_one,
    applying,
    filled,
    reduces,
    refuse,
    refuse_job,
    uneven,
    unknown_checkpointing,
)

VERSION = "0.3.0"
MODULE = "refshard_torchtitan"
FUNCTION = "configuration"
STRATEGIES = ("ddp", "fsdp2", "fsdp2-tuned", "fsdp2-compiled", "simplefsdp")
FLAVORS: dict[tuple[int, int, int, int, int, int, bool], tuple[str, str]] = {
    # dim, layers, heads, KV heads, feed-forward, vocabulary, tied
    (2048, 16, 32, 8, 8192, 128256, True): ("1B", "Llama-3.2-1B"),
    (3072, 28, 24, 8, 8192, 128256, True): ("3B", "Llama-3.2-3B"),
    (4096, 32, 32, 8, 14336, 128256, False): ("8B", "Llama-3.1-8B"),
    (8192, 80, 64, 8, 28672, 128256, False): ("70B", "Llama-3.1-70B"),
    (16384, 126, 128, 8, 53248, 128256, False): ("405B", "Llama-3.1-405B"),
}
"""torchtitan's Llama 3 flavors (``torchtitan/models/llama3/__init__.py``) and their assets, by dimensions."""
POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def emit(setting: Setting) -> Emitted:
    """The module, and torchrun's command.

    Raises:
        SpecError: torchtitan cannot train so.
    """
    one, m = setting.job, setting.model
    graph, compiles = (
        one.strategy == "simplefsdp",
        one.implementation.compiled or one.strategy in ("fsdp2-compiled", "simplefsdp"),
    )
    known = FLAVORS.get((m.dim, m.n_layers, m.n_heads, m.n_kv_heads, m.ffn_dim, m.vocab, m.tied))
    refuse_job("torchtitan", setting, strategies=STRATEGIES, llama=())
    refuse(
        "torchtitan",
        (
            known is None,
            f"the model must have the dimensions of a Llama 3 flavor ({', '.join(name for name, _ in FLAVORS.values())}"
            f"), got {m.n_layers} layers of width {m.dim}; choose one of these models, or emit for another tool",
        ),
        unknown_checkpointing(setting, tuple(POLICIES)),
        *uneven(setting),
        *(above_one(setting, "pp", remedy="plan with --strategy fsdp2 or --pp 1") if graph else []),
        (
            graph and one.checkpointing == "full",
            "checkpointing must be 'none' or 'selective' for simplefsdp, got 'full'; plan with --checkpointing "
            "none,selective",
        ),
        (graph and one.offload, "offload must be false for simplefsdp, got true; plan with --strategy fsdp2"),
        (
            one.strategy == "ddp" and one.cp > 1,
            f"cp must be 1, got {one.cp}; its cp ranks shard parameters: plan with --strategy fsdp2",
        ),
        (
            one.schedule == "zero-bubble" and one.interleave == 1 and one.pp > 1,
            "interleave must be at least 2 for schedule 'zero-bubble', got 1; plan with --interleave 2 or --schedule "
            "1f1b",
        ),
        (
            one.precision == "fp8" and not compiles,
            "compiled must be true for precision 'fp8', got false; plan with --compile yes",
        ),
    )
    assert known is not None
    text = filled(
        "torchtitan.py.j2", setting, version=VERSION, function=FUNCTION, graph=graph, compiles=compiles,
        flavor=known[0], assets=known[1], policy=POLICIES[str(one.checkpointing)],
    )  # fmt: skip
    return Emitted(
        files={f"{MODULE}.py": text},
        command=f"{setting.torchrun} -m torchtitan.train --module {MODULE} --config {FUNCTION}",
        version=VERSION,
        notes=applying(
            (
                True,
                "Attention is FlexAttention, which torchtitan compiles: it needs Triton. The plan prices fused "
                "attention.",
            ),
            (
                m.rope_scaling is None,
                "torchtitan's flavors scale RoPE as Llama 3.1 does; this model does not scale it.",
            ),
            (one.strategy == "ddp", "torchtitan replicates with FSDP2, unit by unit, not with DDP's buckets."),
            (
                one.strategy == "fsdp2-tuned",
                "torchtitan has units for the embedding and the head, but not the other settings of fsdp2-tuned.",
            ),
            (graph, "SimpleFSDP is in torchtitan's experiment graph_trainer, which compiles the whole model."),
            (
                one.implementation.reduction == "bf16",
                "torchtitan reduces gradients in fp32; the plan reduces them in bf16.",
            ),
            (one.precision == "fp8", "fp8 scales by row (torchao's recipe 'rowwise'); the head stays in bf16."),
            reduces(setting, "torchtitan", each=one.pp == 1),
        ),
    )
