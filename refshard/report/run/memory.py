"""Memory that the model predicts, by category and over a step, compared with the measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.errors import SpecError
from refshard.memory.of_case import memory_of
from refshard.memory.walk import MemoryForecast
from refshard.quantities import axis_unit, format_bytes, format_percent
from refshard.report.draw.charts import THEME, Bar, Chart, chart, label_text, short, stacked
from refshard.report.draw.palette import INK, MEMORY
from refshard.report.run.charts import case_rows, colour
from refshard.specs.case import CaseSpec, spelled

MOST_CURVES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Predicted memory of a setting's cases: a table, a chart by category, and a chart over a step."""

    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    parts: Chart
    steps: Chart


@lru_cache(maxsize=4096)
def forecast(spec: CaseSpec, device: str) -> MemoryForecast | None:
    """The model's prediction for a case on ``device``; None if it does not know the case or the model."""
    try:
        return memory_of(spec, "cpu" if device == "cpu" else "cuda")
    except SpecError:
        return None


def memory(setting: Setting, prefix: str) -> Memory | None:
    """None if the model knows none of the cases that ended ok."""
    found = [(case, told) for case in setting.cases if case.ok and (told := forecast(case.spec, _device(case)))]
    if not found:
        return None
    largest = max(case.spec.world_size for case, _ in found)
    return Memory(
        table=pd.DataFrame([_row(case, told) for case, told in found]),
        cases=tuple(case for case, _ in found),
        parts=chart(f"{prefix}-parts", "memory by category", parts(found), sentence(found)),
        steps=chart(
            f"{prefix}-over-step",
            "memory over a step",
            over_step(setting, [(case, told) for case, told in found if case.spec.world_size == largest]),
            _course_sentence(found, largest),
        ),
    )


def _device(case: CaseResult) -> str:
    return case.launches[0].device or "cpu"


def _course_sentence(found: Sequence[tuple[CaseResult, MemoryForecast]], world_size: int) -> str:
    """Predicted peaks, and how many curves were measured."""
    here = [(case, told) for case, told in found if case.spec.world_size == world_size][:MOST_CURVES]
    peaks = ", ".join(f"{case.strategy} peaks at {format_bytes(told.peak)}" for case, told in here)
    measured = sum(bool(_course(case)) for case, _ in here)
    dry = all(case.fidelity == "dryrun" for case, _ in here)
    dotted = f" Dotted: rank 0, {'dry run' if dry else 'measured'} ({measured} of {len(here)})." if measured else ""
    return f"Predicted over a step of {ranks(world_size)}: {peaks}.{dotted}"


def _course(case: CaseResult) -> tuple[int, ...]:
    """Of the first launch that has one."""
    return next((launch.memory_course_bytes for launch in case.launches if launch.memory_course_bytes), ())


def _row(case: CaseResult, told: MemoryForecast) -> dict[str, str]:
    measured = case.metrics["peak_memory_bytes"]
    fidelity = spelled(case.fidelity)
    compared = {} if case.fidelity == "simulated" else {
        fidelity: format_bytes(measured),
        f"predicted / {fidelity}": "-" if not measured else f"{told.peak / measured:.3f}",
    }  # fmt: skip
    by_category = {str(name): format_bytes(size) for name, size in told.at_peak.items()}
    return {"case": case.full_label, "predicted": format_bytes(told.peak), **compared, **by_category}


def sentence(found: Sequence[tuple[CaseResult, MemoryForecast]]) -> str:
    """What takes most memory, and how far the predictions are off."""
    errors = [
        (abs(told.peak / measured - 1), case.strategy)
        for case, told in found
        if case.fidelity != "simulated" and (measured := case.metrics["peak_memory_bytes"])
    ]
    case, told = max(found, key=lambda pair: pair[1].peak)
    name, most = max(told.at_peak.items(), key=lambda item: item[1])
    verb = "take" if name[-1] == "s" else "takes"
    largest = f"{str(name).capitalize()} {verb} most at the highest predicted peak ({case.strategy})"
    share = f"{largest}: {format_bytes(most)} of {format_bytes(told.peak)}."
    if not errors:
        return share
    worst, where = max(errors)
    return f"{share} Predictions differ from {_held_against(found)} by at most {format_percent(worst)} ({where})."


def _held_against(found: Sequence[tuple[CaseResult, MemoryForecast]]) -> str:
    """What predictions are compared with, in words."""
    return "the dry run" if all(case.fidelity == "dryrun" for case, _ in found) else "the measurement"


def parts(found: Sequence[tuple[CaseResult, MemoryForecast]]) -> go.Figure:
    """A bar per case, stacked by category; a mark at what was measured."""
    rows, places = case_rows([case for case, _ in found])
    bars = [Bar(place=place, name=case.label, parts=_bytes(told)) for place, (case, told) in zip(places, found)]
    figure = stacked(rows, bars, MEMORY, "B", "per rank at the peak")
    _, size = axis_unit("B", max(told.peak for _, told in found))
    known = [
        (place, value)
        for place, (case, _) in zip(places, found)
        if case.fidelity != "simulated" and (value := case.metrics["peak_memory_bytes"])
    ]
    return figure.add_scatter(
        name="peak of the dry run" if _held_against(found) == "the dry run" else "measured peak",
        y=[place for place, _ in known],
        x=short([value / size for _, value in known]),
        mode="markers",
        marker={"symbol": "line-ns", "size": 16, "line": {"width": 3, "color": INK}, "color": INK},
        customdata=[format_bytes(value) for _, value in known],
        hovertemplate=f"{_held_against(found)}: %{{customdata}}<extra></extra>",
    )


def _bytes(told: MemoryForecast) -> dict[str, float]:
    return {str(name): float(size) for name, size in told.at_peak.items()}


def over_step(setting: Setting, found: Sequence[tuple[CaseResult, MemoryForecast]]) -> go.Figure:
    """The highest sum in each stretch of a step, in the host's order, as predicted and, dotted, as measured.

    Stretches of the prediction are parts of units, those of a measurement as many operators each.
    """
    unit, size = axis_unit("B", max(told.peak for _, told in found))
    figure = go.Figure()
    for case, told in found[:MOST_CURVES]:
        events = [(event.name, event.highest) for event in told.events]
        figure.add_trace(_course_trace(setting, case, "predicted", events, unit, size))
        if measured := [("", highest) for highest in _course(case)]:
            figure.add_trace(_course_trace(setting, case, spelled(case.fidelity), measured, unit, size))
    figure.update_layout(template=THEME, height=300, showlegend=True)
    figure.update_xaxes(title_text="% of the step, in the host's order")
    return figure.update_yaxes(title_text=f"{unit} per rank", rangemode="tozero")


def _course_trace(
    setting: Setting, case: CaseResult, kind: str, points: Sequence[tuple[str, int]], unit: str, size: float
) -> go.Scatter:
    name = label_text(case.strategy)
    last = max(len(points) - 1, 1)
    return go.Scatter(
        name=name,
        x=[float(f"{100 * n / last:.4g}") for n in range(len(points))],
        y=[float(f"{highest / size:.5g}") for _, highest in points],
        mode="lines",
        showlegend=kind == "predicted",
        line={
            "color": colour(setting, case.strategy), "width": 2, "dash": "solid" if kind == "predicted" else "dot"
        },
        meta={"case": case.number},
        customdata=[label_text(part) for part, _ in points],
        hovertemplate=f"{name}, {kind}<br>%{{customdata}} %{{y:,.4g}} {unit}<extra></extra>",
    )  # fmt: skip
