"""What the ranks left behind becomes one record: metrics and proof of run, or the state that the case ended in."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from refshard.errors import TraceError
from refshard.flops import formula
from refshard.measure.flight import read_flights, waited_for
from refshard.measure.gpus import of_all_hosts, retry_warnings, throttle_warnings
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.load import load_of
from refshard.measure.proof import Peers, Traces, prove, read_traces
from refshard.measure.rank import rank_file
from refshard.measure.timing import RankResult
from refshard.measure.trainer import CONVENTION
from refshard.records import DERIVED, METRICS, Environment, LaunchRecord, State, StepTrace
from refshard.specs.case import Case
from refshard.specs.hardware import load_hardware, profile_of_device
from refshard.specs.model import is_factory

_SOURCE = re.compile(r"/[^\s\"']*/(?=(?:site-packages|python3\.\d+|refshard)/[^\s\"']*\.(?:py|so)\b)")


def failure_of(
    case: Case, launch: LaunchOutcome, ranks: Sequence[RankResult], flights: Mapping[int, Any]
) -> tuple[State, str]:
    """The state of a case that did not end well, and its cause in one line. ``flights`` are what the ranks' flight
    recorders held when its time was over.
    """
    if launch.out_of_memory:
        return "oom", f"{launch.error}: killed by the kernel's OOM killer"
    if launch.timed_out:
        waiting = waited_for(flights)
        return "timeout", timeout_text(case, launch) + (f"; {waiting}" if waiting else "")
    unwell = [rank for rank in ranks if rank.state != "ok"]
    for rank in unwell:
        if rank.state == "oom":
            return "oom", f"rank {rank.rank}: {rank.error}"
    if launch.failed_rank is not None and launch.failed_rank not in {rank.rank for rank in ranks}:
        return "failed", launch.error or f"rank {launch.failed_rank} ended without a result"
    # The other ranks' errors are but echoes of the first.
    for rank in sorted(unwell, key=lambda rank: (rank.failed_at_s, rank.rank != launch.failed_rank)):
        return rank.state, f"rank {rank.rank}: {rank.error}"
    return "failed", launch.error or "a rank ended without a result"


def timeout_text(case: Case, launch: LaunchOutcome) -> str:
    """How long a launch had that was ended, and where its ranks stood."""
    stood = f": {launch.error}" if launch.error else ""
    return f"did not finish within time_limit_s = {case.protocol.time_limit_s:g}; the ranks were killed{stood}"


def without_home(line: str) -> str:
    """A line of a log with the paths of sources and libraries from their package on: records are shown to others, whom
    it tells nothing where somebody's environment lies.

    >>> without_home('File "/home/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in linear')
    'File "site-packages/torch/nn/functional.py", line 7, in linear'
    >>> without_home("Failed to load /home/me/venv/lib/python3.11/site-packages/torchao/_C.abi3.so: a reason")
    'Failed to load site-packages/torchao/_C.abi3.so: a reason'
    """
    return _SOURCE.sub("", line)


NS = 1e-9
COUNTED = "matrix products, attention and convolutions, counted by torch"
"""What the FLOPs of a factory's module are."""


def metrics_of(record: LaunchRecord, ranks: Sequence[RankResult], traces: Traces) -> dict[str, float | None]:
    """Every metric but derived ones; None for what does not exist."""
    step_time, traced_time = (
        median(max(step) for step in zip(*times)) for times in (record.step_times_s, record.traced_step_times_s)
    )
    peaks = [rank.peak_memory_bytes for rank in ranks if rank.peak_memory_bytes]
    gpus = record.gpu_memory
    return complete(
        {
            **rates(record, step_time),
            "peak_memory_bytes": max(peaks, default=None),
            "peak_active_bytes": max((gpu.active_bytes for gpu in gpus), default=None),
            "peak_reserved_bytes": max((gpu.reserved_bytes for gpu in gpus), default=None),
            "rss_bytes": max(rank.rss_bytes for rank in ranks),
            **traced_parts(traces.steps),
            "overlap_ratio": traces.overlap_ratio,
            "perturbation": traced_time / step_time,
            "synchronisation": step_time / max(free)
            if (free := [r.free_step_s for r in ranks if r.free_step_s])
            else None,
            "loss_parity": record.proof.loss_parity if record.proof else None,
        }
    )


def rates(record: LaunchRecord, step_time_s: float) -> dict[str, float | None]:
    """The step time, and what a rank does in it: tokens, model FLOPs, and these over the device's peak."""
    case = record.case
    tokens_per_s = case.job.global_batch * case.job.seq_len / step_time_s / case.job.gpus
    flops_per_s = None if record.flops_per_token is None else tokens_per_s * record.flops_per_token
    peak = record.peak_flops_per_s
    return {
        "step_time_s": step_time_s,
        "tokens_per_s_gpu": tokens_per_s,
        "tflops": None if flops_per_s is None else flops_per_s / 1e12,
        "mfu": flops_per_s / peak if flops_per_s is not None and peak else None,
    }


def traced_parts(steps: Sequence[StepTrace]) -> dict[str, float | None]:
    """Where traced steps go, s: means over steps and ranks."""
    return {
        "compute_s": fmean(step.compute_ns for step in steps) * NS,
        "comm_s": fmean(step.comm_ns for step in steps) * NS,
        "exposed_comm_s": fmean(step.exposed_ns for step in steps) * NS,
        "idle_s": fmean(step.idle_ns for step in steps) * NS,
    }


def complete(found: dict[str, float | None]) -> dict[str, float | None]:
    """A key for every metric that a record has."""
    return {name: found.get(name) for name in METRICS.keys() - DERIVED}


def flops_words(case: Case) -> str:
    """The FLOPs convention, by name and formula; of a factory's module, what is counted."""
    job = case.job
    if is_factory(job.model):
        return COUNTED
    return f"{CONVENTION}: {formula(CONVENTION, job.workload, job.tuning)}"


def recompute_words(case: Case, n_layers: int) -> str:
    """Which of a model's layers ran forward a second time. Model FLOPs, and so MFU, never count that."""
    policy = case.job.checkpointed(n_layers)
    if not policy.layers:
        return "none"
    but = " except attention and every other matmul" if policy.by_op else ""
    return f"forward of {len(policy.layers)} of {n_layers} layers{but}, not counted"


def peak_of(case: Case, device: str, environment: Environment) -> dict[str, object]:
    """The peak that MFU is held against: a CPU's is measured, a GPU's is in its profile; an unknown GPU has none."""
    if device != "cpu":
        peak, source = _gpu_peak(case, device, environment)
    elif case.protocol.threads_per_rank != environment.gemm_threads:
        peak, source = None, f"measured with {environment.gemm_threads} thread(s) only"
    else:
        peak = environment.gemm_flops_per_s
        source = f"measured fp32 matrix product, {environment.gemm_threads} thread(s), machine idle"
    return {"peak_flops_per_s": peak, "peak_source": source}


def _gpu_peak(case: Case, device: str, environment: Environment) -> tuple[float | None, str]:
    """The dense peak of what the case computes in, and its source: fp32 products are TF32 where torch may round so."""
    job = case.job
    if (name := profile_of_device(device)) is None:
        return None, (
            f"no profile names '{device}': add it to also_named in the file of profiles/hardware that has its peaks, "
            f'or add a file with device_name = "{device}"'
        )
    hardware, file = load_hardware(name), f"profiles/hardware/{name}.toml"
    if job.precision == "fp32" and environment.tf32:
        if not hardware.tf32_peak:
            return None, f"TF32 is allowed, and {file} has no tf32_peak; add it with its source, or forbid TF32"
        return hardware.tf32_peak, f"TF32 (allowed for fp32 products), dense, {file}: {hardware.sources['tf32_peak']}"
    if job.precision not in hardware.matmul:
        return None, f"{file} has no [matmul.{job.precision}]; add it with its source"
    return hardware.matmul[job.precision].peak, f"{job.precision}, dense, {file}: {hardware.sources['matmul']}"


def assemble(
    blank: LaunchRecord, launch: LaunchOutcome, folder: Path, environment: Environment, peers: Peers
) -> LaunchRecord:
    """Complete ``blank``, whose state is preset to ok, with what the launch of its case left in ``folder``."""
    case = blank.case
    try:
        paths = (rank_file(folder, rank) for rank in range(case.processes))
        ranks = [msgspec.json.decode(path.read_bytes(), type=RankResult) for path in paths if path.exists()]
    except msgspec.DecodeError as damage:
        return msgspec.structs.replace(blank, state="failed", error=f"a rank left a damaged result: {damage}")
    if launch.timed_out or len(ranks) < case.processes or any(r.state != "ok" for r in ranks):
        state, error = failure_of(case, launch, ranks, read_flights(folder))
        log_tail = tuple(map(without_home, launch.log_tail))
        return msgspec.structs.replace(blank, state=state, error=error, log_tail=log_tail)
    try:
        traces = read_traces(folder, case.processes)
    except TraceError as error:
        return msgspec.structs.replace(blank, state="failed", error=str(error))
    record = _with_samples(blank, ranks, traces, environment)
    proof = prove(case, ranks, traces, record.losses, peers)
    record = msgspec.structs.replace(record, proof=proof)
    if proof.failures:
        return msgspec.structs.replace(record, state="failed", error="proof of run: " + "; ".join(proof.failures))
    return msgspec.structs.replace(record, metrics=metrics_of(record, ranks, traces))


def _with_samples(
    blank: LaunchRecord, ranks: list[RankResult], traces: Traces, environment: Environment
) -> LaunchRecord:
    """What the ranks measured, as they left it, and what it is held against."""
    case, first = blank.case, ranks[0]
    gpu_use = of_all_hosts([r.gpu_use for r in ranks])
    gpu_memory = tuple(r.gpu_memory for r in ranks if r.gpu_memory)
    warnings = [*(w for r in ranks for w in r.warnings), *throttle_warnings(gpu_use), *retry_warnings(gpu_memory)]
    return msgspec.structs.replace(
        blank,
        device=first.device,
        backend=first.backend,
        step_times_s=tuple(r.step_times_s for r in ranks),
        traced_step_times_s=tuple(r.traced_step_times_s for r in ranks),
        losses=tuple(fmean(step) for step in zip(*(r.losses for r in ranks))),
        flops_convention=flops_words(case),
        flops_per_token=first.flops_per_token,
        recompute=recompute_words(case, len(first.blocks)),
        steps=traces.steps,
        census=first.census,
        memory_course_bytes=first.memory_course_bytes,
        compile_s=max(r.compile_s for r in ranks) or None,
        load=load_of([r.load for r in ranks]),
        gpu_use=gpu_use,
        gpu_memory=gpu_memory,
        warnings=tuple(dict.fromkeys(warnings)),
        **peak_of(case, first.device, environment),
    )
