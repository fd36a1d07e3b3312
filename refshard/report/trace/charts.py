"""Figures of one trace as plotly charts, in the theme and colours of the rest of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from refshard.events.timeline import Timeline
from refshard.quantities import axis_unit, format_bytes
from refshard.report.draw.charts import THEME, Bar, Chart, Row, chart, label_text, shortened, stacked
from refshard.report.draw.palette import INK, OKABE_ITO, STEP
from refshard.report.trace import captions as trace_captions
from refshard.report.trace import jobs as trace_jobs
from refshard.report.trace.gaps import GapSet, gap_histogram, gaps_of, sentence_of
from refshard.report.trace.idle import NAMES as IDLE
from refshard.report.trace.lanes import Window, drawn_windows, step_rows
from refshard.report.trace.layer import find_layer, layer_chart
from refshard.report.trace.of_cpu import chart_of_cpu
from refshard.report.trace.per_step import each, has_steps, per
from refshard.report.trace.spans_figure import Extent, spans_figure
from refshard.tracing.figures import Breakdown, MemoryPoint, TraceFigures

MOST_STEPS = 60
MOST_RANKS = 40
MOST_POINTS = 1500
MOST_SPANS = 20_000
"""Of a timeline, which then takes about 1 MB of its page; a browser draws it in 0.1 s."""
_MOST_CHARACTERS = 24
PARTS = (
    "compute alone", "compute over communication", "exposed communication", "other", *IDLE.values(),
)  # fmt: skip
"""Of a step; they add up to it."""


def ranks_chart(figures: Sequence[TraceFigures]) -> Chart | None:
    """A bar per rank of every job; None where there is but one trace."""
    if len(figures) < 2:
        return None
    names = trace_jobs.job_names(figures)
    kept = sorted(range(len(figures)), key=lambda place: -trace_captions.mean_span(figures[place]))[:MOST_RANKS]
    shown = [figures[place] for place in sorted(kept)]
    sentence = trace_captions.ranks(shown, len(figures), names)
    drawn = chart("ranks", "Ranks side by side", rank_bars(shown, names), sentence)
    return chart_of_cpu(drawn) if all(one.device == "cpu" for one in figures) else drawn


def all_charts(figures: TraceFigures, timeline: Timeline | None, prefix: str) -> list[Chart]:
    """Every chart of one trace, as far as its timeline is known; ids begin with ``prefix``."""
    if timeline is None:
        return list(charts_of(figures, (), prefix))
    windows = drawn_windows(figures, timeline) if len(timeline.spans) else ()
    layer = find_layer(timeline, windows[0].begin, windows[0].close) if windows else None
    found = [
        *timelines(timeline, figures, windows, prefix),
        *([] if layer is None else [layer_chart(layer, figures, f"{prefix}-layer")]),
        *charts_of(figures, gaps_of(figures, timeline), prefix),
    ]
    return list(map(chart_of_cpu, found)) if figures.device == "cpu" else found


def timelines(timeline: Timeline, figures: TraceFigures, windows: Sequence[Window], prefix: str) -> tuple[Chart, ...]:
    """Each window's lanes over time."""
    drawn = [_timeline(timeline, figures, one, f"{prefix}-timeline-{n}") for n, one in enumerate(windows)]
    return tuple(replace(one, folded=place > 0) for place, one in enumerate(drawn))


def _timeline(timeline: Timeline, figures: TraceFigures, window: Window, identity: str) -> Chart:
    rows, undrawn = step_rows(timeline, figures, window)
    whole = "trace" if window.step is None else "step"
    extent = Extent(begin=window.begin, close=window.close, origin=window.begin, title=f"from the start of the {whole}")
    figure, cell = spans_figure(rows, extent, MOST_SPANS)
    sentence = trace_captions.timeline(window.label, trace_jobs.who(figures), cell, undrawn)
    return chart(identity, f"Timeline of {window.label}", figure, sentence)


def charts_of(figures: TraceFigures, gaps: Sequence[GapSet], prefix: str) -> tuple[Chart, ...]:
    """The charts that this trace has data for."""
    title = "Where each step goes" if has_steps(figures) else "Where the time goes"
    drawn = [chart(f"{prefix}-steps", title, step_bars(figures), trace_captions.steps(figures))]
    if gaps:
        histogram = chart(f"{prefix}-gaps", "Gaps", gap_histogram(gaps), sentence_of(gaps))
        drawn.append(replace(histogram, folded=True))
    if figures.memory:
        sentence = trace_captions.memory(figures.memory)
        drawn.append(chart(f"{prefix}-memory", "Memory", memory_curves(figures), sentence))
    return tuple(drawn)


def split(part: Breakdown) -> dict[str, int]:
    """A window cut into parts that add up to it.

    Compute and communication together cover compute + exposed, so that what else is busy is *other*.
    """
    overlapped = part.comm_ns - part.exposed_ns
    return {
        "compute alone": part.compute_ns - overlapped,
        "compute over communication": overlapped,
        "exposed communication": part.exposed_ns,
        "other": part.busy_ns - part.compute_ns - part.exposed_ns,
        **{name: getattr(part, f"idle_{cause}_ns") or 0 for cause, name in IDLE.items()},
    }


def mean_split(figures: TraceFigures) -> dict[str, float]:
    """The parts of a trace's mean step."""
    every = [split(part.breakdown) for part in trace_jobs.parts(figures)]
    return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}


def step_bars(figures: TraceFigures) -> go.Figure:
    """One stacked bar per step, the last :data:`MOST_STEPS` of them."""
    what = each(figures)
    every = [(f"{what} {step.step}", split(step.breakdown)) for step in figures.steps if step.step is not None]
    every = every[-MOST_STEPS:] or [("whole trace", split(figures.whole))]
    bars = [Bar(place=place, name=name, parts=_seconds(parts)) for place, (name, parts) in enumerate(every)]
    return _stacked([Row(text=bar.name) for bar in bars], bars, per(figures))


def rank_bars(figures: Sequence[TraceFigures], names: Mapping[int, str]) -> go.Figure:
    """One stacked bar per rank, those of a job under its name."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for job, members in trace_jobs.jobs(figures).items():
        rows.append(Row(text=f"<b>{shortened(names[job], _MOST_CHARACTERS)}</b>"))
        for one in members:
            name = f"rank {'?' if one.rank is None else one.rank}"
            bars.append(Bar(place=len(rows), name=name, parts=_seconds(mean_split(one))))
            rows.append(Row(text=name))
    return _stacked(rows, bars, "of the mean step")


def _stacked(rows: Sequence[Row], bars: Sequence[Bar], axis: str) -> go.Figure:
    return stacked(rows, bars, {part: STEP[part] for part in PARTS}, "s", axis)


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: ns / 1e9 for part, ns in parts.items()}


def memory_curves(figures: TraceFigures) -> go.Figure:
    """Bytes over time, a curve per device; dotted where a step begins."""
    points = figures.memory
    first, last = min(point.ns for point in points), max(point.ns for point in points)
    unit, size = axis_unit("s", (last - first) / 1e9)
    size *= 1e9
    name, bytes_each = axis_unit("B", max(point.bytes for point in points))
    figure = go.Figure()
    for place, device in enumerate(dict.fromkeys(point.device for point in points)):
        mine = thinned([point for point in points if point.device == device])
        figure.add_scatter(
            name=label_text(device),
            x=[(point.ns - first) / size for point in mine],
            y=[point.bytes / bytes_each for point in mine],
            mode="lines",
            line={"shape": "hv", "color": OKABE_ITO[place % len(OKABE_ITO)]},
            customdata=[format_bytes(point.bytes) for point in mine],
            hovertemplate=f"{label_text(device)}<br>%{{x:.4g}} {unit}: %{{customdata}}<extra></extra>",
        )
    begins = [step.start_ns for step in figures.steps if step.step is not None and first <= step.start_ns <= last]
    begins = begins if len(begins) <= MOST_STEPS else []
    figure.update_layout(
        template=THEME, height=300, showlegend=len(figure.data) > 1,
        shapes=[
            {"type": "line", "x0": (ns - first) / size, "x1": (ns - first) / size, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"dash": "dot", "width": 1, "color": INK}}
            for ns in begins
        ],
    )  # fmt: skip
    figure.update_xaxes(
        title_text=f"{unit} from the first event{'; dotted: a step begins' if begins else ''}", nticks=6
    )
    return figure.update_yaxes(title_text=name, rangemode="tozero")


def thinned(points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """At most :data:`MOST_POINTS` points: of each run of neighbours the least and the largest, so that peaks stay."""
    if len(points) <= MOST_POINTS:
        return list(points)
    kept: list[MemoryPoint] = []
    for run in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        here = [points[i] for i in run]
        ends = {id(p): p for p in (min(here, key=lambda p: p.bytes), max(here, key=lambda p: p.bytes))}
        kept += sorted(ends.values(), key=lambda p: p.ns)
    return kept
