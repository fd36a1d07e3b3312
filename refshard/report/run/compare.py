"""Two runs, or strategies of one run, compared: ratios with their intervals."""

from collections.abc import Sequence
from typing import Any

from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.ratios import RATIO_COLUMNS, Ratio, ratio_columns, ratios
from refshard.errors import SpecError, nearest
from refshard.plain import plain
from refshard.quantities import format_percent
from refshard.report.blocks import Answer, Cell, Column, Marked, Notes, Style, Table, Verdict
from refshard.report.run.against import Changed, against
from refshard.report.run.columns import names
from refshard.report.run.intervals import no_interval, ratio_text
from refshard.report.run.verdict import listed
from refshard.report.run.views import as_json, format_metric
from refshard.specs.case import spelled

_OUTCOMES: dict[str, Style] = {"slower": "bad", "faster": "good", "unknown": "doubtful"}


def compare_strategies(evidence: Evidence, a: str, others: Sequence[str]) -> Answer:
    """Each of the strategies ``others`` (all, if empty) over ``a`` at the same number of ranks.

    Raises:
        SpecError: the run has no case of a strategy.
    """
    for name in (a, *others):
        _check_strategy(evidence, name)
    found = [
        (setting, ratio)
        for setting in evidence.settings
        for ratio in ratios(setting, a)
        if not others or ratio.case.strategy in others
    ]
    rows = [{**row, **more} for row, more in zip(as_json(evidence), ratio_columns(evidence, a))]
    compared = {ratio.case.number for _, ratio in found}
    rows = [row for row, case in zip(rows, evidence.cases) if case.number in compared]
    told = [_sentence(ratio, a) for _, ratio in found] or [
        f"Nothing to compare: no other case with the same number of ranks as {a} ended ok."
    ]
    intervals = [ratio.step_time for _, ratio in found if ratio.step_time and ratio.step_time.bounded]
    doubts = dict.fromkeys(doubt for interval in intervals for doubt in interval.warnings)
    tables = [
        _ratio_table(setting, [ratio for s, ratio in found if s is setting], a)
        for setting in dict.fromkeys(setting for setting, _ in found)
    ]
    return Answer(
        data={"a": a, "verdict": told, "notes": list(doubts), "cases": rows},
        rows=rows,
        columns=[*names(), *RATIO_COLUMNS],
        blocks=[*tables, Notes(sentences=[f"Caution: {doubt}." for doubt in doubts]), Verdict(sentences=told)],
    )


def _check_strategy(evidence: Evidence, name: str) -> None:
    present = sorted({case.strategy for case in evidence.cases})
    if not present:
        raise SpecError(f"compare: this run has no case yet, so none of strategy '{name}'; wait for its first case")
    if name not in present:
        raise SpecError(
            f"compare: there is no run in '{name}', and this run has no case of strategy '{name}'; "
            f"{nearest(name, present)}"
        )


def _ratio_table(setting: Setting, found: Sequence[Ratio], a: str) -> Table:
    timed = [ratio.step_time for ratio in found if ratio.step_time]
    paired = ", paired by round" if all(time.paired for time in timed) else ""
    interval = f"\n(95 % interval{paired})" if timed else ""
    return Table(
        title=plain(setting.label),
        columns=[
            Column("strategy", "left"), Column("ranks"), Column(f"step time / {a}{interval}"),
            Column(f"peak memory / {a}"),
        ],
        rows=[
            [
                ratio.case.strategy, f"{ratio.case.spec.world_size:,}", _time(ratio), _times(ratio.peak_memory),
            ]
            for ratio in found
        ],
    )  # fmt: skip


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _time(ratio: Ratio) -> Cell:
    found = ratio.step_time
    if found is None:
        return _times(ratio.calculated)
    style: Style = "plain" if not (found.bounded and found.significant) else "bad" if found.ratio > 1 else "good"
    return Marked(ratio_text(found), style)


def _sentence(ratio: Ratio, a: str) -> str:
    memory = "" if ratio.peak_memory is None else f"; peak memory {_more(ratio.peak_memory, 'more', 'less')}"
    return f"{ratio.case.label} against {a}: {_time_words(ratio)}{memory}."


def _time_words(ratio: Ratio) -> str:
    time = ratio.step_time
    if time is None:
        if ratio.calculated is None:
            return "step time not compared"
        found, how = ratio.calculated, f"{spelled(ratio.case.fidelity)}, so there is no interval"
    elif not time.bounded:
        found, how = time.ratio, no_interval(time)
    elif not time.significant:
        return "a tie, since the interval of the step time's ratio includes 1"
    else:
        found, how = time.ratio, "significant"
    return f"step time {_more(found, 'longer', 'shorter')} ({how})"


def _more(ratio: float, up: str, down: str) -> str:
    part = format_percent(abs(ratio - 1))
    return "the same" if part == format_percent(0) else f"{part} {up if ratio > 1 else down}"


def compare_runs(a: Evidence, b: Evidence, machines: Sequence[str]) -> Answer:
    """Every case that both runs have, B over A. ``machines`` says what differs between the two machines."""
    found = against(b, a)
    rows = [_row(one) for one in found.changed]
    return Answer(
        data={
            "a": [run.header.run_id for run in a.runs], "b": [run.header.run_id for run in b.runs],
            "verdict": list(found.sentences), "notes": list(found.doubts), "machines_differ_in": list(machines),
            "cases": rows,
        },
        rows=rows,
        columns=_COLUMNS,
        blocks=[
            _change_table(found.changed, listed([run.header.run_id for run in a.runs])),
            Notes(sentences=[f"{words}." for words in machines], title="Machine or software differ") if machines
            else Notes(sentences=["Both runs have the same machine and software."]),
            Notes(sentences=[f"Caution: {doubt}." for doubt in found.doubts]),
            Verdict(sentences=found.sentences),
        ],
    )  # fmt: skip


_COLUMNS = (
    "case", "strategy", "world_size", "step_time_a_s", "step_time_b_s", "step_time_ratio", "step_time_ratio_low",
    "step_time_ratio_high", "time", "why_not_compared", "peak_memory_a_bytes", "peak_memory_b_bytes", "exact_changes",
)  # fmt: skip


def _row(one: Changed) -> dict[str, Any]:
    bounded = one.interval if one.interval and one.interval.bounded else None
    values = (
        one.case.name, one.case.strategy, one.case.spec.world_size, one.before.metrics["step_time_s"],
        one.case.metrics["step_time_s"], one.ratio, bounded.low if bounded else None, bounded.high if bounded else None,
        one.outcome, one.why_not or None, one.before.metrics["peak_memory_bytes"],
        one.case.metrics["peak_memory_bytes"],
        None if one.exact is None else [f"{c.metric}: {c.before} -> {c.after} ({c.verdict})" for c in one.exact],
    )  # fmt: skip
    return dict(zip(_COLUMNS, values))


def _change_table(changed: Sequence[Changed], a: str) -> Table:
    heads = ("case", "A", "B", "B / A (95 % interval)", "time", "peak memory A", "peak memory B", "exact metrics")
    return Table(
        title=f"A: {a}",
        columns=[Column(head, "left" if head in ("case", "time") else "right") for head in heads],
        rows=[
            [
                one.case.full_label,
                format_metric("step_time_s", one.before.metrics["step_time_s"]),
                format_metric("step_time_s", one.case.metrics["step_time_s"]),
                _ratio(one),
                Marked(one.outcome, _OUTCOMES.get(one.outcome, "plain")),
                format_metric("peak_memory_bytes", one.before.metrics["peak_memory_bytes"]),
                format_metric("peak_memory_bytes", one.case.metrics["peak_memory_bytes"]),
                "-" if one.exact is None else f"{len(one.exact)} changed" if one.exact else "the same",
            ]
            for one in changed
        ],
    )


def _ratio(one: Changed) -> str:
    if one.ratio is None:
        return one.why_not
    return f"{one.ratio:.3f}" if one.interval is None else ratio_text(one.interval, digits=3)
