"""A suite of one case, which ``refshard run`` dry-runs."""

from importlib.metadata import version
from typing import Any

from refshard.emit.job import Emitted, Job, refuse_above_one, refuse_experts
from refshard.errors import SpecError
from refshard.plan.checkpointing import checkpointing_of
from refshard.specs.configuration import Configuration
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml

FILE = "refshard.toml"
PLANNED_ONLY = frozenset({"megatron"})
"""Strategies that plans know and the harness does not."""
COMPILED = {"fsdp2": "fsdp2-compiled", "refshard-fsdp": "refshard-fsdp-compiled",
            "refshard-yafsdp": "refshard-yafsdp-compiled"}  # fmt: skip
"""The strategy that is another with compiled blocks."""
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
    return Emitted(
        files={FILE: to_toml(suite)},
        command=f"refshard run {FILE}",
        version=version("refshard"),
        notes=_notes(job.configuration),
    )


def _check(job: Job) -> None:
    asked = job.configuration
    refuse_experts("refshard", job)
    refuse_above_one("refshard", job, "pipeline", "context", remedy="emit for torchtitan or megatron")
    if asked.strategy in PLANNED_ONLY:
        raise SpecError(f"refshard: strategy must be one that it runs, got '{asked.strategy}'; emit for megatron")
    if asked.precision == "fp8":
        raise SpecError("refshard: precision must be 'bf16' or 'fp32', got 'fp8'; emit for torchtitan or megatron")
    if asked.offload:
        raise SpecError("refshard: offload must be false, got true: it is not dry-run; choose a row without it")
    if asked.compiled or asked.strategy.endswith("-compiled"):
        measured = COMPILED.get(asked.strategy, "fsdp2-compiled")
        raise SpecError(
            "refshard: compiled must be false, got true: compiled cases are not dry-run; measure the strategy "
            f"'{measured}' on GPUs instead"
        )


def _case(job: Job) -> dict[str, Any]:
    asked = job.configuration
    replicas = 1 if asked.strategy in UNSHARDED or asked.shard == 1 else asked.replicate
    return {
        "strategy": asked.strategy,
        "world_size": asked.world_size,
        "model": job.model_name,
        "global_batch": asked.global_batch,
        "seq_len": job.seq_len,
        "microbatches": asked.microbatches,
        "checkpointing": _checkpointing(job),
        "precision": asked.precision,
        "replicas": replicas,
        "tensor_parallel": asked.tensor,
        "fidelity": "dryrun",
        "cluster": job.cluster_name,
    }


def _checkpointing(job: Job) -> str | list[list[int]]:
    """The policy; layers that are listed are one value of the matrix, hence a list in a list."""
    policy = job.configuration.checkpointing
    if not policy.isdecimal():
        return policy
    layers = sorted(checkpointing_of(int(policy), job.model.n_layers).layers)
    return [layers] if layers else "none"


def _notes(asked: Configuration) -> tuple[str, ...]:
    notes = []
    if asked.reduction == "bf16":
        notes.append("The dry run reduces gradients in fp32; the plan reduces them in bf16.")
    if not asked.reshard and asked.strategy not in UNSHARDED:
        notes.append("The dry run frees gathered parameters as the strategy does; the plan keeps them after forward.")
    if asked.microbatches > 1 and asked.reduce_each == (asked.strategy in REDUCES_ONCE):
        did, planned = ("once a step", "after each microbatch") if asked.reduce_each else (
            "after each microbatch", "once a step")  # fmt: skip
        notes.append(f"{asked.strategy} reduces gradients {did}; the plan reduces them {planned}.")
    if asked.tensor > 1:
        notes.append("Tensor parallelism in the dry run does not split norms and residuals by sequence; the plan does.")
    return tuple(notes)
