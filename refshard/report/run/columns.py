"""A case as one flat row, for programs: seconds, bytes and fractions, None for what does not exist.

The columns are the same for every run, also for one without cases.
"""

import math
from collections.abc import Callable
from typing import Any

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import CaseResult
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.proof import bit_identical, bits_note, collectives_note, parity_note, proof_summary
from refshard.records import METRICS

Row = dict[str, Any]


def _gpu(field: str) -> Callable[[CaseResult], object]:
    return lambda case: getattr(gpu, field) if (gpu := gpu_memory_of(case)) else None


def _metric(name: str) -> Callable[[CaseResult], object]:
    return lambda case: _finite(case.metrics[name])


COLUMNS: dict[str, Callable[[CaseResult], object]] = {
    "case": lambda case: case.name,
    "spec_hash": lambda case: case.launches[0].spec_hash,
    "environment": lambda case: case.launches[0].environment,
    "strategy": lambda case: case.spec.strategy,
    "world_size": lambda case: case.spec.world_size,
    "model": lambda case: case.spec.model,
    "global_batch": lambda case: case.spec.global_batch,
    "seq_len": lambda case: case.spec.seq_len,
    "workload": lambda case: case.spec.workload,
    "microbatches": lambda case: case.spec.microbatches,
    "checkpointing": lambda case: _listed(case.spec.checkpointing),
    "precision": lambda case: case.spec.precision,
    "tuning": lambda case: case.spec.tuning,
    "optimizer": lambda case: case.spec.optimizer,
    "offload": lambda case: case.spec.offload,
    "replicas": lambda case: case.spec.replicas,
    "tensor_parallel": lambda case: case.spec.tensor_parallel,
    "sequence_parallel": lambda case: case.spec.sequence_parallel,
    "context_parallel": lambda case: case.spec.context_parallel,
    "pipeline_parallel": lambda case: case.spec.pipeline_parallel,
    "interleave": lambda case: case.spec.interleave,
    "schedule": lambda case: case.spec.schedule,
    "memory_limit_gib": lambda case: case.spec.memory_limit_gib,
    "fidelity": lambda case: case.fidelity,
    "cluster": lambda case: case.spec.cluster or None,
    "device": lambda case: case.launches[0].device,
    "backend": lambda case: case.launches[0].backend,
    "state": lambda case: case.state,
    "rounds": lambda case: len(case.launches),
    "samples": lambda case: case.step_time.n if case.step_time else 0,
    **{name: _metric(name) for name in METRICS},
    "step_time_low_s": lambda case: _interval(case)[0],
    "step_time_high_s": lambda case: _interval(case)[1],
    "compile_s": lambda case: case.compile_s,
    "peak_requested_bytes": _gpu("requested_bytes"),
    "gpu_used_bytes": _gpu("used_bytes"),
    "gpu_outside_bytes": _gpu("outside_bytes"),
    "gpu_total_bytes": _gpu("total_bytes"),
    "allocation_retries": _gpu("retries"),
    "host_waits": lambda case: _host_waits(case),
    "probe_drift": lambda case: drift.size if (drift := within_launch(case)) else None,
    "other_cores": lambda case: max(
        (x for load in loads(case).values() if (x := load.other_cores) is not None), default=None
    ),
    "flops_convention": lambda case: case.launches[0].flops_convention,
    "recompute": lambda case: case.launches[0].recompute,
    "peak_flops_per_s": lambda case: case.launches[0].peak_flops_per_s,
    "peak_source": lambda case: case.launches[0].peak_source,
    "proof": lambda case: proof_summary(case),
    "collectives_note": lambda case: collectives_note(case),
    "bit_identical_to_ddp": lambda case: bit_identical(case),
    "bits_note": lambda case: bits_note(case),
    "parity_note": lambda case: parity_note(case),
    "warnings": lambda case: list(case.warnings),
    "error": lambda case: case.error,
}
"""What a row says of a case, by column, in their order; ``network`` of the run comes after them."""


def values(case: CaseResult) -> Row:
    """A case's row."""
    return {name: value(case) for name, value in COLUMNS.items()}


def names() -> list[str]:
    """A row's keys, in their order."""
    return [*COLUMNS, "network"]


def _host_waits(case: CaseResult) -> int | None:
    """How often the host waits for the device in a step; None where nothing counted."""
    waits = case.launches[0].host_waits
    return None if waits is None else sum(waits.values())


def _listed(policy: str | tuple[int, ...]) -> str | list[int]:
    return policy if isinstance(policy, str) else list(policy)


def _interval(case: CaseResult) -> tuple[float, float] | tuple[None, None]:
    """Both ends, or none where nothing bounds them."""
    summary = case.step_time
    if summary is None or not math.isfinite(summary.high):
        return None, None
    return summary.low, summary.high


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
