"""Why one strategy is faster: the traces of a run's cases."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from refshard.analysis.analyse import Analysis, analyse
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.figures import CollectiveFigures, TraceFigures
from refshard.errors import TraceError
from refshard.quantities import format_percent, format_rate
from refshard.records import Run
from refshard.report.blocks import Block, Marked, Quantity, Row, Section, table
from refshard.report.run.charts import drawn
from refshard.report.run.tables import numbers
from refshard.report.trace.charts import layer_chart
from refshard.report.trace.lanes import View, drawn_windows, find_layer
from refshard.report.trace.sections import blocking, middle_of
from refshard.report.trace.text import parts as steps_of

MOST_TRACED = 64
"""Traces that are analysed for one page; every trace keeps its link."""
MOST_LAYERS = 8
"""Layers drawn for one setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The trace of a case's first rank in the last round that has one: its file, the link to it, its analysis."""

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


def read_traces(evidence: Evidence, folders: Sequence[tuple[Run, Path]], page: Path) -> dict[CaseResult, Traced]:
    """The traces in the runs' folders, by case; ``page`` is the file that links to them. A damaged trace keeps its
    link.
    """
    found: dict[CaseResult, Traced] = {}
    for case in evidence.cases:
        folder = next((folder for run, folder in folders if run.header is case.header), None)
        rounds = [launch.traces for launch in case.ok_launches if launch.traces]
        files = [folder / name for traces in reversed(rounds) for name in traces[:1]] if folder else []
        path = next((path for path in files if path.is_file()), None)
        if path is None:
            continue
        analysis = None
        if len(found) < MOST_TRACED:
            with contextlib.suppress(TraceError):
                analysis = analyse(path)
        link = os.path.relpath(path.resolve(), page.resolve().parent).replace(os.sep, "/")
        found[case] = Traced(case=case, path=path, link=link, analysis=analysis, view=_view(analysis))
    return found


def why(setting: Setting, traced: Mapping[CaseResult, Traced], prefix: str, *, with_layers: bool) -> list[Block]:
    """The traces of one setting: a row for each, and a layer of each on one scale; nothing without a readable trace."""
    here = [traced[case] for case in setting.cases if case in traced and traced[case].analysis is not None]
    if not here:
        return []
    rows = table(
        [_row(one) for one in here], text=["bus bandwidth"], cases=numbers([one.case for one in here]),
        caption="Rank 0's trace, per step (a case leads to its trace)",
    )  # fmt: skip
    blocks: list[Block] = [Section(title="Rank 0's trace in numbers", folded=True, blocks=[rows])]
    # The same layer of each case of one world size, with one scale and one zero.
    sizes = [one.case.spec.job.gpus for one in here if one.view is not None] if with_layers else []
    size = max(sizes, key=lambda size: (sizes.count(size), size), default=0)
    shown = [one for one in here if one.view is not None and one.case.spec.job.gpus == size][:MOST_LAYERS]
    views = [(one, view) for one in shown if (view := _view(one.analysis, like=shown[0].view))]
    before = max((view.before for _, view in views), default=0)
    after = max((view.length - view.before for _, view in views), default=0)
    layers = []
    for one, view in views:
        layer = layer_chart(view.spanning(before, after), one.figures, f"{prefix}-layer-{one.case.number}")
        title = f"{one.case.label}: {layer.title[0].lower()}{layer.title[1:]}"
        layers.append(Section(title=title, blocks=[drawn(layer, titled=False)], cases=[one.case.number]))
    if layers:
        title = "One layer's backward, strategies on one time scale"
        blocks.append(Section(title=title, folded=True, blocks=layers))
    return blocks


def _view(analysis: Analysis | None, like: View | None = None) -> View | None:
    """A layer's backward in the step of median length: the layer of ``like``, if the trace has that."""
    if analysis is None or not len(analysis.timeline.spans):
        return None
    window = drawn_windows(analysis.figures, analysis.timeline)[0]
    return find_layer(analysis.timeline, window.begin, window.close, unit=like.unit if like else None)


def _row(one: Traced) -> Row:
    figures = one.figures
    parts, copies = [step.breakdown for step in steps_of(figures)], figures.copies
    steps, idle = len(parts), sum(part.idle_host_ns or 0 for part in parts)
    exposed = sum(part.exposed_ns for part in parts) / max(sum(part.span_ns for part in parts), 1)
    return {
        "case": Marked(one.case.full_label, href=f"#trace-of-{one.case.number}"),
        "exposed communication": Quantity(exposed, "share"),
        "late reductions (give-way)": Quantity(figures.giveway.index, "share", 2),
        "blocking gaps": blocking(figures.collectives, steps),
        "queued": Quantity(middle_of([found.queued_ns for found in figures.collectives]), "ns"),
        "copies": Quantity((copies.copy_in_ns + copies.copy_out_ns) / steps, "ns"),
        "exposed copies": Quantity(copies.exposed_ns / steps, "ns"),
        "waiting for the host": None if figures.whole.idle_host_ns is None else Quantity(idle / steps, "ns"),
        "bus bandwidth": ", ".join(_bandwidths(figures.collectives, one.case)) or "-",
    }


def _bandwidths(collectives: Sequence[CollectiveFigures], case: CaseResult) -> Iterator[str]:
    """The median bus bandwidth of the larger half of each kind, and its share of the link if that has a rate."""
    network = case.header.suite.network if case.fidelity == "measured" else None
    for op in dict.fromkeys(found.op for found in collectives if found.bus_bandwidth):
        mine = [found for found in collectives if found.op == op and found.bus_bandwidth]
        middle = median(found.bytes or 0 for found in mine)
        rate = median(found.bus_bandwidth or 0.0 for found in mine if (found.bytes or 0) >= middle)
        share = f" ({format_percent(rate * 8 / network.bits_per_s)} of the link)" if network else ""
        yield f"{op} {format_rate(rate / 2**30)} GiB/s{share}"
