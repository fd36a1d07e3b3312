"""Predictions compared with measurements."""

from collections.abc import Sequence
from statistics import median

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.validation import PREDICTED, Validated, as_objects, errors, in_order, scaled, validated
from refshard.quantities import format_percent
from refshard.report.blocks import Answer, Cell, Notes, Row, Section, Table, Verdict, Where, table, without_empty
from refshard.report.run.cells import metric, state
from refshard.report.run.tables import numbers
from refshard.specs.case import spelled


def validation_answer(pairs: Sequence[Validated]) -> Answer:
    """A row for each prediction, and a summary of their errors by fidelity."""
    objects, sentences = as_objects(pairs), findings(pairs)
    return Answer(
        data={"verdict": sentences, "predictions": objects}, rows=objects,
        blocks=[_table(pairs), Verdict(sentences=sentences)],
    )  # fmt: skip


def dry_runs(evidence: Evidence) -> Section | None:
    """Dry runs compared with the measured cases, also failed ones; None if no case is both."""
    pairs = [pair for pair in validated(evidence) if pair.predicted.fidelity == "dryrun"]
    if not pairs:
        return None
    found = _table(pairs, title="Each case, measured and dry-run", where="detail")
    sentences = Notes(sentences=findings([pair for pair in pairs if pair.ok]))
    return Section(title="Dry run and measurement", id="dry-runs", nav="Dry runs", blocks=[sentences, found])


def dry_runs_of(evidence: Evidence) -> dict[CaseResult, CaseResult]:
    """The dry run of each measured case that has one, if both ended ok."""
    pairs = (pair for pair in validated(evidence) if pair.ok and pair.predicted.fidelity == "dryrun")
    return {pair.measured: pair.predicted for pair in pairs}


def _table(pairs: Sequence[Validated], title: str = "", where: Where = "always") -> Table:
    """States only if one did not end ok, and sizes only if known."""

    def error(pair: Validated, name: str) -> Cell:
        found = pair.error(name)
        return None if found is None else f"{100 * found:+.1f} %"

    whole = all(pair.ok for pair in pairs)
    reserved = any(pair.error("peak_reserved_bytes") is not None for pair in pairs if pair.ok)
    figures = {"step_time_s": ("step time", "error"), "peak_memory_bytes": ("peak memory", "its error")}
    if reserved:
        figures["peak_reserved_bytes"] = "peak reserved", "error of reserved"
    rows: list[Row] = [
        {
            "case": pair.measured.full_label,
            "model": pair.measured.spec.job.model,
            "predicted": spelled(pair.predicted.fidelity),
            "on": pair.predicted.spec.job.cluster,
            "measured": None if whole else state(pair.measured.state),
            "prediction": None if whole else state(pair.predicted.state),
            **{
                head: cell
                for name, (label, error_label) in figures.items()
                for head, cell in (
                    (f"{label} measured", metric(pair.measured, name)),
                    (f"{label} predicted", metric(pair.predicted, name)),
                    (error_label, error(pair, name)),
                )
            },
        }
        for pair in pairs
    ]
    return table(
        without_empty(rows, ["measured", "prediction"]), left=4, text=["measured", "prediction"], title=title,
        where=where, caption="An error above 0 means that the prediction is too large",
        cases=numbers([pair.measured for pair in pairs]),
    )  # fmt: skip


def findings(pairs: Sequence[Validated]) -> list[str]:
    """The errors of the predictions, a sentence for each fidelity."""
    sentences = []
    for fidelity in PREDICTED:
        here = [pair for pair in pairs if pair.predicted.fidelity == fidelity]
        times = errors(here, "step_time_s")
        if not times:
            continue
        text = f"{spelled(fidelity).capitalize()}: median error of the step time {format_percent(median(times))}"
        if any(len(pair.measured.launches) > 1 for pair in here):
            quickest = median(abs(pair.quickest_error or 0) for pair in here)
            text += f" (of each case's quickest launch {format_percent(quickest)})"
        text += f", at most {format_percent(max(times))}"
        if len(times) > 2:
            factor, left = scaled(here)
            text += f"; after scaling all by {factor:.2f}: {format_percent(median(left))}, "
            text += f"at most {format_percent(max(left))}"
        agreed, known = in_order(here)
        if known:
            text += f"; {agreed} of {known} pairs with a measured difference are in the right order"
        for name, label in (("peak_memory_bytes", "peak memory"), ("peak_reserved_bytes", "reserved memory")):
            if sizes := errors(here, name):
                text += f"; {label}: at most {format_percent(max(sizes))}"
        sentences.append(f"{text}.")
    return sentences
