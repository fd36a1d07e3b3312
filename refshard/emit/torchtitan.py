"""torchtitan of 2026-08-21: a Python module with one configuration function, which ``--module`` and ``--config`` name.

torchtitan's last release, 0.3.0, lacks what its main branch has since: the settings of the batch in tokens, no backend
``full_dtensor``. The names are those of the commit :data:`COMMIT`, in ``torchtitan/config/configs.py`` and each model's
``config_registry.py``. Its ``ConfigManager`` imports the module from the folder in which the job starts.
"""

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
    unknown_checkpointing,
)
from refshard.quantities import GIB

COMMIT = "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"
VERSION = f"main of 2026-08-21 ({COMMIT[:8]})"
MODULE = "refshard_torchtitan"
FUNCTION = "configuration"
STRATEGIES = (*WHOLE, "fsdp2", "fsdp2-tuned", "fsdp2-compiled", "simplefsdp")
FLAVORS: dict[str, tuple[str, str, str]] = {
    "llama3.2-1b": ("llama3", "1B", "Llama-3.2-1B"),
    "llama3.2-3b": ("llama3", "3B", "Llama-3.2-3B"),
    "llama3-8b": ("llama3", "8B", "Llama-3.1-8B"),
    "llama3-70b": ("llama3", "70B", "Llama-3.1-70B"),
    "llama3.1-405b": ("llama3", "405B", "Llama-3.1-405B"),
    "qwen3-0.6b": ("qwen3", "0.6B", "Qwen3-0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B", "Qwen3-1.7B"),
    "qwen3-4b": ("qwen3", "4B", "Qwen3-4B"),
    "qwen3-8b": ("qwen3", "8B", "Qwen3-8B"),
    "qwen3-14b": ("qwen3", "14B", "Qwen3-14B"),
    "qwen3-32b": ("qwen3", "32B", "Qwen3-32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "Qwen3-30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B", "Qwen3-235B-A22B"),
    "deepseek-v3": ("deepseek_v3", "671B", "DeepSeek-V3.1-Base"),
}
"""The package of ``torchtitan/models``, the flavor and the assets of each preset that torchtitan has."""
BASES = {"llama3": "llama3_8b", "qwen3": "qwen3_14b", "deepseek_v3": "deepseek_v3_671b"}
"""The configuration that ours departs from, by package."""
POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
GRAPH_POLICIES = {"none": "default", "full": "full", "selective": "eager"}
"""The memory policy of the experiment ``graph_trainer``."""


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
    known = preset(m, FLAVORS)
    refuse_job("torchtitan", setting, strategies=STRATEGIES)
    refuse(
        "torchtitan",
        (
            known is None,
            f"the model must have the dimensions of one of its flavors ({', '.join(FLAVORS)}), got {m.n_layers} layers "
            f"of width {m.dim}; choose one of these models, or emit for another tool",
        ),
        unknown_checkpointing(setting, tuple(POLICIES)),
        *uneven(setting),
        *(above_one(setting, "pp", "cp", remedy="plan with --strategy fsdp2") if graph else []),
        (
            m.tied and one.pp > 1,
            f"pp must be 1 for {one.model}, which ties its embedding to its head, got {one.pp}; plan with --pp 1",
        ),
        (graph and one.offload, "offload must be false for simplefsdp, got true; plan with --strategy fsdp2"),
        (
            one.strategy == "ddp" and one.cp * one.ep > 1,
            f"cp and ep must be 1, got {one.cp} and {one.ep}; their ranks shard parameters: plan with --strategy fsdp2",
        ),
        (
            one.dp_shard * one.cp * one.tp % one.ep > 0,
            f"ep must divide dp_shard * cp * tp = {one.dp_shard * one.cp * one.tp}, got {one.ep}; plan with a smaller "
            "--ep or --dp-replicate",
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
    family, flavor, assets = FLAVORS[known]
    tokens, width = one.microbatch * one.seq_len / one.cp, (m.n_heads + 2 * m.n_kv_heads) * m.head_dim / one.tp
    kept = 2 * tokens * width * m.n_layers / one.pp if one.checkpointing == "selective" else 0.0  # in bf16
    policies = GRAPH_POLICIES if graph else POLICIES
    text = filled(
        "torchtitan.py.j2", setting, version=VERSION, function=FUNCTION, graph=graph, compiles=compiles, family=family,
        base=BASES[family], flavor=flavor, assets=assets, policy=policies[str(one.checkpointing)],
    )  # fmt: skip
    return Emitted(
        files={f"{MODULE}.py": text},
        command=f"{setting.torchrun} -m torchtitan.train --module {MODULE} --config {FUNCTION}",
        version=VERSION,
        notes=applying(
            (
                True,
                f"No release has these options yet. With a nightly build of torch, install "
                f"git+https://github.com/pytorch/torchtitan@{COMMIT}.",
            ),
            (
                True,
                "Attention is FlexAttention, which torchtitan compiles: it needs Triton. The plan prices fused "
                "attention.",
            ),
            (
                True,
                "The loss is not chunked, as in the plan; torchtitan's ChunkedLossWrapper would need less memory.",
            ),
            (
                family == "llama3" and m.rope_scaling is None,
                "torchtitan's flavors scale RoPE as Llama 3.1 does; this model does not scale it.",
            ),
            (
                one.cp > 1,
                "Context parallelism needs the backend spmd_types.",
            ),
            (
                one.checkpointing == "selective",
                f"Compiled FlexAttention keeps its queries, keys and values: {kept / GIB:.2f} GiB a microbatch more "
                "than in the plan.",
            ),
            (one.strategy == "ddp", "torchtitan replicates with FSDP2, unit by unit, not with DDP's buckets."),
            (
                one.strategy == "fsdp2-tuned",
                "torchtitan has units for the embedding and the head, but not the other settings of fsdp2-tuned.",
            ),
            (graph, "SimpleFSDP is in torchtitan's experiment graph_trainer, which compiles the whole model."),
            (
                graph and one.checkpointing == "none",
                "graph_trainer always recomputes cheap operators: it has no setting that keeps every activation.",
            ),
            (
                one.implementation.reduction == "bf16",
                "torchtitan reduces gradients in fp32; the plan reduces them in bf16.",
            ),
            (one.precision == "fp8", "fp8 scales by row (torchao's recipe 'rowwise'); the head stays in bf16."),
            reduces(setting, "torchtitan", each=one.pp == 1),
        ),
        extra_bytes=kept,
    )
