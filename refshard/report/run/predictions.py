"""Predictions compared with measurements."""

from collections.abc import Sequence
from statistics import median

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.validation import PREDICTED, Validated, as_objects, beside_measured, errors, in_order, scaled
from refshard.quantities import format_percent
from refshard.report.blocks import Answer, Notes, Row, Section, Table, Verdict, Where, table, without_empty
from refshard.report.run.cells import metric, percent_error, state
from refshard.specs.case import spelled


def validation_answer(pairs: Sequence[Validated]) -> Answer:
    """A row a prediction, and a summary of their errors by fidelity."""
    objects = as_objects(pairs)
    sentences = findings(pairs)
    return Answer(
        data={"verdict": sentences, "predictions": objects}, rows=objects,
        blocks=[_table(pairs), Verdict(sentences=sentences)],
    )  # fmt: skip


def dry_runs(evidence: Evidence) -> Section | None:
    """Dry runs compared with the measured cases, those too that did not end ok; None if no case is both."""
    pairs = [pair for pair in beside_measured(evidence) if pair.predicted.fidelity == "dryrun"]
    if not pairs:
        return None
    both = [pair for pair in pairs if pair.measured.ok and pair.predicted.ok]
    found = _table(pairs, title="Each case, measured and dry-run", where="detail")
    title = "Dry run and measurement"
    return Section(title=title, id="dry-runs", nav="Dry runs", blocks=[Notes(sentences=findings(both)), found])


def dry_runs_of(evidence: Evidence) -> dict[CaseResult, CaseResult]:
    """The dry run of each measured case that has one, where both ended ok."""
    pairs = (pair for pair in beside_measured(evidence) if pair.predicted.fidelity == "dryrun")
    return {pair.measured: pair.predicted for pair in pairs if pair.measured.ok and pair.predicted.ok}


def _table(pairs: Sequence[Validated], title: str = "", where: Where = "always") -> Table:
    """States only if one did not end ok, and sizes only if known."""
    whole = all(pair.measured.ok and pair.predicted.ok for pair in pairs)
    rows: list[Row] = [
        {
            "case": pair.measured.full_label,
            "model": pair.measured.spec.job.model,
            "predicted": spelled(pair.predicted.fidelity),
            "on": pair.predicted.spec.job.cluster,
            "measured": None if whole else state(pair.measured.state),
            "prediction": None if whole else state(pair.predicted.state),
            "step time measured": metric(pair.measured, "step_time_s"),
            "step time predicted": metric(pair.predicted, "step_time_s"),
            "error": percent_error(pair.step_time_error),
            "peak memory measured": metric(pair.measured, "peak_memory_bytes"),
            "peak memory predicted": metric(pair.predicted, "peak_memory_bytes"),
            "its error": percent_error(pair.error("peak_memory_bytes")),
            "peak reserved measured": metric(pair.measured, "peak_reserved_bytes"),
            "peak reserved predicted": metric(pair.predicted, "peak_reserved_bytes"),
            "error of reserved": percent_error(pair.error("peak_reserved_bytes")),
        }
        for pair in pairs
    ]
    optional = ["measured", "prediction"]
    if all(pair.error("peak_reserved_bytes") is None for pair in pairs if pair.measured.ok and pair.predicted.ok):
        rows = [{head: cell for head, cell in row.items() if "reserved" not in head} for row in rows]
    return table(
        without_empty(rows, optional), left=4, text=["measured", "prediction"], title=title, where=where,
        caption="An error above 0 means that the prediction is too large",
        cases=[pair.measured.number for pair in pairs],
    )  # fmt: skip


def findings(pairs: Sequence[Validated]) -> list[str]:
    """The errors of the predictions, a sentence for each fidelity."""
    sentences = []
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
        sentences.append(
            f"{spelled(fidelity).capitalize()}: median error of the step time {format_percent(median(times))}{least}, "
            f"at most {format_percent(max(times))}{common if len(times) > 2 else ''}{ordered}{sizes}."
        )
    return sentences
