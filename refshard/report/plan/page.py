"""A plan as one self-contained HTML page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import pandas as pd
import plotly.graph_objects as go

from refshard.plan.plan import Plan, Row, Size
from refshard.plan.spread import Spread
from refshard.quantities import axis_unit, format_bytes, format_percent, format_seconds
from refshard.report.draw.charts import THEME, Bar, Chart, chart, label_text, stacked, theme
from refshard.report.draw.charts import Row as Line
from refshard.report.draw.palette import BLUE, INK, RED, Look, look
from refshard.report.draw.render import fill, resource, script
from refshard.report.draw.tradeoff import Frame, Point, tradeoff_figure
from refshard.report.plan import table as plan_table
from refshard.report.plan import words

_CUT = 1.6
"""The axis of memory ends at this many times what tensors can fill."""


def page(plan: Plan, spread: Spread, title: str, command: str) -> Iterable[str]:
    """The page's HTML in pieces; ``command`` is what prints the same plan."""
    lead, *more = words.verdict(plan, spread)
    shown = next((size for size in reversed(plan.sizes) if size.rows), plan.largest)
    charts = []
    if shown.rows:
        charts.append((time_chart(shown.rows), pd.DataFrame(plan_table.time_by_part(shown.rows, plan.varied))))
        charts.append(
            (memory_chart(shown.rows, plan), pd.DataFrame(plan_table.memory_by_part(shown.rows, plan.varied)))
        )
    if sum(bool(size.rows) for size in plan.sizes) > 1:
        charts.insert(0, (scaling_chart(plan), pd.DataFrame(plan_table.scaling(plan))))
    content = {
        "title": title,
        "dry": any(row.dry_step_s for row in shown.rows),
        "lead": lead,
        "more": more,
        "warnings": [*words.warnings(plan, spread), *words.assumptions(plan)],
        "summary": pd.DataFrame(plan_table.summary(shown.rows, plan.varied)),
        "unfit": pd.DataFrame(plan_table.unfit(shown.unfit, plan.varied)),
        "charts": charts,
        "tradeoff": tradeoff(shown, plan, spread),
        "data": {"theme": theme()},
        "command": command,
    }
    style = resource("style.css") + resource("run.css")
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js")]
    return fill("plan.html.j2", content, style=style, scripts=scripts)


def tradeoff(size: Size, plan: Plan, spread: Spread) -> Chart | None:
    """Step time against memory, of the best configurations and the Pareto front."""
    rows = [*size.rows, *(row for row in size.front if row not in size.rows)]
    if not rows:
        return None
    points = [_point(row, place, plan.varied) for place, row in enumerate(rows)]
    tie = spread.of(rows[0].kind).median
    frame = Frame(
        memory="peak memory", limit=plan.usable_bytes, limit_text=f"{format_bytes(plan.usable_bytes)} usable",
        tie=(1 + tie) * points[0].time,
    )  # fmt: skip
    front = "; ".join(
        f"{words.short_words(row.configuration, plan.varied)} ({format_seconds(row.step_s)}, "
        f"{format_bytes(row.peak_bytes)})"
        for row in size.front
    )
    sentence = (
        f"Lower left is better. Dotted, the Pareto front: {front}. Shaded: within {format_percent(tie)} of the "
        "fastest, the model's median error."
    )
    return chart("tradeoff", "Step time against memory", tradeoff_figure(points, frame), sentence)


def _point(row: Row, place: int, varied: Sequence[str]) -> Point:
    lines = [
        f"<b>{label_text(row.configuration.strategy + words.variant_words(row.configuration, varied).rstrip(','))}</b>",
        label_text(words.layout_words(row.configuration)),
        label_text(f"{words.batch_words(row.configuration)}, {words.checkpoint_words(row)}"),
        f"step time {format_seconds(row.time_s)}, {'dry run' if row.dry_step_s else 'closed form'}",
        f"peak memory {format_bytes(row.memory_bytes)}",
        f"{row.tokens_per_s_gpu:,.0f} tokens/s/GPU",
    ]  # fmt: skip
    return Point(
        name=_name(row, place), time=row.time_s, memory=row.memory_bytes, tip="<br>".join(lines),
        colour=look(place).colour, place=place, number=place,
    )  # fmt: skip


def _name(row: Row, place: int) -> str:
    """Rows may share a strategy, so each has its place in the table before its name."""
    return f"{place + 1} {row.configuration.strategy}"


def scaling_chart(plan: Plan) -> Chart:
    """Tokens a second of one GPU against the number of ranks, best configuration of each size, with its range."""
    best = [(size.world_size, size.rows[0]) for size in plan.sizes if size.rows]
    figure = go.Figure()
    ranks = [count for count, _ in best]
    speeds = [row.tokens_per_s_gpu for _, row in best]
    above = [row.tokens_per_s_gpu * (row.step_s / row.low_s - 1) for _, row in best]
    below = [row.tokens_per_s_gpu * (1 - row.step_s / row.high_s) for _, row in best]
    tips = [
        f"<b>{count:,} ranks</b><br>{label_text(words.short_words(row.configuration, plan.varied))}<br>"
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
    told = ", ".join(f"{count:,} ranks {row.tokens_per_s_gpu:,.0f}" for count, row in best)
    sentence = f"Tokens/s/GPU: {told}. Error bars: range of 8 of 10 published runs."
    return chart("scaling", "Tokens/s/GPU by number of ranks", figure, sentence)


def time_chart(rows: Sequence[Row]) -> Chart:
    """What each configuration's step is spent on."""
    parts = {_name(row, place): row.parts for place, row in enumerate(rows)}
    totals = {_name(row, place): format_seconds(row.step_s) for place, row in enumerate(rows)}
    looks = {name: look(place) for place, name in enumerate(rows[0].parts)}
    figure = _bars(parts, totals, looks, "s", "per step")
    return chart("time", "Time of a step", figure, f"Time of a step: {_listed(totals)}.")


def memory_chart(rows: Sequence[Row], plan: Plan) -> Chart:
    """What each peak is made of, beside what tensors can fill."""
    parts = {_name(row, place): {key: float(of) for key, of in row.memory.items()} for place, row in enumerate(rows)}
    totals = {_name(row, place): format_bytes(row.peak_bytes) for place, row in enumerate(rows)}
    looks = {name: look(place) for place, name in enumerate(rows[0].memory)}
    figure = _bars(parts, totals, looks, "B", "per rank")
    highest = max(row.peak_bytes for row in rows)
    _, size = axis_unit("B", highest)
    usable = plan.usable_bytes / size
    figure.add_vline(x=usable, line={"color": RED, "dash": "dash", "width": 2})
    figure.update_xaxes(range=[0, min(max(1.05 * highest / size, 1.05 * usable), _CUT * usable)])
    sentence = f"Memory at the peak: {_listed(totals)}. Dashed: usable memory, {format_bytes(plan.usable_bytes)}."
    return chart("memory", "Memory at the peak", figure, sentence)


def _bars(
    parts: Mapping[str, Mapping[str, float]], totals: Mapping[str, str], looks: Mapping[str, Look],
    unit: Literal["s", "B"], axis: str,
) -> go.Figure:  # fmt: skip
    """A bar for each configuration, its total beside its name."""
    lines = [Line(text=label_text(f"{name} {total}")) for name, total in totals.items()]
    bars = [Bar(place=place, name=name, parts=of) for place, (name, of) in enumerate(parts.items())]
    return stacked(lines, bars, looks, unit, axis)


def _listed(totals: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {total}" for name, total in totals.items())
