"""Step time against memory: a point per strategy, the Pareto front, and the device's limit.

The page's script places the labels, since only it knows how wide the chart is; it draws the front anew when a filter
hides points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from refshard.quantities import axis_unit
from refshard.report.draw.charts import THEME, label_text, short
from refshard.report.draw.palette import INK, MARKERS, RED

_FAR = 1.8
"""The axis is stretched to the limit if that is at most this many times the largest point."""
_SPREAD = 6
"""Largest over least memory from which on the axis is logarithmic."""
_BAND = "rgba(0,114,178,0.10)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A strategy: its step time (s, perhaps with an interval), memory (B), tip and look.

    ``place`` chooses the marker; ``number`` is that of its case, if there are cases. A ``chosen`` one is never without
    its name.
    """

    name: str
    time: float
    memory: float
    tip: str
    colour: str
    place: int
    number: int = 0
    chosen: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The memory's name, the limit (B) with its name, and the step time (s) up to which points tie with the fastest."""

    memory: str
    limit: float | None = None
    limit_text: str = ""
    tie: float | None = None


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, by memory."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, point.time)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return kept


def shows_limit(points: Sequence[Point], frame: Frame) -> bool:
    """Whether the limit is near enough to be drawn."""
    return frame.limit is not None and frame.limit <= _FAR * max(point.memory for point in points)


def tradeoff_figure(
    points: Sequence[Point], frame: Frame, predicted: Sequence[Point] = (), line: Sequence[Point] = ()
) -> go.Figure:
    """``predicted`` are dry runs of the same strategies, drawn hollow. The line joins :func:`front`, or ``line``."""
    drawn = [*points, *predicted]
    unit_x, size_x = axis_unit("B", max(point.memory for point in points))
    unit_y, size_y = axis_unit("s", max(point.time for point in points))
    line = line or front(points)
    figure = go.Figure()
    figure.add_scatter(
        name="Pareto front", x=short(point.memory / size_x for point in line),
        y=short(point.time / size_y for point in line), mode="lines", line={"color": INK, "width": 1.5, "dash": "dot"},
        hoverinfo="skip", showlegend=False, meta={"front": True},
    )  # fmt: skip
    if predicted:
        figure.add_trace(_points(predicted, (size_x, size_y), hollow=True))
    figure.add_trace(_points(points, (size_x, size_y), hollow=False))
    figure.update_layout(template=THEME, height=400, showlegend=bool(predicted), hovermode="closest", margin={"t": 24})
    limit = frame.limit / size_x if frame.limit is not None and shows_limit(drawn, frame) else None
    xs = [point.memory / size_x for point in drawn]
    ys = [y / size_y for point in drawn for y in (point.low, point.time, point.high) if y is not None]
    # Room around the points for their labels, and for the limit if it is drawn.
    is_log, left, right = max(xs) > _SPREAD * min(xs), min(xs), max(max(xs), limit or 0.0)
    if is_log:
        figure.update_xaxes(tickvals=(ticks := _ticks(left, right)), ticktext=[f"{tick:g}" for tick in ticks])
        left, right = math.log10(left), math.log10(right)
    wide, tall = (right - left) or 0.2 * right, (max(ys) - min(ys)) or 0.2 * max(ys)
    least = left - 0.2 * wide
    figure.update_xaxes(
        title_text=f"{frame.memory} per rank, {unit_x} (lower is better)", nticks=8, minor_showgrid=False,
        type="log" if is_log else "linear", range=short([least if is_log else max(0.0, least), right + 0.12 * wide]),
    )  # fmt: skip
    figure.update_yaxes(
        title_text=f"step time, {unit_y} (lower is better)", nticks=7,
        range=short([max(0.0, min(ys) - 0.15 * tall), max(ys) + 0.15 * tall]),
    )  # fmt: skip
    if limit is not None:  # a line, with its name above the chart, clear of all points
        figure.add_shape(
            type="line", x0=limit, x1=limit, yref="paper", y0=0, y1=1, name="limit",
            line={"color": RED, "dash": "dash", "width": 2},
        )  # fmt: skip
        figure.add_annotation(
            x=math.log10(limit) if is_log else limit, xanchor="right", yref="paper", y=1, yanchor="bottom",
            showarrow=False, text=f"limit: {frame.limit_text}", font={"size": 12}, borderpad=2, name="limit",
        )  # fmt: skip
    if frame.tie is not None:
        figure.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=min(point.time for point in points) / size_y,
            y1=frame.tie / size_y, fillcolor=_BAND, line={"width": 0}, layer="below", name="tie",
        )  # fmt: skip
    return figure


def _points(points: Sequence[Point], sizes: tuple[float, float], *, hollow: bool) -> go.Scatter:
    size_x, size_y = sizes
    markers = [MARKERS[point.place % len(MARKERS)] for point in points]
    above = [(point.high - point.time) / size_y if point.high is not None else 0.0 for point in points]
    below = [(point.time - point.low) / size_y if point.low is not None else 0.0 for point in points]
    bars = {
        "type": "data", "symmetric": False, "color": INK, "thickness": 1.5, "width": 5, "visible": any(above + below),
        "array": short(above), "arrayminus": short(below),
    }  # fmt: skip
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
        error_y=None if hollow else bars,
        customdata=[point.tip for point in points],
        hovertemplate="%{customdata}<extra></extra>",
        meta={
            "cases": [point.number for point in points],
            "labels": not hollow,
            "chosen": [label_text(point.name) for point in points if point.chosen],
        },
    )


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around a range.

    >>> _ticks(0.07, 2)
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [float(f"{step}e{power}") for power in powers for step in (1, 2, 5)]
    return [tick for tick in every if 0.6 * low <= tick <= 1.5 * high]
