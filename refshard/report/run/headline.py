"""The comparison's table: one row per strategy, the figures that decide, fastest first."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.compared import metric_ratio
from refshard.analysis.evidence import Setting
from refshard.analysis.rankings import Ranking
from refshard.analysis.ratios import Ratio, ratios
from refshard.quantities import format_bytes, format_percent
from refshard.report.run import views
from refshard.report.run.intervals import ratio_text
from refshard.report.run.verdict import STATES
from refshard.specs.case import REFERENCE_STRATEGY, REPEATING


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The table, its cases, the column to mark by metric, and the case that the others are compared with."""

    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    columns: dict[str, str]
    base: CaseResult | None


def headline(ranking: Ranking, setting: Setting) -> Headline:
    """``setting`` holds the comparison's cases and its references."""
    base = _base(ranking)
    cases = tuple(sorted(setting.cases, key=_place))
    compared = {ratio.case: ratio for ratio in ratios(setting, base.strategy)} if base else {}
    interval = not all(case.fidelity in REPEATING for case in cases)
    time = "step time (95 % interval)" if interval else "step time"
    reserved = ranking.memory_metric == "peak_reserved_bytes"
    memory = "reserved memory" if reserved else "peak memory"
    rows = []
    for case in cases:
        step = views.step_time_text(views.sampled(case), case.metrics["step_time_s"])
        row = {
            "strategy": case.strategy if case.spec.world_size == ranking.world_size else case.label,
            time: step if case.ok else STATES[case.state],
            "vs": "1" if case is base else _ratio(compared.get(case), base),
            memory: _memory(case, ranking.memory_metric),
            "tokens/s/GPU": views.format_metric("tokens_per_s_gpu", case.metrics["tokens_per_s_gpu"]),
            "MFU": views.format_metric("mfu", case.metrics["mfu"]),
            "exposed comm.": format_percent(case.exposed_share) if case.metrics["comm_s"] else views.MISSING,
        }
        rows.append(row)
    table = pd.DataFrame(rows)
    table = table.drop(columns=[name for name in ("MFU", "exposed comm.") if (table[name] == views.MISSING).all()])
    return Headline(
        table=table,
        cases=cases,
        columns={"step_time_s": time, "tokens_per_s_gpu": "tokens/s/GPU", "mfu": "MFU", ranking.memory_metric: memory},
        base=base,
    )


def _ratio(ratio: Ratio | None, base: CaseResult | None) -> str:
    if ratio is None or base is None:
        return views.MISSING
    if ratio.step_time is not None:
        return ratio_text(ratio.step_time)
    plain = metric_ratio(base, ratio.case, "step_time_s")
    return views.MISSING if plain is None else f"{plain:.2f}"


def _base(ranking: Ranking) -> CaseResult | None:
    """The fastest; if nothing is ranked, the first that finished."""
    return ranking.winner or next(iter(ranking.candidates), None)


def _place(case: CaseResult) -> tuple[bool, bool, float]:
    """Fastest first, then those that did not end ok, then references."""
    return case.strategy == REFERENCE_STRATEGY, not case.ok, case.metrics["step_time_s"] or 0.0


def _memory(case: CaseResult, metric: str) -> str:
    value = case.metrics[metric]
    if value is None:
        return views.MISSING
    return format_bytes(value) if case.ok else f"needs {format_bytes(value)}"


def failures(cases: Sequence[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    """Cases that did not end ok, by state in words."""
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        if not case.ok:
            found.setdefault(STATES[case.state], []).append(case)
    return list(found.items())
