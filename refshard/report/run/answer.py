"""Runs as answers: a run's tables and verdict, cases over several runs, and what a suite would launch."""

from collections.abc import Sequence

from refshard.analysis.evidence import Evidence
from refshard.analysis.history import Series
from refshard.plain import plain
from refshard.quantities import format_duration
from refshard.records import METRICS
from refshard.report.blocks import Answer, Notes, Row, Verdict, table
from refshard.report.run.rows import COLUMNS, as_json
from refshard.report.run.tables import case_table, trend_row
from refshard.report.run.verdict import findings, notes, overview, unfinished
from refshard.specs.case import Case
from refshard.specs.suite import SuiteSpec


def run_answer(evidence: Evidence, *, more: str = "", status: int = 0) -> Answer:
    """Tables by setting, notes, and the verdict: who is fastest, by how much, and who needs the least memory, or how
    often each leads in many comparisons. ``more`` is a last line for people.
    """
    rows = as_json(evidence)
    found = findings(evidence)
    each = [f"{one.title}: {one.summary}" if len(found) > 1 else one.summary for one in found if one.summary]
    summed_up = overview(found)
    verdict = [*unfinished(evidence), *(summed_up or each)]
    remarks = [plain(sentence) for sentence in notes(evidence)]
    return Answer(
        data={"verdict": verdict, "notes": remarks, "cases": rows},
        rows=rows,
        columns=list(COLUMNS),
        blocks=[
            *(
                # A setting of nothing but references is a detail.
                case_table(one.cases, title=one.label, where="always" if one in evidence.ranked else "detail")
                for one in evidence.settings
            ),
            Notes(sentences=each if summed_up else [], title="Each comparison", where="detail"),
            Notes(sentences=[text for one in found for text in (one.busy, one.why) if text], where="detail"),
            Notes(sentences=remarks),
            Verdict(sentences=verdict),
            *([Verdict(sentences=[more], style="plain")] if more else []),
        ],
        status=status,
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
    """The cases that a suite would launch, and how long they will take, s: as ``seen_before``, else estimated;
    ``unknown`` ones not.
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
    expected = seconds if not unknown else None
    title = f"{suite.name}: {suite.about}" if suite.about else suite.name
    return Answer(
        data={"suite": suite.name, "launches": launches, "expected_s": expected, "cases": rows},
        rows=rows,
        blocks=[table(shown, left=4, title=title), Verdict(sentences=[sentence])],
    )
