"""Step time against memory: a point per strategy, the Pareto front, and the device's limit.

The page's script places the labels, since only it knows how wide the chart is; it draws the front anew when a filter
hides points.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult
from refshard.analysis.contests import ALIKE, Contest, step_time
from refshard.quantities import axis_unit, format_bytes, format_seconds
from refshard.report.draw.charts import THEME, Chart, chart, label_text, short
from refshard.report.draw.palette import INK, MARKERS, RED
from refshard.report.run.charts import colour
from refshard.report.run.device_limit import Limit
from refshard.report.run.tips import tip
from refshard.report.run.verdict import listed
from refshard.specs.case import REPEATING

_FAR = 1.8
"""The axis is stretched to the device's limit if that is at most this many times the largest point."""
_BAND = "rgba(0,114,178,0.10)"


def tradeoff(
    contest: Contest, limit: Limit | None, identity: str, predicted: Mapping[CaseResult, CaseResult] | None = None
) -> Chart | None:
    """None if no strategy has both figures. ``predicted`` holds dry runs of the cases, drawn hollow."""
    found = tuple(contest.peaks)
    if not found:
        return None
    dry = {case: one for case in found if (one := (predicted or {}).get(case)) is not None}
    figure = _draw(contest, found, dry, limit)
    return chart(identity, "Step time against memory", figure, _sentence(contest, found, limit))


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right.

    >>> front([(2, 3), (1, 5), (3, 4), (4, 1)])
    [(1, 5), (2, 3), (4, 1)]
    """
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _draw(
    contest: Contest, found: Sequence[CaseResult], dry: Mapping[CaseResult, CaseResult], limit: Limit | None
) -> go.Figure:
    metric = contest.memory_metric
    unit_x, size_x = axis_unit("B", max(contest.peaks.values()))
    unit_y, size_y = axis_unit("s", max(map(step_time, found)))
    xs = [contest.peaks[case] / size_x for case in found]
    ys = [step_time(case) / size_y for case in found]
    line = front(list(zip(xs, ys)))
    figure = go.Figure()
    figure.add_scatter(
        name="Pareto front", x=short([x for x, _ in line]), y=short([y for _, y in line]), mode="lines",
        line={"color": INK, "width": 1.5, "dash": "dot"}, hoverinfo="skip", meta={"front": True},
    )  # fmt: skip
    if dry:
        _add_predicted(figure, contest, dry, (size_x, size_y))
    figure.add_trace(_points(contest, found, limit, (xs, ys, size_y)))
    reserved = "reserved memory" if metric == "peak_reserved_bytes" else "peak memory"
    figure.update_xaxes(title_text=f"{reserved} per rank, {unit_x} (lower is better)", nticks=8)
    figure.update_yaxes(title_text=f"step time, {unit_y} (lower is better)", nticks=7)
    figure.update_layout(template=THEME, height=400, showlegend=bool(dry), hovermode="closest")
    all_x = [*xs, *(one.metrics[metric] / size_x for one in dry.values() if one.metrics[metric])]  # type: ignore[operator]
    all_y = [*ys, *(step_time(one) / size_y for one in dry.values() if one.metrics["step_time_s"])]
    _set_ranges(figure, all_x, [*all_y, *_ends(found, size_y)], limit.bytes / size_x if limit else None)
    if limit and limit.bytes / size_x <= _FAR * max(all_x):
        _add_limit(figure, limit, limit.bytes / size_x)
    if len(contest.fastest) > 1 and contest.fastest[0].fidelity in REPEATING:
        low = min(ys)
        figure.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=low, y1=low * (1 + ALIKE), fillcolor=_BAND, line={"width": 0},
            layer="below", name="tie",
        )  # fmt: skip
    return figure


def _points(
    contest: Contest, found: Sequence[CaseResult], limit: Limit | None, places: tuple[list[float], list[float], float]
) -> go.Scatter:
    xs, ys, size_y = places
    known = contest.setting.known
    spots = [known.index(case.strategy) if case.strategy in known else 0 for case in found]
    return go.Scatter(
        name="strategies",
        x=short(xs),
        y=short(ys),
        mode="markers+text",
        text=[label_text(case.strategy) for case in found],
        textposition="middle right",
        textfont={"size": 13},
        cliponaxis=False,
        marker={
            "size": 12,
            "color": [colour(contest.setting, case.strategy) for case in found],
            "symbol": [MARKERS[spot % len(MARKERS)] for spot in spots],
            "line": {"width": 1, "color": INK},
        },
        error_y=_error_bars(found, ys, size_y),
        customdata=[tip(case, contest.memory_metric, limit) for case in found],
        hovertemplate="%{customdata}<extra></extra>",
        meta={"cases": [case.number for case in found], "labels": True},
    )


def _add_predicted(
    figure: go.Figure, contest: Contest, dry: Mapping[CaseResult, CaseResult], sizes: tuple[float, float]
) -> None:
    """Dry runs of the same cases, hollow and without labels."""
    metric = contest.memory_metric
    shown = {case: one for case, one in dry.items() if one.metrics[metric] and one.metrics["step_time_s"]}
    known = contest.setting.known
    figure.add_scatter(
        name="dry run (hollow)",
        x=short([(one.metrics[metric] or 0.0) / sizes[0] for one in shown.values()]),
        y=short([step_time(one) / sizes[1] for one in shown.values()]),
        mode="markers",
        marker={
            "size": 11,
            "color": [colour(contest.setting, case.strategy) for case in shown],
            "symbol": [f"{MARKERS[known.index(case.strategy) % len(MARKERS)]}-open" for case in shown],
            "line": {"width": 2},
        },
        customdata=[tip(one, metric) for one in shown.values()],
        hovertemplate="%{customdata}<extra></extra>",
        meta={"cases": [case.number for case in shown]},
    )


def _ends(found: Sequence[CaseResult], size: float) -> list[float]:
    """Ends of the intervals that are drawn."""
    summaries = [case.step_time for case in found if case.fidelity not in REPEATING]
    return [end / size for s in summaries if s and math.isfinite(s.high) for end in (s.low, s.high)]


def _error_bars(found: Sequence[CaseResult], ys: Sequence[float], size: float) -> dict[str, Any]:
    summaries = [None if case.fidelity in REPEATING else case.step_time for case in found]
    bounded = [s if s and math.isfinite(s.high) else None for s in summaries]
    return {
        "type": "data", "symmetric": False, "color": INK, "thickness": 1.5, "width": 5, "visible": any(bounded),
        "array": short([s.high / size - y if s else 0.0 for s, y in zip(bounded, ys)]),
        "arrayminus": short([y - s.low / size if s else 0.0 for s, y in zip(bounded, ys)]),
    }  # fmt: skip


def _set_ranges(figure: go.Figure, xs: Sequence[float], ys: Sequence[float], limit: float | None) -> None:
    """Room around the points for their labels, and for the limit if it is near."""
    right = max(xs) if limit is None or limit > _FAR * max(xs) else max(max(xs), limit)
    wide, tall = (right - min(xs)) or 0.2 * right, (max(ys) - min(ys)) or 0.2 * max(ys)
    figure.update_xaxes(range=short([max(0.0, min(xs) - 0.12 * wide), right + 0.12 * wide]))
    figure.update_yaxes(range=short([max(0.0, min(ys) - 0.15 * tall), max(ys) + 0.15 * tall]))


def _add_limit(figure: go.Figure, limit: Limit, x: float) -> None:
    """A line, with its name along it at the top."""
    figure.add_shape(
        type="line", x0=x, x1=x, yref="paper", y0=0, y1=1, line={"color": RED, "dash": "dash", "width": 2}, name="limit"
    )
    figure.add_annotation(
        x=x, xanchor="right", yref="paper", y=1, yanchor="top", textangle=-90, showarrow=False, text=limit.text,
        font={"size": 12}, borderpad=2, name="limit",
    )  # fmt: skip


def _sentence(contest: Contest, found: Sequence[CaseResult], limit: Limit | None) -> str:
    """The chart in words."""
    points = {case: (contest.peaks[case], step_time(case)) for case in found}
    kept = set(front(list(points.values())))
    best = [case for case, point in points.items() if point in kept]
    told = [f"{case.strategy} ({format_seconds(step_time(case))}, {format_bytes(contest.peaks[case])})" for case in best]
    sentence = f"Lower left is better. Dotted, the strategies that no other beats in both: {listed(told)}."
    if len(contest.fastest) > 1 and contest.fastest[0].fidelity in REPEATING:
        sentence += f" Shaded: within {ALIKE:.0%} of the fastest, the model's error.".replace("%", " %")
    if limit and limit.bytes > _FAR * max(contest.peaks.values()):
        sentence += f" The limit, {limit.text}, lies outside the chart."
    return sentence
