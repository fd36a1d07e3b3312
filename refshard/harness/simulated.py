"""A simulated case: no process, no tensor; record and trace come from the cluster's profile and the schedule."""

import gzip
from pathlib import Path

import msgspec

from refshard.errors import SpecError
from refshard.flops import FORMULAS, flops_per_token
from refshard.harness.metrics import complete, rates, recompute_words, traced_parts
from refshard.harness.traced import step_trace
from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import find_recipe
from refshard.records import LaunchRecord, StepTrace
from refshard.simulate.clock import NS
from refshard.simulate.forecast import CONVENTION, Job, Simulation, simulate
from refshard.simulate.memory import forecast_memory
from refshard.simulate.trace import as_kineto, as_timeline
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from refshard.tracing.overlap import step_breakdowns


def job_of(case: CaseSpec) -> Job:
    """What a case trains and where.

    Raises:
        SpecError: it cannot be simulated.
    """
    if case.workload != "training":
        raise SpecError(
            f"workload must be 'training' for simulated cases, got '{case.workload}'; use fidelity 'dryrun', or "
            "measure it"
        )
    if case.unmodelled:
        field = case.unmodelled[0]
        raise SpecError(
            f"{field} is not simulated, got {getattr(case, field)!r}; use fidelity 'dryrun', or measure the case"
        )
    return Job(
        model=load_model(case.model),
        cluster=load_cluster(case.cluster).of_world_size(case.world_size),
        seq_len=case.seq_len,
        sequences=case.global_batch // case.world_size // case.microbatches,
        microbatches=case.microbatches,
        dtype=case.precision,
    )


def check_simulated(case: CaseSpec) -> None:
    """Check that a case can be simulated.

    Raises:
        SpecError: it cannot; the message says why.
    """
    job_of(case)
    find_recipe(case.strategy)


def record_simulated(blank: LaunchRecord, trace: Path) -> LaunchRecord:
    """Complete ``blank`` with what the simulation says, and write its trace (gzipped) to ``trace``."""
    case = blank.case
    job, recipe = job_of(case), find_recipe(case.strategy)
    checkpointing = checkpointing_of(case.checkpointing, job.model.n_layers)
    run = simulate(job, recipe, checkpointing)
    with gzip.open(trace, "wt", encoding="utf-8") as file:
        file.write(as_kineto(run.items, run.times, job.cluster))
    rate = job.cluster.accelerator.matmul[job.dtype]
    record = msgspec.structs.replace(
        blank,
        device=job.cluster.accelerator.device,
        backend=job.cluster.library,
        step_times_s=((run.times.length / NS,),),
        flops_convention=f"{CONVENTION}: {FORMULAS[case.workload][CONVENTION]}",
        recompute=recompute_words(case, job.model.n_layers),
        flops_per_token=float(flops_per_token(job.model, case.seq_len, CONVENTION)),
        peak_flops_per_s=rate.peak,
        peak_source=job.cluster.accelerator.sources["matmul"],
    )
    peak = forecast_memory(job, recipe, checkpointing).peak
    steps, metrics = _metrics(record, run, peak)
    return msgspec.structs.replace(record, steps=steps, metrics=metrics)


def _metrics(
    record: LaunchRecord, run: Simulation, peak_bytes: int
) -> tuple[tuple[StepTrace, ...], dict[str, float | None]]:
    (step,) = step_breakdowns(as_timeline(run.items, run.times))
    steps = (step_trace(0, 0, step),)
    found = {
        **rates(record, run.times.length / NS),
        "peak_memory_bytes": float(peak_bytes),
        **traced_parts(steps),
        "overlap_ratio": step.overlap_ratio,
    }
    return steps, complete(found)
