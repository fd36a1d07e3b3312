"""Predictions compared with measurements, as a table and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.validation import PREDICTED, Validated, as_objects, beside_measured, errors, in_order, scaled
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.blocks import Answer, Verdict, table
from refshard.specs.case import spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRuns:
    """Cases that were both measured and dry-run: a row each, with both states, and a summary in sentences."""

    findings: tuple[str, ...]
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]


def dry_runs(evidence: Evidence) -> DryRuns | None:
    """Dry runs compared with the measured cases; None if no case is both."""
    pairs = [pair for pair in beside_measured(evidence) if pair.predicted.fidelity == "dryrun"]
    if not pairs:
        return None
    both = [pair for pair in pairs if pair.measured.ok and pair.predicted.ok]
    return DryRuns(
        findings=tuple(findings(both)),
        table=pd.DataFrame([_row(pair) for pair in pairs]),
        cases=tuple(pair.measured for pair in pairs),
    )


def dry_runs_of(evidence: Evidence) -> dict[CaseResult, CaseResult]:
    """The dry run of each measured case that has one, where both ended ok."""
    pairs = (pair for pair in beside_measured(evidence) if pair.predicted.fidelity == "dryrun")
    return {pair.measured: pair.predicted for pair in pairs if pair.measured.ok and pair.predicted.ok}


def _row(pair: Validated) -> dict[str, str]:
    mine, dry = pair.measured.metrics, pair.predicted.metrics
    return {
        "case": pair.measured.full_label,
        "measured": pair.measured.state,
        "dry run": pair.predicted.state,
        "on": pair.predicted.spec.cluster,
        "step time measured": format_seconds(mine["step_time_s"]),
        "step time in the dry run": format_seconds(dry["step_time_s"]),
        "error": _signed(pair.step_time_error),
        "peak reserved measured": _size(mine["peak_reserved_bytes"]),
        "peak reserved in the dry run": _size(dry["peak_reserved_bytes"]),
        "its error": _signed(pair.error("peak_reserved_bytes")),
    }


def _size(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def validation_answer(pairs: Sequence[Validated]) -> Answer:
    """A row a prediction, and what they come to by fidelity."""
    rows = [
        {
            "case": pair.measured.label,
            "model": pair.measured.spec.model,
            "predicted": spelled(pair.predicted.fidelity),
            "on": pair.predicted.spec.cluster,
            "step time measured": format_seconds(pair.measured.metrics["step_time_s"]),
            "step time predicted": format_seconds(pair.predicted.metrics["step_time_s"]),
            "error": _signed(pair.step_time_error),
            "peak memory measured": format_bytes(pair.measured.metrics["peak_memory_bytes"]),
            "peak memory predicted": format_bytes(pair.predicted.metrics["peak_memory_bytes"]),
            "its error": _signed(pair.error("peak_memory_bytes")),
        }
        for pair in pairs
    ]
    objects = as_objects(pairs)
    told = findings(pairs)
    return Answer(
        data={"verdict": told, "predictions": objects}, rows=objects,
        blocks=[table(rows, left=4), Verdict(sentences=told)],
    )  # fmt: skip


def findings(pairs: Sequence[Validated]) -> list[str]:
    """What the predictions come to, a sentence for each fidelity."""
    told = []
    for fidelity in PREDICTED:
        times, memory, reserved = (
            errors(pairs, fidelity, metric) for metric in ("step_time_s", "peak_memory_bytes", "peak_reserved_bytes")
        )
        if not times:
            continue
        agreed, all_ = in_order(pairs, fidelity)
        alone = all(len(pair.measured.launches) == 1 for pair in pairs)
        quickest = [abs(p.quickest_error or 0) for p in pairs if p.predicted.fidelity == fidelity]
        least = "" if alone else f" (of each case's quickest launch {format_percent(median(quickest))})"
        factor, left = scaled(pairs, fidelity)
        common = (
            f"; after scaling all by {factor:.2f}: {format_percent(median(left))}, at most {format_percent(max(left))}"
        )
        sizes = f"; peak memory: at most {format_percent(max(memory))}" if memory else ""
        sizes += f"; reserved memory: at most {format_percent(max(reserved))}" if reserved else ""
        ordered = f"; {agreed} of {all_} pairs with a measured difference are in the right order" if all_ else ""
        told.append(
            f"{spelled(fidelity).capitalize()}: median error of the step time {format_percent(median(times))}{least}, "
            f"at most {format_percent(max(times))}{common if len(times) > 2 else ''}{ordered}{sizes}."
        )
    return told


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
