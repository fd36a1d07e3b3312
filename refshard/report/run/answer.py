"""A run as an answer, cases over several runs, and what a suite would launch.

For programs, each case is a flat row: seconds, bytes and fractions, None for what is not known. The columns are the
same for every run, also for one without cases.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.history import Series
from refshard.errors import Status
from refshard.plain import plain
from refshard.quantities import format_duration
from refshard.records import METRICS
from refshard.report.blocks import Answer, Notes, Row, Verdict, table
from refshard.report.run.tables import case_table, trend_row
from refshard.report.run.verdict import findings, notes, overview, unfinished
from refshard.specs.case import KEYS, Case
from refshard.specs.job import Job
from refshard.specs.suite import SuiteSpec

_GPU = {"peak_requested_bytes": "requested_bytes", "gpu_used_bytes": "used_bytes", "gpu_outside_bytes": "outside_bytes",
        "gpu_total_bytes": "total_bytes", "allocation_retries": "retries"}  # fmt: skip


def _launch(field: str) -> Callable[[CaseResult], object]:
    """A field that all launches of a case share."""
    return lambda case: getattr(case.launches[0], field)


def _metric(name: str) -> Callable[[CaseResult], object]:
    return lambda case: value if (value := case.metrics[name]) is not None and math.isfinite(value) else None


def _interval(end: str) -> Callable[[CaseResult], object]:
    """One end of the step time's interval; None under three launches."""
    return lambda case: getattr(case.step_time, end) if case.step_time and math.isfinite(case.step_time.high) else None


def _gpu(field: str) -> Callable[[CaseResult], object]:
    return lambda case: getattr(gpu, field) if (gpu := case.gpu_memory) else None


COLUMNS: dict[str, Callable[[CaseResult], object]] = {
    "case": attrgetter("name"), "spec_hash": _launch("spec_hash"), "environment": _launch("environment"),
    **{name: attrgetter(f"spec.job.{name}") for name in Job.__struct_fields__ if name in KEYS and name != "cluster"},
    "memory_limit_gib": attrgetter("spec.protocol.memory_limit_gib"),
    "fidelity": attrgetter("fidelity"),
    "cluster": lambda case: case.spec.job.cluster or None,
    "device": _launch("device"), "backend": _launch("backend"), "state": attrgetter("state"),
    "rounds": lambda case: len(case.launches),
    "samples": lambda case: case.step_time.n if case.step_time else 0,
    **{name: _metric(name) for name in METRICS},
    "step_time_low_s": _interval("low"), "step_time_high_s": _interval("high"), "compile_s": attrgetter("compile_s"),
    **{name: _gpu(field) for name, field in _GPU.items()},
    "host_waits": lambda case: None if (waits := case.launches[0].host_waits) is None else sum(waits.values()),
    "probe_drift": lambda case: drift.size if (drift := within_launch(case)) else None,
    "other_cores": lambda case: max(
        (load.other_cores for load in loads(case).values() if load.other_cores is not None), default=None
    ),
    **{name: _launch(name) for name in ("flops_convention", "recompute", "peak_flops_per_s", "peak_source")},
    "proof": attrgetter("proof_summary"),
    "collectives_note": lambda case: case.proof_note("collectives"),
    "bit_identical_to_ddp": attrgetter("bit_identical"),
    "bits_note": lambda case: case.proof_note("bits"),
    "parity_note": lambda case: case.proof_note("parity"),
    "warnings": attrgetter("warnings"), "error": attrgetter("error"),
    "network": lambda case: case.header.environment.network or None,
}  # fmt: skip
"""A row's keys, in their order, and where their values come from."""


def as_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """A row for each case."""
    every = [{name: value(case) for name, value in COLUMNS.items()} for case in evidence.cases]
    return [{name: list(x) if isinstance(x, tuple) else x for name, x in row.items()} for row in every]


def run_answer(evidence: Evidence, *, more: str = "", status: int | None = None) -> Answer:
    """Tables by setting, notes, and the verdict: which strategy to use in each comparison, or how often in many.
    ``more`` is a last line for people. Unless a ``status`` is given, it is 0, or 3 if no comparison is decided.
    """
    rows, found = as_rows(evidence), findings(evidence)
    each = [f"{one.title}: {one.summary}" if len(found) > 1 else one.summary for one in found]
    summed_up = overview(found)
    verdict = [*unfinished(evidence), *(summed_up or each)]
    undecided = bool(found) and not any(one.decides for one in found)
    remarks = [plain(sentence) for sentence in notes(evidence)]
    return Answer(
        data={"verdict": verdict, "notes": remarks, "cases": rows},
        rows=rows,
        columns=list(COLUMNS),
        blocks=[
            *(
                # A setting with nothing but references is a detail.
                case_table(one.cases, title=one.label, where="always" if one in evidence.ranked else "detail")
                for one in evidence.settings
            ),
            Notes(sentences=each if summed_up else [], title="Each comparison", where="detail"),
            Notes(sentences=[one.why for one in found if one.why], where="detail"),
            Notes(sentences=remarks),
            Verdict(sentences=verdict, style="doubtful" if undecided else "strong"),
            *([Verdict(sentences=[more], style="plain")] if more else []),
        ],
        status=status if status is not None else Status.NO_VERDICT if undecided else 0,
    )


def history_answer(all_series: Sequence[Series], metric: str) -> Answer:
    """A row for each series; for programs, one for each of its points."""
    points = [
        {
            "case": series.case, "environment": series.environment, "metric": metric, "run": point.run,
            "launches": point.launches, "started_at": point.started_at, "commit": point.commit, "value": point.value,
        }
        for series in all_series
        for point in series.points
    ]  # fmt: skip
    title = f"{METRICS[metric].label} ({METRICS[metric].unit})"
    rows = [trend_row(series, lambda value: f"{value:.4g}") for series in all_series]
    return Answer(data={"points": points}, rows=points, blocks=[table(rows, title=title)])


def planned_answer(
    suite: SuiteSpec, cases: Sequence[Case], *, launches: int, seen_before: int, unknown: int, seconds: float
) -> Answer:
    """The cases that a suite would launch, and how long that takes, s. ``seen_before`` launches have a recorded
    duration; it is unknown for ``unknown`` ones, and estimated for the others.
    """
    rows = [
        {
            "case": case.name, "hash": case.hash, "strategy": case.job.strategy, "model": case.job.model,
            "gpus": case.job.gpus, "global_batch": case.job.global_batch, "seq_len": case.job.seq_len,
            "fidelity": case.protocol.fidelity, "options": list(case.axes),
        }
        for case in cases
    ]  # fmt: skip
    shown: list[Row] = [
        {
            "case": case.name, "strategy": case.job.strategy, "model": case.job.model, "options": ", ".join(case.axes),
            "ranks": case.job.gpus, "batch": f"{case.job.global_batch} x {case.job.seq_len:,}",
        }
        for case in cases
    ]  # fmt: skip
    rounds = f" in {suite.most_rounds} rounds" if suite.most_rounds > 1 else ""
    sentence = f"{launches} {'launch' if launches == 1 else 'launches'}{rounds}"
    if unknown:
        sentence += f"; duration unknown for {unknown}: no similar launch is recorded."
    else:
        basis = "estimated from earlier launches" if seen_before == launches else "a rough estimate"
        sentence += f", about {format_duration(seconds)} ({basis})."
    title = f"{suite.name}: {suite.about}" if suite.about else suite.name
    return Answer(
        data={"suite": suite.name, "launches": launches, "expected_s": None if unknown else seconds, "cases": rows},
        rows=rows,
        blocks=[table(shown, left=4, title=title), Verdict(sentences=[sentence])],
    )
