"""Charts of a setting: bars per case for times, throughput, memory and the parts of a traced step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import BREAKDOWN, CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.quantities import axis_unit, format_bytes, format_rate, format_seconds
from refshard.records import METRICS
from refshard.report.draw.charts import BAR, Bar, Chart, Row, chart, filling, label_text, lay_out, short, stacked
from refshard.report.draw.palette import GREY, INK, STEP, Look, look
from refshard.report.run import alternatives, views
from refshard.specs.case import REFERENCE_STRATEGY

_HEADROOM = 1.35  # room to the right of the longest bar for its label


def bar_charts(setting: Setting, prefix: str) -> dict[str, Chart]:
    """Step time, throughput and memory of every strategy, grouped by world size; keyed by metric."""
    makers = {
        "step_time_s": step_time, "tokens_per_s_gpu": throughput, views.memory_metric(setting.cases): peak_memory
    }  # fmt: skip
    return {
        metric: chart(f"{prefix}-{metric}", METRICS[metric].label, make(setting), alternatives.bars(setting, metric))
        for metric, make in makers.items()
    }


def breakdown_chart(setting: Setting, prefix: str) -> Chart:
    """Where a traced step goes."""
    return chart(f"{prefix}-breakdown", "traced step", breakdown(setting), alternatives.breakdown(setting))


def step_time(setting: Setting) -> go.Figure:
    """Median step time with its 95 % interval."""
    middle, low, high = (
        _stacked(views.pivot(setting, key)) for key in ("step_time_s", "step_time_low_s", "step_time_high_s")
    )
    low, high = (end.reindex(middle.index).fillna(middle) for end in (low, high))
    unit, size = axis_unit("s", _largest(middle))
    labels = [format_seconds(value) for value in middle]
    figure = _bars(setting, middle / size, labels, low=low / size, high=high / size)
    return figure.update_xaxes(title_text=f"{unit} per step (lower is better)")


def throughput(setting: Setting) -> go.Figure:
    """Tokens per second and GPU."""
    values = _stacked(views.pivot(setting, "tokens_per_s_gpu"))
    figure = _bars(setting, values, [format_rate(value) for value in values])
    return figure.update_xaxes(title_text="tokens/s/GPU (higher is better)", tickformat=",")


def peak_memory(setting: Setting) -> go.Figure:
    """Peak memory of the rank with the largest; on GPUs what is reserved."""
    values = _stacked(views.pivot(setting, views.memory_metric(setting.cases)))
    unit, size = axis_unit("B", _largest(values))
    figure = _bars(setting, values / size, [format_bytes(value) for value in values])
    return figure.update_xaxes(title_text=f"{unit} per rank (lower is better)")


def breakdown(setting: Setting) -> go.Figure:
    """Compute, overlapped and exposed communication and idle time of a traced step, stacked."""
    found = {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}
    return step_parts(found, BREAKDOWN)


def step_parts(found: Mapping[CaseResult, Mapping[str, float]], parts: Iterable[str]) -> go.Figure:
    """A bar per case, stacked of ``parts`` of a traced step, s."""
    rows, places = case_rows(list(found))
    bars = [Bar(place=place, name=case.label, parts=of) for place, (case, of) in zip(places, found.items())]
    return stacked(rows, bars, {part: STEP[part] for part in parts}, "s", "per traced step")


def _stacked(table: pd.DataFrame) -> "pd.Series[float]":
    """Values by (world size, strategy), world sizes ascending, without what is missing."""
    return table.unstack().dropna().astype(float)  # type: ignore[return-value]


def _bars(
    setting: Setting,
    values: "pd.Series[float]",
    labels: list[str],
    *,
    low: "pd.Series[float] | None" = None,
    high: "pd.Series[float] | None" = None,
) -> go.Figure:
    """A horizontal bar per case, a trace per strategy; its value beside it, past its error bar if there is one."""
    low, high = (values if end is None else end for end in (low, high))
    rows, places = _rows(setting, values.index)
    table = pd.DataFrame({"value": values, "low": low, "high": high})
    table["place"], table["label"] = places, labels
    by_strategy = table.groupby("strategy", sort=False) if len(table) else ()
    bars = [_strategy_bars(setting, str(name), part) for name, part in by_strategy]
    text = go.Scatter(
        y=places,
        x=short(high),
        mode="text",
        text=[f" {label}" for label in labels],
        textposition="middle right",
        hoverinfo="skip",
    )
    figure = go.Figure([*bars, text])
    lay_out(figure, rows, barmode="overlay")  # a row holds one bar, so bars need not make room
    return figure.update_xaxes(range=[0, _HEADROOM * _largest(high)])


def _strategy_bars(setting: Setting, strategy: str, part: pd.DataFrame) -> go.Bar:
    index = part.index.tolist()
    return go.Bar(
        y=part["place"].tolist(),
        x=short(part["value"]),
        width=BAR,
        orientation="h",
        marker=filling(_look(setting, strategy)),
        error_x=_error_bars(part),
        customdata=[f"{label_text(strategy)}, {ranks(n)}: {text}" for (n, _), text in zip(index, part["label"])],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _largest(values: "pd.Series[float]") -> float:
    return float(values.max()) if len(values) else 1.0


def _error_bars(part: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": short(part["high"] - part["value"]),
        "arrayminus": short(part["value"] - part["low"]),
        "visible": bool((part["low"] < part["high"]).any()),
        "color": INK,
        "thickness": 1.5,
        "width": 5,
    }


def case_rows(cases: Sequence[CaseResult]) -> tuple[list[Row], list[int]]:
    """A row for each case, those of a world size under its heading, and the place of each case's row.

    Places are numbers, not plotly's two-level categories, because those need twice the width for their names.
    """
    rows: list[Row] = []
    before = None
    for case in cases:
        if case.spec.world_size != before:
            before = case.spec.world_size
            rows.append(Row(text=f"<b>{ranks(before)}</b>"))
        rows.append(Row(text=label_text(case.strategy), case=case.number))
    return rows, [place for place, row in enumerate(rows) if row.case is not None]


def _rows(setting: Setting, index: "pd.Index[Any]") -> tuple[list[Row], list[int]]:
    """Those of each (world size, strategy)."""
    found = {(case.spec.world_size, case.strategy): case for case in setting.cases}
    return case_rows([found[int(world_size), str(strategy)] for world_size, strategy in index.tolist()])


def colour(setting: Setting, strategy: str) -> str:
    """A strategy's colour, the same on the whole page."""
    return _look(setting, strategy).colour


def _look(setting: Setting, strategy: str) -> Look:
    return Look(GREY) if strategy == REFERENCE_STRATEGY else look(setting.known.index(strategy))
