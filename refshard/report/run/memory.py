"""Memory over a step as it was recorded, and as the dry run of a measured case predicts it."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.quantities import axis_unit, format_bytes
from refshard.report.draw.charts import THEME, Chart, chart, label_text
from refshard.report.run.charts import colour
from refshard.specs.case import spelled

MOST_CURVES = 8

Course = tuple[CaseResult, tuple[int, ...]]
"""A case or its dry run, and the highest that its allocator held in each stretch of a step, in bytes."""


def memory_over_step(setting: Setting, prefix: str, dry_runs: Mapping[CaseResult, CaseResult]) -> Chart | None:
    """A curve for each case, with its dry run's dotted beside it; None if no course of memory was recorded.

    Stretches are as many operators each, so curves of different code share their ends and no other moment.
    """
    found: list[tuple[CaseResult, list[Course]]] = []
    for case in setting.cases:
        shown = [case, dry_runs[case]] if case in dry_runs else [case]
        courses = [(one, course) for one in shown if one.ok and (course := _course(one))]
        if courses:
            found.append((case, courses))
    if not found:
        return None
    found = found[:MOST_CURVES]
    unit, size = axis_unit("B", max(max(course) for _, courses in found for _, course in courses))
    figure = go.Figure()
    for case, courses in found:
        for one, course in courses:
            name, dotted = label_text(case.strategy), one is not case
            figure.add_scatter(
                name=name,
                x=[float(f"{100 * place / max(len(course) - 1, 1):.4g}") for place in range(len(course))],
                y=[float(f"{highest / size:.5g}") for highest in course],
                mode="lines",
                showlegend=one is courses[0][0],
                line={"color": colour(setting, case.strategy), "width": 2, "dash": "dot" if dotted else "solid"},
                meta={"case": case.number},
                hovertemplate=f"{name}, {spelled(one.fidelity)}<br>%{{y:,.4g}} {unit}<extra></extra>",
            )
    figure.update_layout(template=THEME, height=300, showlegend=True)
    figure.update_xaxes(title_text="% of the step, in the host's order")
    figure.update_yaxes(title_text=f"{unit} per rank", rangemode="tozero")
    return chart(f"{prefix}-over-step", "memory over a step", figure, _sentence(found))


def _course(case: CaseResult) -> tuple[int, ...]:
    """That of the first launch that has one."""
    return next((launch.memory_course_bytes for launch in case.launches if launch.memory_course_bytes), ())


def _sentence(found: Sequence[tuple[CaseResult, Sequence[Course]]]) -> str:
    """Each curve's highest point."""
    peaks = []
    for case, courses in found:
        own = [format_bytes(max(course)) for one, course in courses if one is case]
        dry = [f"{format_bytes(max(course))} in its dry run" for one, course in courses if one is not case]
        peaks.append(f"{case.strategy} peaks at {', '.join([*own, *dry])}")
    dotted = any(one is not case for case, courses in found for one, _ in courses)
    told = f"Rank 0 of {ranks(found[0][0].spec.world_size)}: {'; '.join(peaks)}."
    return f"{told} Dotted: dry runs." if dotted else told
