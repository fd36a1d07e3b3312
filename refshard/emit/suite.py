"""A suite of one case, which ``refshard run`` dry-runs."""

from typing import Any

from refshard import resources
from refshard.emit.job import Emitted, Job, refuse_above_one, refuse_beyond_llama, refuse_experts
from refshard.errors import SpecError
from refshard.specs.configuration import Configuration
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
    _check(job)
    suite = SuiteSpec(name="emitted", about=f"{job.title}: a dry run", matrix=_case(job))
    suite.cases()
    model = {} if _is_preset(job) else {MODEL: to_toml(job.model)}
    return Emitted(
        files={FILE: to_toml(suite), **model},
        command=f"refshard run {FILE}",
        version=__version__,
        notes=_notes(job),
    )


def _is_preset(job: Job) -> bool:
    return job.model_name in resources.model_profiles()


def _check(job: Job) -> None:
    asked = job.configuration
    if asked.strategy in PLANNED_ONLY:
        raise SpecError(f"refshard: strategy must be one that it runs, got '{asked.strategy}'; emit for megatron")
    refuse_experts("refshard", job)
    refuse_beyond_llama("refshard", job, TRAINED)
    if asked.strategy not in STAGED:
        refuse_above_one("refshard", job, "pipeline", "context", remedy=f"plan with --strategy {','.join(STAGED)}")
    if asked.strategy not in SPLIT:
        refuse_above_one("refshard", job, "tensor", remedy="plan with --strategy fsdp2")
    if asked.schedule == "zero-bubble" and asked.pipeline > 1 and asked.checkpointing != "none":
        raise SpecError(
            f"refshard: checkpointing must be 'none' for schedule 'zero-bubble', got '{asked.checkpointing}'; plan "
            "with --checkpoint none or --schedule 1f1b"
        )
    if asked.strategy not in UNSHARDED and asked.replicate > 1 and asked.shard * asked.context == 1:
        raise SpecError(
            f"refshard: shard * context must be at least 2 where replicate = {asked.replicate}, got 1; plan with "
            "--strategy ddp"
        )
    if asked.precision == "fp8":
        raise SpecError("refshard: precision must be 'bf16' or 'fp32', got 'fp8'; emit for torchtitan or megatron")
    if asked.offload:
        raise SpecError("refshard: offload must be false, got true: it is not dry-run; leave out --offload")
    if asked.compiled or asked.strategy.endswith("-compiled") or asked.strategy == "simplefsdp":
        measured = COMPILED.get(asked.strategy, "fsdp2-compiled")
        raise SpecError(
            "refshard: compiled must be false, got true: compiled cases are not dry-run; measure the strategy "
            f"'{measured}' on GPUs instead"
        )


def _case(job: Job) -> dict[str, Any]:
    asked = job.configuration
    return {
        "strategy": asked.strategy,
        "world_size": asked.world_size,
        "model": job.model_name if _is_preset(job) else MODEL,
        "global_batch": asked.global_batch,
        "seq_len": job.seq_len,
        "microbatches": asked.microbatches,
        "checkpointing": _checkpointing(job),
        "precision": asked.precision,
        "replicas": 1 if asked.strategy in UNSHARDED else asked.replicate,
        "tensor_parallel": asked.tensor,
        **({"sequence_parallel": True} if asked.tensor > 1 and asked.strategy in SPLIT_BY_SEQUENCE else {}),
        **({"context_parallel": asked.context} if asked.context > 1 else {}),
        **(_pipeline(asked) if asked.pipeline > 1 else {}),
        "fidelity": "dryrun",
        "cluster": job.cluster_name,
    }


def _pipeline(asked: Configuration) -> dict[str, Any]:
    return {"pipeline_parallel": asked.pipeline, "interleave": asked.interleave, "schedule": asked.schedule}


def _checkpointing(job: Job) -> str | list[list[int]]:
    """The policy; layers that are listed are one value of the matrix, hence a list in a list. A number is of those of
    a pipeline's rank, and is listed of each.
    """
    asked, policy = job.configuration, job.configuration.checkpointing
    if not policy.isdecimal():
        return policy
    stages = layers_of_stages(job.model.n_layers, asked.pipeline * asked.interleave)
    layers: list[int] = []
    for rank in range(asked.pipeline):
        own = [layer for stage in stages_of_rank(rank, asked.pipeline, asked.interleave) for layer in stages[stage]]
        layers += own[: int(policy)]
    return [sorted(layers)] if layers else "none"


def _notes(job: Job) -> tuple[str, ...]:
    asked = job.configuration
    notes = []
    if is_factory(job.model_name):
        notes.append(f"The dry run is of refshard's Llama with the dimensions of {job.model_name}, not of its module.")
    if asked.reduction == "bf16":
        notes.append("The dry run reduces gradients in fp32; the plan reduces them in bf16.")
    if not asked.reshard and asked.strategy not in UNSHARDED:
        notes.append("The dry run frees gathered parameters as the strategy does; the plan keeps them after forward.")
    if asked.microbatches > 1 and asked.pipeline == 1 and asked.reduce_each == (asked.strategy in REDUCES_ONCE):
        did, planned = ("once a step", "after each microbatch") if asked.reduce_each else (
            "after each microbatch", "once a step")  # fmt: skip
        notes.append(f"{asked.strategy} reduces gradients {did}; the plan reduces them {planned}.")
    if asked.tensor > 1 and asked.strategy not in SPLIT_BY_SEQUENCE:
        notes.append("Tensor parallelism in the dry run does not split norms and residuals by sequence; the plan does.")
    return tuple(notes)
