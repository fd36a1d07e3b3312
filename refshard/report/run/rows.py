"""A case as one flat row, for programs: seconds, bytes and fractions, None where nothing is known.

The columns are the same for every run, also for one without cases.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.proof import bit_identical, bits_note, collectives_note, parity_note, proof_summary
from refshard.records import METRICS
from refshard.specs.job import Job

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


def _gpu(field: str) -> Callable[[CaseResult], object]:
    return lambda case: getattr(gpu, field) if (gpu := gpu_memory_of(case)) else None


def _metric(name: str) -> Callable[[CaseResult], object]:
    return lambda case: value if (value := case.metrics[name]) is not None and math.isfinite(value) else None


def _interval(end: str) -> Callable[[CaseResult], object]:
    """One end of the step time's interval; None under three launches, which give none."""
    return lambda case: getattr(case.step_time, end) if case.step_time and math.isfinite(case.step_time.high) else None


def _field(name: str) -> Callable[[CaseResult], object]:
    return lambda case: list(value) if isinstance(value := case.spec.fields[name], tuple) else value


def _first(field: str) -> Callable[[CaseResult], object]:
    """A field that all launches of a case share."""
    return lambda case: getattr(case.launches[0], field)


COLUMNS: dict[str, Callable[[CaseResult], object]] = {
    "case": lambda case: case.name,
    "spec_hash": _first("spec_hash"),
    "environment": _first("environment"),
    **{name: _field(name) for name in Job.__struct_fields__ if name not in ("cluster", "implementation")},
    "memory_limit_gib": _field("memory_limit_gib"),
    "fidelity": lambda case: case.fidelity,
    "cluster": lambda case: case.spec.job.cluster or None,
    "device": _first("device"),
    "backend": _first("backend"),
    "state": lambda case: case.state,
    "rounds": lambda case: len(case.launches),
    "samples": lambda case: case.step_time.n if case.step_time else 0,
    **{name: _metric(name) for name in METRICS},
    "step_time_low_s": _interval("low"),
    "step_time_high_s": _interval("high"),
    "compile_s": lambda case: case.compile_s,
    "peak_requested_bytes": _gpu("requested_bytes"),
    "gpu_used_bytes": _gpu("used_bytes"),
    "gpu_outside_bytes": _gpu("outside_bytes"),
    "gpu_total_bytes": _gpu("total_bytes"),
    "allocation_retries": _gpu("retries"),
    "host_waits": lambda case: None if (waits := case.launches[0].host_waits) is None else sum(waits.values()),
    "probe_drift": lambda case: drift.size if (drift := within_launch(case)) else None,
    "other_cores": lambda case: max(
        (x for load in loads(case).values() if (x := load.other_cores) is not None), default=None
    ),
    **{name: _first(name) for name in ("flops_convention", "recompute", "peak_flops_per_s", "peak_source")},
    "proof": proof_summary,
    "collectives_note": collectives_note,
    "bit_identical_to_ddp": bit_identical,
    "bits_note": bits_note,
    "parity_note": parity_note,
    "warnings": lambda case: list(case.warnings),
    "error": lambda case: case.error,
    "network": lambda case: case.header.environment.network or None,
}  # fmt: skip
"""A row's keys, in their order, and how to find their values."""


def values(case: CaseResult) -> Row:
    """A case's row, safe for JSON."""
    return {name: value(case) for name, value in COLUMNS.items()}


def as_json(evidence: Evidence) -> list[Row]:
    """A row for each case."""
    return [values(case) for case in evidence.cases]


def rows(evidence: Evidence) -> "pd.DataFrame":
    """:func:`as_json` as a DataFrame."""
    import pandas as pd  # takes longer to import than all else that a terminal needs

    return pd.DataFrame(as_json(evidence))
