"""A plan as one self-contained HTML page."""

from collections.abc import Iterable, Mapping
from typing import Literal

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.rankings import ALIKE
from refshard.quantities import axis_unit, format_bytes, format_seconds
from refshard.report.draw.charts import Bar, Chart, Row, chart, label_text, stacked, theme
from refshard.report.draw.palette import MEMORY, RED, Look, look
from refshard.report.draw.render import fill, resource, script
from refshard.report.draw.tradeoff import Frame, Point, front, tradeoff_figure
from refshard.report.plan import table as plan_table
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow

_CUT = 1.6
"""The axis of memory ends at this many times what tensors can fill."""


def page(plan: Plan, job: Job, title: str, command: str) -> Iterable[str]:
    """The page's HTML in pieces; ``command`` is what prints the same plan."""
    lead, *more = plan_words.verdict(plan, job)
    content = {
        "title": title,
        "lead": lead,
        "more": more,
        "warnings": [*plan_words.warnings(plan), *plan_words.assumptions(plan, job)],
        "summary": pd.DataFrame(plan_table.summary(plan)),
        "charts": [
            (time_chart(plan), pd.DataFrame(plan_table.time_by_part(plan))),
            (memory_chart(plan), pd.DataFrame(plan_table.memory_by_part(plan))),
        ],
        "tradeoff": tradeoff(plan),
        "data": {"theme": theme()},
        "command": command,
    }
    style = resource("style.css") + resource("run.css")
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js")]
    return fill("plan.html.j2", content, style=style, scripts=scripts)


def tradeoff(plan: Plan) -> Chart | None:
    """Step time against memory, of the strategies that fit."""
    rows = [(place, row) for place, row in enumerate(plan.rows) if row.fits]
    if not rows:
        return None
    points = [_point(row, place) for place, row in rows]
    frame = Frame(
        memory="peak memory", limit=plan.usable_bytes, limit_text=f"{format_bytes(plan.usable_bytes)} usable",
        tie=(1 + ALIKE) * points[0].time,
    )  # fmt: skip
    best = ", ".join(f"{one.name} ({format_seconds(one.time)}, {format_bytes(one.memory)})" for one in front(points))
    sentence = (
        f"Lower left is better. Dotted, the Pareto front: {best}. Shaded: within "
        f"{100 * ALIKE:.0f} % of the fastest, the model's error."
    )
    return chart("tradeoff", "Step time against memory", tradeoff_figure(points, frame), sentence)


def _point(row: PlanRow, place: int) -> Point:
    lines = [
        f"<b>{label_text(row.strategy)}</b>", f"step time {format_seconds(row.step.step_time_s)}, calculated",
        f"peak memory {format_bytes(row.memory.peak)}", f"{row.step.tokens_per_s_gpu:,.0f} tokens/s/GPU",
        f"{row.checkpointed} of {row.layers} layers recompute",
    ]  # fmt: skip
    return Point(
        name=row.strategy, time=row.step.step_time_s, memory=row.memory.peak, tip="<br>".join(lines),
        colour=look(place).colour, place=place, number=place,
    )  # fmt: skip


def time_chart(plan: Plan) -> Chart:
    """What each strategy's step is spent on."""
    parts = {row.strategy: plan_words.parts(row.step.account) for row in plan.rows}
    totals = {name: format_seconds(sum(of.values())) for name, of in parts.items()}
    looks = {name: look(place) for place, name in enumerate(next(iter(parts.values())))}
    figure = _bars(parts, totals, looks, "s", "per step")
    return chart("time", "Time of a step", figure, f"Time of a step: {_listed(totals)}.")


def memory_chart(plan: Plan) -> Chart:
    """What each strategy's peak is made of, beside what tensors can fill; far above that, bars are cut."""
    parts = {row.strategy: {str(name): float(of) for name, of in row.memory.at_peak.items()} for row in plan.rows}
    totals = {row.strategy: format_bytes(row.memory.peak) for row in plan.rows}
    figure = _bars(parts, totals, MEMORY, "B", "per rank")
    highest = max(row.memory.peak for row in plan.rows)
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
    """A bar for each strategy, its total beside its name."""
    rows = [Row(text=label_text(f"{strategy} {total}")) for strategy, total in totals.items()]
    bars = [Bar(place=place, name=strategy, parts=of) for place, (strategy, of) in enumerate(parts.items())]
    return stacked(rows, bars, looks, unit, axis)


def _listed(totals: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {total}" for name, total in totals.items())
