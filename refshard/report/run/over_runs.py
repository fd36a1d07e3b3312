"""The trend of each case over several runs, relative to its first run."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, machine
from refshard.analysis.history import Series, series_of
from refshard.quantities import format_seconds
from refshard.records import Run
from refshard.report.draw.charts import THEME, Chart, chart, label_text
from refshard.report.draw.palette import DASHES, MARKERS, OKABE_ITO
from refshard.report.run.history import launches_told
from refshard.report.run.origin import run_names

MOST_CURVES = 8
_METRIC = "step_time_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverRuns:
    """Cases that several runs measured: a row each, and a chart."""

    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    chart: Chart


def over_runs(runs: Sequence[Run], evidence: Evidence) -> OverRuns | None:
    """None if no case ended ok in two runs on one machine."""
    cases = {(case.spec, machine(case.header.environment)): case for case in evidence.cases}
    every = [one for one in series_of(runs, _METRIC) if len(one.points) > 1 and (one.spec, one.environment) in cases]
    if not every:
        return None
    drawn = sorted(every, key=lambda one: (-len(one.points), -abs(_moved(one) - 1)))[:MOST_CURVES]
    shown = [one for one in every if one in drawn]
    furthest = max(every, key=lambda one: abs(_moved(one) - 1))
    left = f" The chart shows {len(shown)} of {len(every)} cases; the table has all." if len(shown) < len(every) else ""
    told = (
        f"{len(every)} {'case' if len(every) == 1 else 'cases'} over up to {max(len(o.points) for o in every)} runs; "
        f"the largest change is {furthest.case}: {_moved(furthest):.3f} times its first run.{left}"
    )
    of = {one: cases[one.spec, one.environment] for one in every}
    return OverRuns(
        table=pd.DataFrame([_row(one) for one in every]),
        cases=tuple(of.values()),
        chart=chart("history", "step time over runs", _draw(runs, shown, of), told),
    )


def _moved(series: Series) -> float:
    return series.points[-1].value / series.points[0].value


def _row(series: Series) -> dict[str, str]:
    return {
        "case": series.case,
        "machine": series.environment,
        "runs": str(len(series.points)),
        "launches per run": launches_told(series),
        "first": format_seconds(series.points[0].value),
        "latest": format_seconds(series.points[-1].value),
        "latest / first": f"{_moved(series):.3f}",
    }


def _draw(runs: Sequence[Run], shown: Sequence[Series], cases: dict[Series, CaseResult]) -> go.Figure:
    ordered = sorted(runs, key=lambda run: run.header.started_at)
    place_of = {(run.header.run_id, run.header.started_at): place for place, run in enumerate(ordered)}
    figure = go.Figure()
    for place, one in enumerate(shown):
        figure.add_scatter(
            name=label_text(one.case),
            x=[place_of[point.run, point.started_at] for point in one.points],
            y=[float(f"{point.value / one.points[0].value:.5g}") for point in one.points],
            mode="lines+markers",
            line={"color": OKABE_ITO[place % len(OKABE_ITO)], "dash": DASHES[place % len(DASHES)]},
            marker={"symbol": MARKERS[place % len(MARKERS)], "size": 8},
            meta={"case": cases[one].number},
            customdata=[f"{label_text(point.run)}: {format_seconds(point.value)}" for point in one.points],
            hovertemplate=f"{label_text(one.case)}<br>%{{customdata}}<extra></extra>",
        )
    figure.update_layout(template=THEME, height=300 + 12 * len(shown), showlegend=True)
    names = [label_text(name) for name in run_names(ordered)]
    places = list(range(0, len(names), -(-len(names) // 12)))
    figure.update_xaxes(title_text="run, oldest first", tickvals=places, ticktext=[names[place] for place in places])
    return figure.update_yaxes(title_text="step time / first run")
