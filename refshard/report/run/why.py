"""Why one strategy is faster: the traces of a run's cases, side by side."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, Setting
from refshard.errors import TraceError
from refshard.quantities import format_ns, format_percent, format_rate
from refshard.records import Run
from refshard.report.draw.charts import Chart, chart
from refshard.report.run.charts import step_parts
from refshard.report.trace import charts as trace_charts
from refshard.report.trace import tables as trace_tables
from refshard.report.trace import wording
from refshard.report.trace.idle import NAMES as IDLE
from refshard.report.trace.lanes import drawn_windows
from refshard.report.trace.spans_figure import View, find_layer, layer_chart
from refshard.tracing.analysis import Analysis, analyse
from refshard.tracing.figures import CollectiveFigures, StepFigures, TraceFigures

MOST_TRACED = 64
"""Traces that are analysed for one page; every trace keeps its link."""
MOST_LAYERS = 8
"""Layers drawn for one setting."""
LEAST_SHARE = 0.005
"""Of a step in copies and preparation, from which on a drawing that has them is worth its place."""
COPIES = "copy, preparation, other"
PARTS = {
    "compute alone": ("compute alone",),
    "overlapped communication": ("compute over communication",),
    "exposed communication": ("exposed communication",),
    COPIES: ("other",),
    "idle": tuple(IDLE.values()),
}
"""Parts of a traced step, which add up to it, and what :func:`trace_charts.split` calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A case's first rank in the last round that has a trace of it: its file, the link to that, what it says."""

    case: CaseResult
    path: Path
    link: str
    analysis: Analysis | None
    view: View | None

    @property
    def figures(self) -> TraceFigures:
        """Those of an analysed trace."""
        assert self.analysis is not None
        return self.analysis.figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What traces say of one setting: a row for each, a layer of each on one scale, and where their steps go if that
    is more than the records say.
    """

    parts: Chart | None
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    links: tuple[str, ...]
    layers: tuple[tuple[CaseResult, Chart], ...]


def read_traces(evidence: Evidence, folders: Sequence[tuple[Run, Path]], page: Path) -> dict[CaseResult, Traced]:
    """The traces that lie in the runs' folders, by case; ``page`` is the file that links to them."""
    found: dict[CaseResult, Traced] = {}
    for case in evidence.cases:
        folder = next((folder for run, folder in folders if run.header is case.header), None)
        path = None if folder is None else _file(case, folder)
        if path is None:
            continue
        link = os.path.relpath(path.resolve(), page.resolve().parent).replace(os.sep, "/")
        analysis, view = _analysed(path) if len(found) < MOST_TRACED else (None, None)
        found[case] = Traced(case=case, path=path, link=link, analysis=analysis, view=view)
    return found


def _file(case: CaseResult, folder: Path) -> Path | None:
    rounds = [launch.traces for launch in case.launches if launch.state == "ok" and launch.traces]
    files = (folder / name for traces in reversed(rounds) for name in traces[:1])
    return next((path for path in files if path.is_file()), None)


def _analysed(path: Path) -> tuple[Analysis | None, View | None]:
    """Nothing of a trace that is damaged: its link stays."""
    try:
        found = analyse(path)
    except TraceError:
        return None, None
    return found, _view(found)


def why(setting: Setting, traced: Mapping[CaseResult, Traced], prefix: str, *, with_layers: bool = True) -> Why | None:
    """None where no case of the setting has a trace that can be read."""
    here = [traced[case] for case in setting.cases if case in traced and traced[case].analysis is not None]
    if not here:
        return None
    parts = {one.case: parts_of(one.figures) for one in here}
    return Why(
        parts=chart(f"{prefix}-traced", "traced step", step_parts(parts, PARTS), _sentence(parts))
        if any(one[COPIES] > LEAST_SHARE * sum(one.values()) for one in parts.values())
        else None,
        table=pd.DataFrame([_row(one) for one in here]),
        cases=tuple(one.case for one in here),
        links=tuple(one.link for one in here),
        layers=tuple(_layers(here, prefix)) if with_layers else (),
    )


def parts_of(figures: TraceFigures) -> dict[str, float]:
    """Of the mean step, s."""
    split = trace_charts.mean_split(figures)
    return {part: sum(split[name] for name in names) / 1e9 for part, names in PARTS.items()}


def _sentence(parts: Mapping[CaseResult, Mapping[str, float]]) -> str:
    """Whose rank communicates, exposed, for the least and the largest share of its step."""
    shares = {case.strategy: one["exposed communication"] / (sum(one.values()) or 1.0) for case, one in parts.items()}
    least, most = min(shares, key=lambda name: shares[name]), max(shares, key=lambda name: shares[name])
    told = f"Rank 0, one round: exposed communication takes {format_percent(shares[least])} of a step ({least})"
    return f"{told}." if least == most else f"{told} to {format_percent(shares[most])} ({most})."


def _row(one: Traced) -> dict[str, str]:
    figures = one.figures
    steps = len(wording.parts(figures))
    copies, whole = figures.copies, figures.whole
    known = whole.idle_host_ns is not None
    return {
        "case": one.case.full_label,
        "late reductions (give-way)": format_percent(figures.giveway.index, 2),
        "blocking gaps": trace_tables.blocking(figures.collectives, steps),
        "queued": format_ns(trace_tables.middle_of([found.queued_ns for found in figures.collectives])),
        "copies": format_ns((copies.copy_in_ns + copies.copy_out_ns) / steps),
        "exposed copies": format_ns(copies.exposed_ns / steps),
        "waiting for the host": format_ns(_idle(figures.steps, steps)) if known else "-",
        "bus bandwidth": _bandwidths(figures.collectives, one.case),
    }


def _idle(every: Sequence[StepFigures], steps: int) -> float:
    return sum(step.breakdown.idle_host_ns or 0 for step in every) / steps


def _bandwidths(collectives: Sequence[CollectiveFigures], case: CaseResult) -> str:
    """The median bus bandwidth of the larger half of each kind, and its share of the link where that has a rate."""
    network = case.header.suite.network if case.fidelity == "measured" else None
    told = []
    for op in dict.fromkeys(found.op for found in collectives if found.bus_bandwidth):
        mine = [found for found in collectives if found.op == op and found.bus_bandwidth]
        middle = median(found.bytes or 0 for found in mine)
        rate = median(found.bus_bandwidth or 0.0 for found in mine if (found.bytes or 0) >= middle)
        share = f" ({format_percent(rate * 8 / network.bits_per_s)} of the link)" if network else ""
        told.append(f"{op} {format_rate(rate / 2**30)} GiB/s{share}")
    return ", ".join(told) or "-"


def _layers(here: Sequence[Traced], prefix: str) -> Iterable[tuple[CaseResult, Chart]]:
    """The same layer of each case of one world size, with one scale and one zero."""
    sizes = [one.case.spec.world_size for one in here if one.view is not None]
    if not sizes:
        return
    size = max(sizes, key=lambda size: (sizes.count(size), size))
    shown = [one for one in here if one.view is not None and one.case.spec.world_size == size][:MOST_LAYERS]
    views = [_view(one.analysis, like=shown[0].view) for one in shown]
    before = max(view.before for view in views if view)
    after = max(view.length - view.before for view in views if view)
    for one, view in zip(shown, views):
        if view is not None:
            yield one.case, layer_chart(view.spanning(before, after), one.figures, f"{prefix}-layer-{one.case.number}")


def _view(analysis: Analysis | None, like: View | None = None) -> View | None:
    """A layer's backward in the step of median length: the layer of ``like``, if the trace has that."""
    if analysis is None or not len(analysis.timeline.spans):
        return None
    window = drawn_windows(analysis.figures, analysis.timeline)[0]
    unit = like.unit if like else None
    return find_layer(analysis.timeline, window.begin, window.close, unit=unit)
