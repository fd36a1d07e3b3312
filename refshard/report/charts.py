"""Tables to plotly figures.

Colours are Okabe and Ito's, which people with colour-blindness can tell apart (M. Okabe and K. Ito, "Color
Universal Design", 2008), and no meaning rests on colour alone: every bar has its name on the axis and a
pattern, every curve a marker and a dash. Backgrounds are transparent and text is a grey that reads on black
and on white; the page's style replaces it by its own text colour.

What the page's filters need lies in ``meta``: of a figure of bars, its rows, each with its text and the number of its
case (none of a heading); of a curve, the number of its case, or of each of its points'.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from refshard.quantities import format_bytes, format_rate, format_seconds
from refshard.records import METRICS
from refshard.report import alternatives, views
from refshard.report.cases import BREAKDOWN, Case, ranks
from refshard.report.evidence import Setting
from refshard.report.still import still
from refshard.specs.case import REFERENCE_STRATEGY

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
REFERENCE_COLOUR = "#999999"
PATTERNS = ("", "/", "x", "\\", "-", ".", "|", "+")
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PART_COLOURS = dict(zip(BREAKDOWN, ("#0072B2", "#56B4E9", "#D55E00", "#BBBBBB")))
PART_PATTERNS = dict(zip(BREAKDOWN, ("", ".", "/", "")))

_TEXT = "#777777"
_GRID = "rgba(128,128,128,0.25)"
_AXIS = {
    "gridcolor": _GRID,
    "zerolinecolor": _GRID,
    "linecolor": _GRID,
    "automargin": True,
    "title": {"font": {"size": 13}},
}
_ROW_PX = 32
BAR = 0.7
"""Of a row. Plotly would else take the least distance between bars of one trace for it."""
_HEADROOM = 1.35  # room to the right of the longest bar for its label

THEME = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": _TEXT},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"font": {"size": 13}},
        "bargap": 0.3,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure as plotly's JSON without its theme, the sentence that says what it shows, and a drawing of it (SVG) for
    readers whose browser runs no script.
    """

    id: str
    title: str
    figure: dict[str, Any]
    alternative: str
    still: Markup


def chart(identity: str, title: str, figure: go.Figure, alternative: str, *, with_still: bool = True) -> Chart:
    """A figure for a page; its layout is in :data:`THEME`, which the page has once. Without a still drawing only a
    script draws it.
    """
    found = json.loads(figure.to_json())
    del found["layout"]["template"]
    drawing = still(found) if with_still else Markup()
    return Chart(id=identity, title=title, figure=found, alternative=alternative, still=drawing)


def theme() -> dict[str, Any]:
    """:data:`THEME` as plotly's JSON."""
    found: dict[str, Any] = json.loads(go.Figure(layout={"template": THEME}).to_json())["layout"]["template"]
    return found


def bar_charts(setting: Setting, prefix: str) -> dict[str, Chart]:
    """Step time, throughput and peak memory of every strategy, grouped by world size; keyed by metric."""
    makers = {"step_time_s": step_time, "tokens_per_s_gpu": throughput, "peak_memory_bytes": peak_memory}
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
    unit, size = views.axis_unit("s", _largest(middle))
    labels = [format_seconds(value) for value in middle]
    figure = _bars(setting, middle / size, labels, low=low / size, high=high / size)
    return figure.update_xaxes(title_text=f"{unit} per step (lower is better)")


def throughput(setting: Setting) -> go.Figure:
    """Tokens per second and GPU."""
    values = _stacked(views.pivot(setting, "tokens_per_s_gpu"))
    figure = _bars(setting, values, [format_rate(value) for value in values])
    return figure.update_xaxes(title_text="tokens/s/GPU (higher is better)", tickformat=",")


def peak_memory(setting: Setting) -> go.Figure:
    """Peak memory of the rank with the largest."""
    values = _stacked(views.pivot(setting, "peak_memory_bytes"))
    unit, size = views.axis_unit("B", _largest(values))
    figure = _bars(setting, values / size, [format_bytes(value) for value in values])
    return figure.update_xaxes(title_text=f"{unit} per rank (lower is better)")


def breakdown(setting: Setting) -> go.Figure:
    """Compute, overlapped and exposed communication and idle time of a traced step, stacked."""
    found = {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}
    return stacked(found, {part: (PART_COLOURS[part], PART_PATTERNS[part]) for part in BREAKDOWN})


def stacked(found: Mapping[Case, Mapping[str, float]], look: Mapping[str, tuple[str, str]]) -> go.Figure:
    """A bar per case, stacked of parts of a traced step, s; ``look`` has the colour and the pattern of each part."""
    unit, size = views.axis_unit("s", max((sum(parts.values()) for parts in found.values()), default=1.0))
    rows, places = case_rows(list(found))
    figure = go.Figure(
        [
            go.Bar(
                name=part,
                y=places,
                x=_short([parts[part] / size for parts in found.values()]),
                width=BAR,
                orientation="h",
                marker=filling(paint, pattern),
                customdata=[
                    f"{label_text(case.label)}<br>{part}: {format_seconds(parts[part])}"
                    for case, parts in found.items()
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
            for part, (paint, pattern) in look.items()
        ]
    )
    lay_out(figure, rows, barmode="stack", legend=True)
    return figure.update_xaxes(title_text=f"{unit} per traced step")


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
        x=_short(high),
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
        x=_short(part["value"]),
        width=BAR,
        orientation="h",
        marker=filling(colour(setting, strategy), _pattern(setting, strategy)),
        error_x=_error_bars(part),
        customdata=[f"{label_text(strategy)}, {ranks(n)}: {text}" for (n, _), text in zip(index, part["label"])],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _short(values: Iterable[float]) -> list[float]:
    """Six digits are more than a screen shows, and a third of the page's bytes."""
    return [float(f"{value:.6g}") for value in values]


def _largest(values: "pd.Series[float]") -> float:
    return float(values.max()) if len(values) else 1.0


def _error_bars(part: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": _short(part["high"] - part["value"]),
        "arrayminus": _short(part["value"] - part["low"]),
        "visible": bool((part["low"] < part["high"]).any()),
        "color": _TEXT,
        "thickness": 1.5,
        "width": 5,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a figure of bars; a heading has no case."""

    text: str
    case: int | None = None


def case_rows(cases: Sequence[Case]) -> tuple[list[Row], list[int]]:
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


def lay_out(figure: go.Figure, rows: Sequence[Row], *, barmode: str, legend: bool = False) -> None:
    """Give each row its name, from top to bottom."""
    count = max(len(rows), 1)
    figure.update_layout(
        template=THEME, height=70 + (60 if legend else 0) + _ROW_PX * count, showlegend=legend, barmode=barmode,
        meta={"rows": [{"text": row.text, "case": row.case} for row in rows]},
    )  # fmt: skip
    figure.update_yaxes(
        ticklabelstandoff=6,
        tickvals=list(range(len(rows))),
        ticktext=[row.text for row in rows],
        range=[count - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )


def label_text(name: str) -> str:
    """A name as plotly must get it, because plotly reads a subset of HTML in every label."""
    return html.escape(name, quote=False)


def filling(colour: str, pattern: str) -> dict[str, Any]:
    """A bar's colour with a pattern over it."""
    return {
        "color": colour,
        "line": {"color": _TEXT, "width": 0.5},
        "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "size": 7},
    }


def colour(setting: Setting, strategy: str) -> str:
    """A strategy's colour, the same on the whole page."""
    if strategy == REFERENCE_STRATEGY:
        return REFERENCE_COLOUR
    return OKABE_ITO[setting.known.index(strategy) % len(OKABE_ITO)]


def _pattern(setting: Setting, strategy: str) -> str:
    return "" if strategy == REFERENCE_STRATEGY else PATTERNS[setting.known.index(strategy) % len(PATTERNS)]
