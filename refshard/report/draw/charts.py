"""What all charts share: plotly figures, their theme, fillings and rows.

Backgrounds are transparent, so that a figure follows the page's light or dark scheme.

What the page's script needs lies in ``meta``: of a figure of bars, its rows, each with its text and the number of its
case (none of a heading); of a curve, the number of its case, or of each of its points'.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go

from refshard.quantities import axis_unit, format_bytes, format_percent, format_seconds
from refshard.report.draw.palette import INK, Look

_GRID = "rgba(128,128,128,0.25)"
_AXIS = {
    "gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True, "ticklabelstandoff": 5,
    "title": {"font": {"size": 13}},
}  # fmt: skip
_ROW_PX, _LOW_ROW_PX, _MANY_ROWS = 32, 26, 12
"""Height of a row; its height if there are many; and how many are many."""
_BAR = 0.7  # of a row; plotly's default is the least distance between bars of one trace

THEME = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"font": {"size": 13}},
        "bargap": 0.3,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """From a part of a figure of bars, ``text``, to its place on another chart's time axis, and what is there.

    ``begin`` and ``end`` are shares of the axis of the chart with the id ``chart``; ``row`` is that of the bar.
    Without a ``chart`` it leads nowhere.
    """

    part: str
    text: str
    chart: str
    begin: float
    end: float
    note: str
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure as plotly's JSON without its theme, and a sentence that says what it shows; a page may fold it.

    With ``jumps``, a page shows ``lead`` and a link for each, which together say what the sentence does.
    """

    id: str
    title: str
    figure: dict[str, Any]
    alternative: str
    folded: bool = False
    lead: str = ""
    jumps: Sequence[Jump] = ()

    @property
    def height_px(self) -> int:
        """Height of the figure, which the page reserves."""
        return int(self.figure["layout"]["height"])

    @property
    def role(self) -> str:
        """ARIA role of its box: a chart with buttons is not an image."""
        return "group" if "texts" in (self.figure["layout"].get("meta") or {}) else "img"


def chart(identity: str, title: str, figure: go.Figure, alternative: str) -> Chart:
    """A figure for a page; its layout is in :data:`THEME`, which the page has once."""
    found = json.loads(figure.to_json())
    del found["layout"]["template"]
    return Chart(id=identity, title=title, figure=found, alternative=alternative)


def theme() -> dict[str, Any]:
    """:data:`THEME` as plotly's JSON."""
    found: dict[str, Any] = json.loads(go.Figure(layout={"template": THEME}).to_json())["layout"]["template"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a figure of bars; a heading has no case."""

    text: str
    case: int | None = None


def label_text(name: str) -> str:
    """A name as plotly must get it, because plotly reads a subset of HTML in every label."""
    return html.escape(name, quote=False)


def shortened(name: str, most: int) -> str:
    """:func:`label_text` of a name of at most ``most`` characters: of a longer one, the middle is left out."""
    half = most // 2
    return label_text(name if len(name) <= most else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half + 1 :]}")


def pattern(look: Look) -> dict[str, Any]:
    """A look's pattern, to be drawn over its colour."""
    return {"shape": look.pattern, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "size": 7}


def filling(look: Look) -> dict[str, Any]:
    """A bar's marker."""
    return {"color": look.colour, "line": {"color": INK, "width": 0.5}, "pattern": pattern(look)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of several parts, in seconds or bytes, on the row at ``place``."""

    place: int
    name: str
    parts: Mapping[str, float]


def stacked(
    rows: Sequence[Row], bars: Sequence[Bar], looks: Mapping[str, Look], unit: Literal["s", "B"], axis: str
) -> go.Figure:
    """Stacked bars; ``axis`` follows the unit in the axis's title. Parts that no bar has are left out."""
    text = {"s": format_seconds, "B": format_bytes}[unit]
    shown, size = axis_unit(unit, max((sum(bar.parts.values()) for bar in bars), default=1.0))
    figure = go.Figure()
    for part, look in looks.items():
        if any(bar.parts.get(part) for bar in bars):
            values = [bar.parts.get(part, 0.0) for bar in bars]
            figure.add_bar(
                name=label_text(part),
                y=[bar.place for bar in bars],
                x=short([value / size for value in values]),
                width=_BAR,
                orientation="h",
                marker=filling(look),
                customdata=[
                    f"{label_text(bar.name)}<br>{label_text(part)}: {text(value)}, "
                    f"{format_percent(value / (sum(bar.parts.values()) or 1))}"
                    for bar, value in zip(bars, values)
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
    count = max(len(rows), 1)
    figure.update_layout(
        template=THEME, height=130 + (_ROW_PX if count <= _MANY_ROWS else _LOW_ROW_PX) * count, showlegend=True,
        barmode="stack", meta={"rows": [{"text": row.text, "case": row.case} for row in rows]},
    )  # fmt: skip
    figure.update_yaxes(
        ticklabelstandoff=6, tickvals=list(range(len(rows))), ticktext=[row.text for row in rows],
        range=[count - 0.5, -0.5], showgrid=False, zeroline=False,
    )  # fmt: skip
    return figure.update_xaxes(title_text=f"{shown} {axis}", rangemode="tozero", nticks=6)


def short(values: Iterable[float]) -> list[float]:
    """Six digits are more than a screen shows, and a third of the page's bytes."""
    return [float(f"{value:.6g}") for value in values]
