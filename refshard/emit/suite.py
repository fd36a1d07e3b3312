"""A suite of one case, which ``refshard run`` dry-runs."""

from refshard import resources
from refshard.emit.job import Emitted, Job, above_one, applying, reduces, refuse, refuse_job
from refshard.specs.layers import layers_of_stages, stages_of_rank
from refshard.specs.model import TRAINED, is_factory
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml
from refshard.version import __version__

FILE = "refshard.toml"
MODEL = "model.toml"
PLANNED_ONLY = frozenset({"megatron"})
"""Strategies that plans know and the harness does not."""
COMPILED = {"fsdp2": "fsdp2-compiled", "refshard-fsdp": "refshard-fsdp-compiled",
            "refshard-yafsdp": "refshard-yafsdp-compiled", "simplefsdp": "simplefsdp"}  # fmt: skip
"""The strategy that is another with compiled blocks."""
STAGED = ("ddp", "fsdp2")
"""Strategies that compose with a pipeline and with context parallelism."""
SPLIT = ("fsdp2", "refshard-replicate", "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
"""Strategies that compose with tensor parallelism."""
SPLIT_BY_SEQUENCE = ("fsdp2",)
"""Those whose norms and residuals tensor parallelism splits by sequence."""
REDUCES_ONCE = frozenset({"ddp", "refshard-replicate", "refshard-zero1", "accelerate", "hf-trainer"})
UNSHARDED = frozenset({"ddp", "fsdp1-no-shard", "refshard-replicate"})
"""Strategies that replicate over all ranks, and so have no replicas."""


def emit(job: Job) -> Emitted:
    """The suite, and refshard's command.

    Raises:
        SpecError: no dry run can be so.
    """
    one, preset = job.configuration, job.model_name in resources.model_profiles()
    _check(job)
    replicated = one.strategy in UNSHARDED
    case = {
        "strategy": one.strategy,
        "world_size": one.world_size,
        "model": job.model_name if preset else MODEL,
        "global_batch": one.global_batch,
        "seq_len": job.seq_len,
        "microbatches": one.microbatches,
        "checkpointing": _checkpointing(job),
        "precision": one.precision,
        "replicas": 1 if replicated else one.replicate,
        "tensor_parallel": one.tensor,
    }
    if one.tensor > 1 and one.strategy in SPLIT_BY_SEQUENCE:
        case["sequence_parallel"] = True
    if one.context > 1:
        case["context_parallel"] = one.context
    if one.pipeline > 1:
        case |= {"pipeline_parallel": one.pipeline, "interleave": one.interleave, "schedule": one.schedule}
    case |= {"fidelity": "dryrun", "cluster": job.cluster_name}
    suite = SuiteSpec(name="emitted", about=f"{job.title}: a dry run", matrix=case)
    suite.cases()
    return Emitted(
        files={FILE: to_toml(suite), **({} if preset else {MODEL: to_toml(job.model)})},
        command=f"refshard run {FILE}",
        version=__version__,
        notes=applying(
            (
                is_factory(job.model_name),
                f"The dry run is of refshard's Llama with the dimensions of {job.model_name}, not of its module.",
            ),
            (one.reduction == "bf16", "The dry run reduces gradients in fp32; the plan reduces them in bf16."),
            (
                not one.reshard and not replicated,
                "The dry run frees gathered parameters as the strategy does; the plan keeps them after forward.",
            ),
            *([reduces(job, one.strategy, each=one.strategy not in REDUCES_ONCE)] if one.pipeline == 1 else []),
            (
                one.tensor > 1 and one.strategy not in SPLIT_BY_SEQUENCE,
                "Tensor parallelism in the dry run does not split norms and residuals by sequence; the plan does.",
            ),
        ),
    )


def _check(job: Job) -> None:
    one = job.configuration
    refuse(
        "refshard",
        (one.strategy in PLANNED_ONLY, f"strategy must be one that it runs, got '{one.strategy}'; emit for megatron"),
    )
    refuse_job("refshard", job, llama=TRAINED)
    staged = above_one(job, "pipeline", "context", remedy=f"plan with --strategy {','.join(STAGED)}")
    split = above_one(job, "tensor", remedy="plan with --strategy fsdp2")
    compiles = one.compiled or one.strategy.endswith("-compiled") or one.strategy == "simplefsdp"
    refuse(
        "refshard",
        *(staged if one.strategy not in STAGED else []),
        *(split if one.strategy not in SPLIT else []),
        (
            one.schedule == "zero-bubble" and one.pipeline > 1 and one.checkpointing != "none",
            f"checkpointing must be 'none' for schedule 'zero-bubble', got '{one.checkpointing}'; plan with "
            "--checkpoint none or --schedule 1f1b",
        ),
        (
            one.strategy not in UNSHARDED and one.replicate > 1 and one.shard * one.context == 1,
            f"shard * context must be at least 2 where replicate = {one.replicate}, got 1; plan with --strategy ddp",
        ),
        (one.precision == "fp8", "precision must be 'bf16' or 'fp32', got 'fp8'; emit for torchtitan or megatron"),
        (one.offload, "offload must be false, got true: it is not dry-run; leave out --offload"),
        (
            compiles,
            "compiled must be false, got true: compiled cases are not dry-run; measure the strategy "
            f"'{COMPILED.get(one.strategy, 'fsdp2-compiled')}' on GPUs instead",
        ),
    )


def _checkpointing(job: Job) -> str | list[list[int]]:
    """The policy; layers that are listed are one value of the matrix, hence a list in a list. A number is of those of
    a pipeline's rank, and is listed of each.
    """
    one, policy = job.configuration, job.configuration.checkpointing
    if not policy.isdecimal():
        return policy
    stages = layers_of_stages(job.model.n_layers, one.pipeline * one.interleave)
    layers: list[int] = []
    for rank in range(one.pipeline):
        own = [layer for stage in stages_of_rank(rank, one.pipeline, one.interleave) for layer in stages[stage]]
        layers += own[: int(policy)]
    return [sorted(layers)] if layers else "none"
