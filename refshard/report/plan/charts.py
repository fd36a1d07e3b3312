"""The charts of a plan's page."""

from collections.abc import Mapping, Sequence
from typing import Literal

import plotly.graph_objects as go

from refshard.plan.plan import LESS, Plan, Row, Size, Spread
from refshard.quantities import axis_unit, format_bytes, format_percent, format_seconds
from refshard.report.draw.charts import THEME, Bar, Chart, chart, label_text, stacked
from refshard.report.draw.charts import Row as Line
from refshard.report.draw.palette import BLUE, INK, RED, look
from refshard.report.draw.tradeoff import Frame, Point, tradeoff_figure
from refshard.report.plan import text

_CLOSED = " The parts are known in closed form only; dry runs gave other totals, which stand above."
_CUT = 1.6
"""The axis of memory ends at this many times what tensors can fill."""


def tradeoff(size: Size, plan: Plan, spread: Spread) -> Chart:
    """Step time against memory, of the best configurations and the Pareto front."""
    rows = text.numbered(size)
    points = [_point(row, place, plan.varied) for place, row in enumerate(rows)]
    front = [(rows.index(row), row) for row in size.front]
    error = spread.of(rows[0].kind)
    frame = Frame(
        memory="peak memory", limit=size.usable_bytes, limit_text=f"{text.usable_text(size)} usable",
        tie=(1 + error.within) * points[0].time if error else None,
    )  # fmt: skip
    listed = "; ".join(
        f"{place + 1} {text.short_text(row.job, plan.varied)} ({format_seconds(row.time_s)}, "
        f"{format_bytes(row.memory_bytes)})"
        for place, row in front
    )
    shaded = (
        f"Shaded: within {format_percent(error.within)} of the fastest, the model's median error on one machine."
        if error
        else "The model's error is not known here."
    )
    saved = format_percent(1 - LESS, 0)
    told = f"Dotted, the Pareto front, each with {saved} less memory than the last: {listed}."
    if len(front) < 2:
        told = f"Fastest: {listed}; no other needs {saved} less memory."
    sentence = f"Lower left is better. {told} {shaded}"
    figure = tradeoff_figure(points, frame, line=[points[place] for place, _ in front])
    return chart("tradeoff", "Step time against memory", figure, sentence)


def _point(row: Row, place: int, varied: Sequence[str]) -> Point:
    lines = [
        f"<b>{label_text(row.job.strategy + text.variant_text(row.job, varied).rstrip(','))}</b>",
        label_text(text.mesh_text(row.job)),
        label_text(f"{text.batch_text(row.job)}, {text.checkpointing_text(row)}"),
        f"step time {format_seconds(row.time_s)}, {'dry run' if row.dry_step_s else 'closed form'}",
        f"peak memory {format_bytes(row.memory_bytes)}",
        f"{row.tokens_per_s_gpu:,.0f} tokens/s/GPU",
    ]  # fmt: skip
    return Point(
        name=_name(row, place), time=row.time_s, memory=row.memory_bytes, tip="<br>".join(lines),
        colour=look(place).colour, place=place, number=place, chosen=not place,
    )  # fmt: skip


def _name(row: Row, place: int) -> str:
    """Rows may share a strategy, so each has its place in the table before its name."""
    return f"{place + 1} {row.job.strategy}"


def scaling_chart(plan: Plan) -> Chart:
    """Tokens a second of one GPU against the number of ranks, best configuration of each size, with its range."""
    best = [(size.gpus, size.rows[0]) for size in plan.sizes if size.rows]
    figure = go.Figure()
    ranks = [count for count, _ in best]
    speeds = [row.tokens_per_s_gpu for _, row in best]
    above = [row.tokens_per_s_gpu * (row.step_s / (row.low_s or row.step_s) - 1) for _, row in best]
    below = [row.tokens_per_s_gpu * (1 - row.step_s / (row.high_s or row.step_s)) for _, row in best]
    tips = [
        f"<b>{count:,} ranks</b><br>{label_text(text.short_text(row.job, plan.varied))}<br>"
        f"{row.tokens_per_s_gpu:,.0f} tokens/s/GPU" for count, row in best
    ]  # fmt: skip
    figure.add_scatter(
        x=ranks, y=speeds, mode="lines+markers", line={"color": BLUE}, text=tips,
        hovertemplate="%{text}<extra></extra>",
        error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": INK},
    )  # fmt: skip
    figure.update_layout(template=THEME, height=340, showlegend=False)
    figure.update_xaxes(title="ranks", type="log", tickvals=ranks, ticktext=[f"{count:,}" for count in ranks])
    figure.update_yaxes(title="tokens/s/GPU", rangemode="tozero")
    listed = ", ".join(f"{count:,} ranks {row.tokens_per_s_gpu:,.0f}" for count, row in best)
    sentence = f"Tokens/s/GPU: {listed}. Error bars: range of 8 of 10 published runs."
    return chart("scaling", "Tokens/s/GPU by number of ranks", figure, sentence)


def time_chart(rows: Sequence[Row]) -> Chart:
    """The parts of each configuration's step."""
    totals = [format_seconds(row.step_s) for row in rows]
    closed = _CLOSED if any(row.dry_step_s for row in rows) else ""
    figure = _bars(rows, [row.parts for row in rows], totals, "s", "per step")
    return chart("time", "Time of a step", figure, f"Time of a step: {_listed(rows, totals)}.{closed}")


def memory_chart(shown: Size) -> Chart:
    """The parts of each peak, and what the allocator can reserve."""
    rows = shown.rows
    totals = [format_bytes(row.peak_bytes) for row in rows]
    figure = _bars(rows, [row.memory for row in rows], totals, "B", "per rank")
    highest = max(row.peak_bytes for row in rows)
    _, size = axis_unit("B", highest)
    usable = shown.usable_bytes / size
    figure.add_vline(x=usable, line={"color": RED, "dash": "dash", "width": 2})
    figure.update_xaxes(range=[0, min(max(1.05 * highest / size, 1.05 * usable), _CUT * usable)])
    limit = f"Dashed: usable memory, {text.usable_text(shown)}."
    closed = _CLOSED if any(row.dry_step_s for row in rows) else ""
    sentence = f"Memory at the peak: {_listed(rows, totals)}. {limit}{closed}"
    return chart("memory", "Memory at the peak", figure, sentence)


def _bars(
    rows: Sequence[Row], parts: Sequence[Mapping[str, float]], totals: Sequence[str], unit: Literal["s", "B"], axis: str
) -> go.Figure:
    """A bar for each configuration, its total after its name."""
    lines = [Line(text=label_text(f"{_name(row, n)} {total}")) for n, (row, total) in enumerate(zip(rows, totals))]
    bars = [Bar(place=n, name=_name(row, n), parts=part) for n, (row, part) in enumerate(zip(rows, parts))]
    return stacked(lines, bars, {name: look(n) for n, name in enumerate(parts[0])}, unit, axis)


def _listed(rows: Sequence[Row], totals: Sequence[str]) -> str:
    return ", ".join(f"{_name(row, place)} {total}" for place, (row, total) in enumerate(zip(rows, totals)))
