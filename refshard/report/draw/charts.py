"""What all charts share: plotly figures, their theme, colours and rows.

Colours are Okabe and Ito's, which people with colour-blindness can tell apart (M. Okabe and K. Ito, "Color
Universal Design", 2008), and no meaning rests on colour alone: every bar has its name on the axis and a
pattern, every curve a marker and a dash. Backgrounds are transparent and text is a grey that reads on black
and on white; the page's style replaces it by its own text colour.

What the page's filters need lies in ``meta``: of a figure of bars, its rows, each with its text and the number of its
case (none of a heading); of a curve, the number of its case, or of each of its points'.
"""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from refshard.report.draw.still import still

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
REFERENCE_COLOUR = "#999999"
PATTERNS = ("", "/", "x", "\\", "-", ".", "|", "+")
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

TEXT = "#777777"
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

THEME = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": TEXT},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a figure of bars; a heading has no case."""

    text: str
    case: int | None = None


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
        "line": {"color": TEXT, "width": 0.5},
        "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "size": 7},
    }
