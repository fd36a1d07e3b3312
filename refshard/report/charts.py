"""Tables to plotly figures.

Colours are Okabe and Ito's, which people with colour-blindness can tell apart (M. Okabe and K. Ito, "Color
Universal Design", 2008), and no meaning rests on colour alone: every bar has its name on the axis and a
pattern, every curve a marker and a dash. Backgrounds are transparent and text is a grey that reads on black
and on white; the page's style replaces it by its own text colour.
"""

import html
import json
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from refshard.quantities import format_bytes, format_rate, format_seconds
from refshard.records import METRICS
from refshard.report import alternatives, views
from refshard.report.cases import BREAKDOWN, Setting, ranks
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
    """A figure as plotly's JSON, and the sentence that says what it shows."""

    id: str
    title: str
    figure: dict[str, Any]
    alternative: str


def bar_charts(setting: Setting, prefix: str) -> dict[str, Chart]:
    """Step time, throughput and peak memory of every strategy, grouped by world size; keyed by metric."""
    makers = {"step_time_s": step_time, "tokens_per_s_gpu": throughput, "peak_memory_bytes": peak_memory}
    return {
        metric: _chart(f"{prefix}-{metric}", METRICS[metric].label, make(setting), alternatives.bars(setting, metric))
        for metric, make in makers.items()
    }


def breakdown_chart(setting: Setting, prefix: str) -> Chart:
    """Where a traced step goes."""
    return _chart(f"{prefix}-breakdown", "traced step", breakdown(setting), alternatives.breakdown(setting))


def loss_chart(training: Setting, prefix: str) -> Chart:
    """Loss per step."""
    return _chart(f"{prefix}-losses", "loss", loss_curves(training), alternatives.curves(training))


def _chart(identity: str, title: str, figure: go.Figure, alternative: str) -> Chart:
    return Chart(id=identity, title=title, figure=json.loads(figure.to_json()), alternative=alternative)


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
    parts = views.breakdown(setting)
    unit, size = views.axis_unit("s", _largest(parts.sum(axis="columns")))
    places = _places(parts.index)
    figure = go.Figure(
        [
            go.Bar(
                name=part,
                y=places,
                x=(parts[part] / size).tolist(),
                orientation="h",
                marker=filling(PART_COLOURS[part], PART_PATTERNS[part]),
                customdata=[
                    f"{label_text(str(strategy))}, {ranks(int(n))}<br>{part}: {format_seconds(seconds)}"
                    for (n, strategy), seconds in zip(parts.index.tolist(), parts[part])
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
            for part in BREAKDOWN
        ]
    )
    _lay_out(figure, parts.index, barmode="stack", legend=True)
    return figure.update_xaxes(title_text=f"{unit} per traced step")


def loss_curves(training: Setting) -> go.Figure:
    """Loss per step of every case; earlier curves are wider, so that coinciding ones stay visible."""
    table = views.losses(training)
    strategies = {case.label: case.strategy for case in training.cases}
    count = len(table.columns)
    figure = go.Figure(
        [
            go.Scatter(
                name=label_text(str(label)),
                x=table.index.tolist(),
                y=[None if pd.isna(loss) else loss for loss in table[label]],
                mode="lines+markers",
                line={
                    "color": _colour(training, strategies[str(label)]),
                    "width": 1.5 + 1.25 * (count - 1 - place),
                    "dash": DASHES[place % len(DASHES)],
                },
                marker={"symbol": MARKERS[place % len(MARKERS)], "size": 6 + (count - 1 - place)},
                hovertemplate=f"{label_text(str(label))}<br>step %{{x}}: %{{y:.6g}}<extra></extra>",
            )
            for place, label in enumerate(table.columns)
        ]
    )
    figure.update_layout(template=THEME, height=420, showlegend=True)
    figure.update_xaxes(title_text="step")
    return figure.update_yaxes(title_text="loss")


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
    """One horizontal bar per case with its value written beside it, past the error bar if it has an interval."""
    low, high = (values if end is None else end for end in (low, high))
    places = _places(values.index)
    bars = [
        go.Bar(
            y=[place],
            x=[value],
            orientation="h",
            marker=filling(_colour(setting, strategy), _pattern(setting, strategy)),
            error_x=_error_bar(value, bottom, top),
            hovertemplate=f"{label_text(strategy)}, {ranks(world_size)}: {label}<extra></extra>",
        )
        for place, (world_size, strategy), value, bottom, top, label in zip(
            places, values.index.tolist(), values, low, high, labels
        )
    ]
    text = go.Scatter(
        y=places,
        x=high.tolist(),
        mode="text",
        text=[f" {label}" for label in labels],
        textposition="middle right",
        hoverinfo="skip",
    )
    figure = go.Figure([*bars, text])
    _lay_out(figure, values.index, barmode="overlay")  # a row holds one bar, so bars need not make room
    return figure.update_xaxes(range=[0, _HEADROOM * _largest(high)])


def _largest(values: "pd.Series[float]") -> float:
    return float(values.max()) if len(values) else 1.0


def _error_bar(value: float, low: float, high: float) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value],
        "arrayminus": [value - low],
        "visible": low < high,
        "color": _TEXT,
        "thickness": 1.5,
        "width": 5,
    }


def _places(index: "pd.Index[Any]") -> list[int]:
    """The row of each (world size, strategy); every world size begins with a row for its heading."""
    headings: list[int] = []
    places = []
    for row, (world_size, _) in enumerate(index):
        if world_size not in headings:
            headings.append(world_size)
        places.append(row + len(headings))
    return places


def _lay_out(figure: go.Figure, index: "pd.Index[Any]", *, barmode: str, legend: bool = False) -> None:
    """Give each row its name and each group of rows its world size, from top to bottom.

    Places are numbers, not plotly's two-level categories, because those need twice the width for their names.
    """
    names = {place: label_text(str(name)) for place, (_, name) in zip(_places(index), index)}
    for place, (world_size, _) in zip(_places(index), index):
        if place - 1 not in names:
            names[place - 1] = f"<b>{ranks(int(world_size))}</b>"
    rows = max(names, default=0) + 1
    height = 70 + (60 if legend else 0) + _ROW_PX * rows
    figure.update_layout(template=THEME, height=height, showlegend=legend, barmode=barmode)
    figure.update_yaxes(
        ticklabelstandoff=6,
        tickvals=list(names),
        ticktext=list(names.values()),
        range=[rows - 0.5, -0.5],
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


def _colour(setting: Setting, strategy: str) -> str:
    if strategy == REFERENCE_STRATEGY:
        return REFERENCE_COLOUR
    return OKABE_ITO[_place(setting, strategy) % len(OKABE_ITO)]


def _pattern(setting: Setting, strategy: str) -> str:
    return "" if strategy == REFERENCE_STRATEGY else PATTERNS[_place(setting, strategy) % len(PATTERNS)]


def _place(setting: Setting, strategy: str) -> int:
    return [name for name in setting.strategies if name != REFERENCE_STRATEGY].index(strategy)
