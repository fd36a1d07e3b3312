"""A simulated case: no process and no trace; closed forms and the cluster's profile make its record."""

import msgspec

from refshard.errors import SpecError
from refshard.estimate.candidates import Candidates
from refshard.estimate.estimate import Estimates, estimate
from refshard.estimate.ways import WAYS
from refshard.flops import FORMULAS, flops_per_token
from refshard.harness.metrics import complete, rates, recompute_words
from refshard.harness.subject import CONVENTION
from refshard.memory.of_case import memory_of
from refshard.records import LaunchRecord
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.configuration import Configuration
from refshard.specs.model import load_model

_NOT_MODELLED = ("tuning", "optimizer", "comm_memory")
"""Fields of a case that the closed forms do not know."""


def configuration_of(case: CaseSpec) -> Configuration:
    """The case as a configuration of the closed forms.

    Raises:
        SpecError: they do not know such a case.
    """
    if case.workload != "training":
        raise SpecError(
            f"workload must be 'training' for simulated cases, got '{case.workload}'; use fidelity 'dryrun', or "
            "measure it"
        )
    unknown = [name for name in case.unmodelled if name in _NOT_MODELLED]
    if unknown:
        raise SpecError(
            f"{unknown[0]} is not simulated, got {getattr(case, unknown[0])!r}; use fidelity 'dryrun', or measure the "
            "case"
        )
    if case.strategy not in WAYS:
        raise SpecError(
            f"strategy: '{case.strategy}' has no closed form; use fidelity 'dryrun', which runs its own code"
        )
    shards = WAYS[case.strategy].shards_optimizer
    replicate = case.replicas if shards else case.data_ranks
    policy = case.checkpointing
    return Configuration(
        strategy=case.strategy, shard=case.data_ranks // replicate, replicate=replicate,
        tensor=case.tensor_parallel, context=case.context_parallel, pipeline=case.pipeline_parallel,
        interleave=case.interleave, schedule=case.schedule, microbatches=case.microbatches,
        microbatch=case.global_batch // case.data_ranks // case.microbatches, precision=case.precision,
        checkpointing=policy if isinstance(policy, str) else str(len(policy)), offload=case.offload,
    )  # fmt: skip


def check_simulated(case: CaseSpec) -> None:
    """Check that a case can be simulated.

    Raises:
        SpecError: it cannot; the message says why.
    """
    load_model(case.model)
    _cluster(case)
    configuration_of(case)


def record_simulated(blank: LaunchRecord) -> LaunchRecord:
    """Complete ``blank`` with what the closed forms say."""
    case = blank.case
    model, cluster = load_model(case.model), _cluster(case)
    hardware = cluster.accelerator
    found = estimate(model, cluster, case.seq_len, Candidates.of([configuration_of(case)]))
    record = msgspec.structs.replace(
        blank,
        device=hardware.device,
        backend=cluster.library,
        step_times_s=((float(found.step_s[0]),),),
        flops_convention=f"{CONVENTION}: {FORMULAS[case.workload][CONVENTION]}",
        recompute=recompute_words(case, model.n_layers),
        flops_per_token=float(flops_per_token(model, case.seq_len, CONVENTION)),
        peak_flops_per_s=hardware.matmul[case.precision].peak,
        peak_source=hardware.sources["matmul"],
    )
    return msgspec.structs.replace(record, metrics=complete(_metrics(record, found)))


def _cluster(case: CaseSpec) -> ClusterSpec:
    return load_cluster(case.cluster).of_world_size(case.world_size)


def _metrics(record: LaunchRecord, found: Estimates) -> dict[str, float | None]:
    """Memory is to the byte where the walk of a step knows the case, else in closed form."""
    walked = memory_of(record.case, "cuda" if record.device == "cuda" else "cpu")
    return {
        **rates(record, float(found.step_s[0])),
        "peak_memory_bytes": float(found.memory.peak[0] if walked is None else walked.peak),
        "compute_s": float(found.compute_s[0] + found.optimizer_s[0]),
        "exposed_comm_s": float(found.exchange_s[0]),
    }
