"""Launch the dry run of a case, and make its record: metrics and proof of run, or the state in which it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.errors import SpecError
from refshard.fakecuda.build import extension
from refshard.flops import flops_of
from refshard.measure.assemble import (
    complete,
    counts,
    failed_announcement,
    failed_units,
    flops_text,
    rates,
    recompute_text,
    timeout_text,
    traced_parts,
    units_of_all,
    without_home,
)
from refshard.measure.dry.rank import DryCase, DryResult, ranks_of, read_results
from refshard.measure.launchers.base import Launcher, LaunchOutcome, Program
from refshard.measure.rank import trace_file
from refshard.measure.worker import request_file
from refshard.quantities import format_bytes
from refshard.records import DERIVED, METRICS, LaunchRecord, Proof
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.hardware import Dtype
from refshard.specs.model import known_dimensions

NOT_CLAIMED = "not claimed: a dry run computes no values"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryOutcome:
    """The results of a case's ranks; ``launch`` says how their launch ended.

    If the case ran out of memory, ``unlimited`` holds the results of a second run without a memory limit.
    """

    launch: LaunchOutcome
    results: tuple[DryResult, ...]
    unlimited: tuple[DryResult, ...] = ()


def check_dry(case: Case) -> None:
    """Check that a case can be dry-run. Build the fake device if necessary: a minute, once per environment.

    Raises:
        SpecError: the cluster has no CUDA GPUs, no rate for the precision, or too few GPUs for the ranks.
        RefshardError: the device cannot be built here.
    """
    job = case.job
    hardware = load_cluster(job.cluster).of_world_size(job.gpus).accelerator
    if hardware.device != "cuda" or not hardware.device_name:
        raise SpecError(
            f"cluster must have CUDA GPUs for dryrun cases, but '{job.cluster}' has none with device_name and "
            "capability in its profile; choose another from profiles/clusters/"
        )
    if (dtype := _dtype(case)) not in hardware.attention:
        raise SpecError(
            f"precision: the profile of '{job.cluster}' must have a rate for {dtype}, got rates for "
            f"{', '.join(sorted(hardware.attention))}; choose a precision with a rate"
        )
    extension()


def launch_dry(case: Case, launcher: Launcher, work: Path, on_progress: Callable[[str], None]) -> DryOutcome:
    """Run the ranks of ``case``. If one runs out of memory, run all again without a memory limit.

    If it ran out only because ``record_stream()`` held memory back for too long, the second run is the case's.
    """
    launched = _launch(case, launcher, work, on_progress, limited=True)
    if not launched.results or launched.results[-1].state != "oom":
        return launched
    again = _launch(case, launcher, work / "unlimited", on_progress, limited=False)
    if again.results and again.results[-1].fits:
        for rank in ranks_of(case):
            trace_file(work / "unlimited", rank).replace(trace_file(work, rank))
        return again
    return DryOutcome(launch=launched.launch, results=launched.results, unlimited=again.results)


def _launch(
    case: Case, launcher: Launcher, work: Path, on_progress: Callable[[str], None], *, limited: bool
) -> DryOutcome:
    """Run the ranks, and read the results that there are up to the first that is not ok."""
    work.mkdir(parents=True, exist_ok=True)
    request_file(work, "dryrun").write_bytes(msgspec.json.encode(DryCase(case=case, limited=limited)))
    program = Program(name="dryrun", processes=case.processes, time_limit_s=case.protocol.time_limit_s)
    words = "" if limited else "without a memory limit, "
    launch = launcher.launch(program, work, lambda text: on_progress(words + text))
    return DryOutcome(launch=launch, results=read_results(work, case))


def record_dry(blank: LaunchRecord, launched: DryOutcome) -> LaunchRecord:
    """Complete ``blank``, which starts in state ok, with the results of its ranks."""
    case, launch, results = blank.case, launched.launch, launched.results
    named = _named(blank, (*results, *launched.unlimited))
    log_tail = tuple(map(without_home, launch.log_tail))
    if launch.timed_out:
        return msgspec.structs.replace(named, state="timeout", error=timeout_text(case, launch), log_tail=log_tail)
    unwell = next((result for result in results if result.state != "ok"), None)
    replayed = (launched.unlimited or results)[-1].limited if results else None
    if replayed is not None:
        limited = msgspec.structs.replace(replayed, usable_bytes=results[-1].usable_bytes)
        return _out_of_memory(named, limited, launched.unlimited or results)
    if unwell is not None and unwell.state == "oom":
        return _out_of_memory(named, unwell, launched.unlimited)
    if unwell is not None:
        return msgspec.structs.replace(named, state=unwell.state, error=unwell.error, log_tail=log_tail)
    if len(results) < len(ranks_of(case)):
        error = launch.error or "the process ended without a result"
        return msgspec.structs.replace(named, state="failed", error=error, log_tail=log_tail)
    steps, proof = results[-1].steps, prove_dry(case, results)
    record = msgspec.structs.replace(
        named,
        step_times_s=tuple((step.step_s,) for step in steps),
        steps=tuple(step.trace for step in steps),
        census=steps[0].census,
        memory_course_bytes=steps[0].memory_course_bytes,
        host_waits=steps[0].host_waits,
        proof=proof,
    )
    if proof.failures:
        return msgspec.structs.replace(record, state="failed", error="proof of run: " + "; ".join(proof.failures))
    comm_ns, exposed_ns = sum(step.comm_ns for step in record.steps), sum(step.exposed_ns for step in record.steps)
    metrics = complete(
        {
            **rates(record, max(step.step_s for step in steps)),
            **_peaks(results),
            **traced_parts(record.steps),
            "overlap_ratio": 1 - exposed_ns / comm_ns if comm_ns else None,
        }
    )
    return msgspec.structs.replace(record, metrics=metrics)


def prove_dry(case: Case, results: Sequence[DryResult]) -> Proof:
    """Compare what the strategy announced with what its steps requested of the device. Values are not checked."""
    issued = [step.issued for step in results[-1].steps]
    units = units_of_all(result.wrapped_units for result in results)
    differing = next((rank for rank, result in enumerate(results) if issued[rank] != result.announced), None)
    failures = [*failed_announcement(case, results[0].announced), *failed_units(case, results[0].blocks, units)]
    # If only one rank ran, it stands for all. A rank with more padding in its part steps all that it holds.
    stepped = sum(result.stepped for result in results) * (case.job.gpus // len(results))
    padded = any(0 < result.held < result.trained and result.stepped >= result.held for result in results)
    if case.job.workload == "training" and stepped < (trained := results[0].trained) and not padded:
        failures.append(f"the optimizers of all ranks together update {stepped:,} of {trained:,} trained elements")
    if differing is not None:
        announced, found = counts(results[differing].announced), counts(issued[differing])
        failures.insert(0, f"the plan announced {announced}, the recording shows {found}")
    return Proof(
        wrapped_units=units,
        announced=results[0].announced,
        traced=issued[differing or 0],
        parity_steps=0,
        loss_parity=None,
        parity_note=NOT_CLAIMED,
        parameters_sha256="",
        bits_note=NOT_CLAIMED,
        failures=tuple(failures),
    )


def _named(blank: LaunchRecord, results: Sequence[DryResult]) -> LaunchRecord:
    """Add what is known about a case regardless of how it ended."""
    case, spec = blank.case, known_dimensions(blank.case.job.model)
    built = next((result for result in results if result.blocks), None)  # none if building it failed
    n_layers = spec.n_layers if spec is not None else len(built.blocks) if built is not None else 0
    flops = built.flops_per_token if built is not None else None
    if spec is not None:
        flops = float(flops_of(case.job, spec))
    hardware = load_cluster(case.job.cluster).accelerator
    return msgspec.structs.replace(
        blank,
        device=hardware.device_name,
        backend="nccl",
        flops_convention=flops_text(case),
        flops_per_token=flops,
        recompute=recompute_text(case, n_layers) if n_layers else "",
        peak_flops_per_s=hardware.matmul[_dtype(case)].peak,
        peak_source=hardware.sources["matmul"],
        warnings=tuple(dict.fromkeys(warning for result in results for warning in result.warnings)),
    )


def _dtype(case: Case) -> Dtype:
    return "bf16" if case.job.precision == "bf16" else "fp32"


def _out_of_memory(record: LaunchRecord, unwell: DryResult, unlimited: Sequence[DryResult]) -> LaunchRecord:
    """Add the allocation that failed and, if known, how much memory the case needs."""
    usable, held = format_bytes(unwell.usable_bytes), format_bytes(unwell.peak.allocated)
    met = f"{held} were in use when it asked for {unwell.refused}"
    if len(unlimited) < len(ranks_of(record.case)) or unlimited[-1].state != "ok":
        return msgspec.structs.replace(record, state="oom", error=f"out of memory: {met} ({usable} usable)")
    needs = _peaks(unlimited)
    tensors, reserved = (format_bytes(needs[name]) for name in ("peak_memory_bytes", "peak_reserved_bytes"))
    error = f"out of memory: needs at least {tensors} ({reserved} reserved), {usable} usable; {met}"
    metrics = {**dict.fromkeys(METRICS.keys() - DERIVED), **needs}
    return msgspec.structs.replace(record, state="oom", error=error, metrics=metrics)


def _peaks(results: Sequence[DryResult]) -> dict[str, float | None]:
    """Each peak is the highest over all ranks: as replayed, or as each rank said itself."""
    peaks = [step.peak for step in results[-1].steps if step.peak] or [result.peak for result in results]
    return {
        "peak_memory_bytes": float(max(peak.allocated for peak in peaks)),
        "peak_active_bytes": float(max(peak.active for peak in peaks)),
        "peak_reserved_bytes": float(max(peak.reserved for peak in peaks)),
    }
