"""The metrics of a launch that ended ok: step time and its rates, memory, and the traced steps."""

from collections.abc import Sequence
from statistics import fmean, median

from refshard.flops import formula
from refshard.measure.subject import CONVENTION
from refshard.measure.timing import RankResult
from refshard.measure.traced import Traces
from refshard.records import DERIVED, METRICS, Environment, LaunchRecord, StepTrace
from refshard.specs.case import CaseSpec
from refshard.specs.hardware import load_hardware, profile_of_device
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import is_factory

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
    tokens_per_s = case.global_batch * case.seq_len / step_time_s / case.world_size
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


def flops_words(case: CaseSpec) -> str:
    """The FLOPs convention, by name and formula; of a factory's module, what is counted."""
    if is_factory(case.model):
        return COUNTED
    return f"{CONVENTION}: {formula(CONVENTION, case.workload, case.tuning)}"


def recompute_words(case: CaseSpec, n_layers: int) -> str:
    """Which of a model's layers ran forward a second time. Model FLOPs, and so MFU, never count that."""
    policy = checkpointing_of(case.checkpointing, n_layers)
    if not policy.layers:
        return "none"
    but = " except attention and every other matmul" if policy.by_op else ""
    return f"forward of {len(policy.layers)} of {n_layers} layers{but}, not counted"


def peak_of(case: CaseSpec, device: str, environment: Environment) -> dict[str, object]:
    """The peak that MFU is held against: a CPU's is measured, a GPU's is in its profile; an unknown GPU has none."""
    if device != "cpu":
        peak, source = _gpu_peak(case, device, environment)
    elif case.threads_per_rank != environment.gemm_threads:
        peak, source = None, f"measured with {environment.gemm_threads} thread(s) only"
    else:
        peak = environment.gemm_flops_per_s
        source = f"measured fp32 matrix product, {environment.gemm_threads} thread(s), machine idle"
    return {"peak_flops_per_s": peak, "peak_source": source}


def _gpu_peak(case: CaseSpec, device: str, environment: Environment) -> tuple[float | None, str]:
    """The dense peak of what the case computes in, and its source: fp32 products are TF32 where torch may round so."""
    if (name := profile_of_device(device)) is None:
        return None, (
            f"no profile names '{device}': add it to also_named in the file of profiles/hardware that has its peaks, "
            f'or add a file with device_name = "{device}"'
        )
    hardware, file = load_hardware(name), f"profiles/hardware/{name}.toml"
    if case.precision == "fp32" and environment.tf32:
        if not hardware.tf32_peak:
            return None, f"TF32 is allowed, and {file} has no tf32_peak; add it with its source, or forbid TF32"
        return hardware.tf32_peak, f"TF32 (allowed for fp32 products), dense, {file}: {hardware.sources['tf32_peak']}"
    if case.precision not in hardware.matmul:
        return None, f"{file} has no [matmul.{case.precision}]; add it with its source"
    return hardware.matmul[case.precision].peak, f"{case.precision}, dense, {file}: {hardware.sources['matmul']}"
