"""Step time against memory: a point per strategy, the Pareto front, and the device's limit.

The page's script places the labels, since only it knows how wide the chart is; it draws the front anew when a filter
hides points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from refshard.quantities import axis_unit
from refshard.report.draw.charts import THEME, label_text, short
from refshard.report.draw.palette import INK, MARKERS, RED

_FAR = 1.8
"""The axis is stretched to the limit if that is at most this many times the largest point."""
_BAND = "rgba(0,114,178,0.10)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A strategy: its step time (s, perhaps with an interval) and memory (B), what pointing at it says, and its look.

    ``place`` chooses the marker; ``number`` is that of its case, if there are cases.
    """

    name: str
    time: float
    memory: float
    tip: str
    colour: str
    place: int
    number: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around the points: the memory's name, the limit (B) with its name, and up to which step time (s)
    points tie with the fastest.
    """

    memory: str
    limit: float | None = None
    limit_text: str = ""
    tie: float | None = None


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, from the least memory on."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, point.time)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return kept


def shows_limit(points: Sequence[Point], frame: Frame) -> bool:
    """Whether the limit is near enough to be drawn."""
    return frame.limit is not None and frame.limit <= _FAR * max(point.memory for point in points)


def tradeoff_figure(points: Sequence[Point], frame: Frame, predicted: Sequence[Point] = ()) -> go.Figure:
    """``predicted`` are dry runs of the same strategies, drawn hollow."""
    drawn = [*points, *predicted]
    unit_x, size_x = axis_unit("B", max(point.memory for point in points))
    unit_y, size_y = axis_unit("s", max(point.time for point in points))
    line = front(points)
    figure = go.Figure()
    figure.add_scatter(
        name="Pareto front", x=short(point.memory / size_x for point in line),
        y=short(point.time / size_y for point in line), mode="lines", line={"color": INK, "width": 1.5, "dash": "dot"},
        hoverinfo="skip", showlegend=False, meta={"front": True},
    )  # fmt: skip
    if predicted:
        figure.add_trace(_points(predicted, (size_x, size_y), hollow=True))
    figure.add_trace(_points(points, (size_x, size_y), hollow=False))
    figure.update_xaxes(title_text=f"{frame.memory} per rank, {unit_x} (lower is better)", nticks=8)
    figure.update_yaxes(title_text=f"step time, {unit_y} (lower is better)", nticks=7)
    figure.update_layout(template=THEME, height=400, showlegend=bool(predicted), hovermode="closest")
    limit = frame.limit / size_x if frame.limit is not None and shows_limit(drawn, frame) else None
    _set_ranges(figure, [point.memory / size_x for point in drawn], [end / size_y for end in _ends(drawn)], limit)
    if limit is not None:
        _add_limit(figure, limit, frame.limit_text)
    if frame.tie is not None:
        figure.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=min(point.time for point in points) / size_y,
            y1=frame.tie / size_y, fillcolor=_BAND, line={"width": 0}, layer="below", name="tie",
        )  # fmt: skip
    return figure


def _points(points: Sequence[Point], sizes: tuple[float, float], *, hollow: bool) -> go.Scatter:
    size_x, size_y = sizes
    markers = [MARKERS[point.place % len(MARKERS)] for point in points]
    return go.Scatter(
        name="dry run (hollow)" if hollow else "measured (filled)",
        x=short(point.memory / size_x for point in points),
        y=short(point.time / size_y for point in points),
        mode="markers" if hollow else "markers+text",
        text=None if hollow else [label_text(point.name) for point in points],
        textposition=None if hollow else "middle right",
        textfont={"size": 13},
        cliponaxis=False,
        marker={
            "size": 12,
            "color": [point.colour for point in points],
            "symbol": [f"{marker}-open" for marker in markers] if hollow else markers,
            "line": {"width": 2} if hollow else {"width": 1, "color": INK},
        },
        error_y=None if hollow else _error_bars(points, size_y),
        customdata=[point.tip for point in points],
        hovertemplate="%{customdata}<extra></extra>",
        meta={"cases": [point.number for point in points], "labels": not hollow},
    )


def _error_bars(points: Sequence[Point], size: float) -> dict[str, Any]:
    above = [(point.high - point.time) / size if point.high is not None else 0.0 for point in points]
    below = [(point.time - point.low) / size if point.low is not None else 0.0 for point in points]
    return {
        "type": "data", "symmetric": False, "color": INK, "thickness": 1.5, "width": 5, "visible": any(above + below),
        "array": short(above), "arrayminus": short(below),
    }  # fmt: skip


def _ends(points: Sequence[Point]) -> list[float]:
    """Step times and the ends of their intervals."""
    return [end for point in points for end in (point.low, point.time, point.high) if end is not None]


def _set_ranges(figure: go.Figure, xs: Sequence[float], ys: Sequence[float], limit: float | None) -> None:
    """Room around the points for their labels, and for the limit if it is drawn."""
    right = max(max(xs), limit or 0.0)
    wide, tall = (right - min(xs)) or 0.2 * right, (max(ys) - min(ys)) or 0.2 * max(ys)
    figure.update_xaxes(range=short([max(0.0, min(xs) - 0.12 * wide), right + 0.12 * wide]))
    figure.update_yaxes(range=short([max(0.0, min(ys) - 0.15 * tall), max(ys) + 0.15 * tall]))


def _add_limit(figure: go.Figure, x: float, text: str) -> None:
    """A line, with its name along it at the top."""
    figure.add_shape(
        type="line", x0=x, x1=x, yref="paper", y0=0, y1=1, line={"color": RED, "dash": "dash", "width": 2}, name="limit"
    )
    figure.add_annotation(
        x=x, xanchor="right", yref="paper", y=1, yanchor="top", textangle=-90, showarrow=False, text=text,
        font={"size": 12}, borderpad=2, name="limit",
    )  # fmt: skip
