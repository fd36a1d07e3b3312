"""Loss curves of cases that train the same, in one chart, and their largest difference in words."""

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Setting
from refshard.quantities import format_percent
from refshard.report.draw.charts import THEME, Chart, chart, label_text
from refshard.report.draw.palette import DASHES, MARKERS
from refshard.report.run import alternatives, views
from refshard.report.run.charts import colour
from refshard.specs.case import REFERENCE_STRATEGY

MOST_CURVES = 8
"""Curves in a chart: the reference, or the first case if that has no losses, and the curves furthest from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of one training."""

    label: str
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    chart: Chart


def losses(training: Setting, prefix: str) -> Losses | None:
    """None if no case has losses."""
    table = views.losses(training)
    if table.empty:
        return None
    by_label = {case.label: case for case in training.cases}
    found = tuple(by_label[str(label)] for label in table.columns)
    shown = table[[case.label for case in _shown(table, found)]]
    left_out = len(table.columns) - len(shown.columns)
    rest = f" The chart shows {shown.columns[0]} and the {MOST_CURVES - 1} curves furthest from it." if left_out else ""
    told = f"{alternatives.curves(training)} {difference(table)}{rest}"
    return Losses(
        label=training.label,
        table=views.loss_table(training),
        cases=found,
        chart=chart(f"{prefix}-losses", "loss", draw(training, shown), told),
    )


def difference(table: pd.DataFrame) -> str:
    """Where two curves are furthest apart, relative to the lower one; of one curve, nothing.

    >>> difference(pd.DataFrame({"a": [2.0, 1.0], "b": [2.0, 1.5]}, index=[1, 2]))
    'The largest difference between two curves is 50.0 % (a and b, step 2).'
    """
    if len(table.columns) < 2:
        return ""
    low, high = table.min(axis="columns"), table.max(axis="columns")
    apart = ((high - low) / low.abs()).fillna(0.0)
    if not apart.max() > 0:
        return "No two curves differ at any step."
    place = int(apart.to_numpy().argmax())
    there = table.iloc[place]
    between = f"{there.idxmin()} and {there.idxmax()}, step {table.index[place]}"
    size = format_percent(apart.max()) if apart.max() >= 0.001 else f"{apart.max():.1e} of the loss"
    return f"The largest difference between two curves is {size} ({between})."


def _shown(table: pd.DataFrame, cases: tuple[CaseResult, ...]) -> list[CaseResult]:
    if len(cases) <= MOST_CURVES:
        return list(cases)
    reference = next((case for case in cases if case.strategy == REFERENCE_STRATEGY), cases[0])
    far = (table.sub(table[reference.label], axis="index")).abs().max()
    others = sorted((case for case in cases if case is not reference), key=lambda case: -far[case.label])
    return [reference, *others[: MOST_CURVES - 1]]


def draw(training: Setting, table: pd.DataFrame) -> go.Figure:
    """Loss per step; earlier curves are wider, so that coinciding ones stay visible."""
    by_label = {case.label: case for case in training.cases}
    count = len(table.columns)
    figure = go.Figure()
    for place, (label, case) in enumerate((str(label), by_label[str(label)]) for label in table.columns):
        wider, dash = count - 1 - place, DASHES[place % len(DASHES)]
        figure.add_scatter(
            name=label_text(label),
            x=table.index.tolist(),
            y=[None if pd.isna(loss) else float(f"{loss:.7g}") for loss in table[label]],
            mode="lines+markers",
            line={"color": colour(training, case.strategy), "width": 1.5 + 1.25 * wider, "dash": dash},
            marker={"symbol": MARKERS[place % len(MARKERS)], "size": 6 + wider},
            meta={"case": case.number},
            hovertemplate=f"{label_text(label)}<br>step %{{x}}: %{{y:.6g}}<extra></extra>",
        )
    figure.update_layout(template=THEME, height=300 + 8 * count, showlegend=True)
    figure.update_xaxes(title_text="step")
    return figure.update_yaxes(title_text="loss")
