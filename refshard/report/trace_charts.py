"""Figures of one trace as plotly charts, in the theme and colours of the rest of the page."""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from refshard.quantities import GIB, KIB, MIB, format_bytes, format_ns
from refshard.report import trace_words
from refshard.report.charts import DASHES, OKABE_ITO, THEME, Chart, filling, label_text
from refshard.report.lanes import idle_styles
from refshard.report.palette import STYLES
from refshard.timeline import Timeline
from refshard.tracing.figures import Breakdown, MemoryPoint, TraceFigures

MOST_STEPS = 60
MOST_POINTS = 1500
PARTS = {
    # part: (colour, pattern)
    "compute alone": (STYLES["compute"].colour, ""),
    "compute over communication": ("#56B4E9", "."),
    "exposed communication": (STYLES["exposed"].colour, "\\"),
    "other": (STYLES["prep"].colour, "x"),
    "idle, host-bound": (STYLES["idle-host"].colour, "|"),
    "idle, dependency-bound": (STYLES["idle-dependency"].colour, "."),
    "idle": (STYLES["idle"].colour, ""),
}
_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3))


def charts_of(figures: TraceFigures, timeline: Timeline, prefix: str) -> tuple[Chart, ...]:
    """The charts that this trace has data for."""
    drawn = [_chart(f"{prefix}-steps", "Where each step goes", step_bars(figures), trace_words.steps_sentence(figures))]
    collective_gaps, blocking, idle = gaps(figures, timeline)
    if collective_gaps or idle:
        sentence = trace_words.gaps_sentence(collective_gaps, sum(blocking), idle)
        drawn.append(_chart(f"{prefix}-gaps", "Gaps", gap_histogram(collective_gaps, blocking, idle), sentence))
    if figures.memory:
        sentence = trace_words.memory_sentence(figures.memory)
        drawn.append(_chart(f"{prefix}-memory", "Memory", memory_curves(figures.memory), sentence))
    return tuple(drawn)


def _chart(identity: str, title: str, figure: go.Figure, alternative: str) -> Chart:
    return Chart(id=identity, title=title, figure=json.loads(figure.to_json()), alternative=alternative)


def split(part: Breakdown) -> dict[str, int]:
    """A window cut into parts that add up to it; idle time is one part where its causes are not known.

    Compute and communication together cover compute + exposed, so that what else is busy is *other*.
    """
    overlapped = part.comm_ns - part.exposed_ns
    known = part.idle_host_ns is not None and part.idle_dependency_ns is not None
    return {
        "compute alone": part.compute_ns - overlapped,
        "compute over communication": overlapped,
        "exposed communication": part.exposed_ns,
        "other": part.busy_ns - part.compute_ns - part.exposed_ns,
        "idle, host-bound": part.idle_host_ns or 0 if known else 0,
        "idle, dependency-bound": part.idle_dependency_ns or 0 if known else 0,
        "idle": 0 if known else part.idle_ns,
    }


def step_bars(figures: TraceFigures) -> go.Figure:
    """One stacked bar per step, the last :data:`MOST_STEPS` of them."""
    every = [(f"step {step.step}", split(step.breakdown)) for step in figures.steps[-MOST_STEPS:]]
    every = every or [("whole trace", split(figures.whole))]
    unit, size = _unit(max(sum(parts.values()) for _, parts in every))
    figure = go.Figure(
        [
            go.Bar(
                name=part,
                y=[label for label, _ in every],
                x=[parts[part] / size for _, parts in every],
                orientation="h",
                marker=filling(colour, pattern),
                customdata=[format_ns(parts[part]) for _, parts in every],
                hovertemplate=f"%{{y}}<br>{part}: %{{customdata}}<extra></extra>",
            )
            for part, (colour, pattern) in PARTS.items()
            if any(parts[part] for _, parts in every)
        ]
    )
    figure.update_layout(template=THEME, barmode="stack", height=130 + 28 * len(every), showlegend=True)
    figure.update_yaxes(autorange="reversed", ticklabelstandoff=6, showgrid=False)
    return figure.update_xaxes(title_text=f"{unit} per step")


def gaps(figures: TraceFigures, timeline: Timeline) -> tuple[list[int], list[bool], list[int]]:
    """Gaps between collectives and whether each blocks, and idle gaps, in nanoseconds, over the whole trace."""
    between = [(c.gap_ns, bool(c.gap_blocking)) for c in figures.collectives if c.gap_ns]
    idle: list[int] = []
    spans = timeline.spans
    if len(spans):
        for _, found in idle_styles(timeline, int(spans.starts.min()), int(spans.ends.max())):
            idle += (found.ends - found.starts).tolist()
    positive = [(gap, blocks) for gap, blocks in between if gap > 0]
    return [gap for gap, _ in positive], [blocks for _, blocks in positive], idle


def gap_histogram(between: Sequence[int], blocking: Sequence[bool], idle: Sequence[int]) -> go.Figure:
    """How many gaps are how long, in bins that each double."""
    longest = max([*between, *idle])
    shortest = min([*between, *idle])
    edges = [2**n for n in range(int(np.floor(np.log2(shortest))), int(np.floor(np.log2(longest))) + 2)]
    labels = [f"{format_ns(low)} to {format_ns(high)}" for low, high in pairwise(edges)]
    sets = (
        ("between collectives, blocking", [g for g, b in zip(between, blocking) if b], STYLES["exposed"].colour, "|"),
        ("between collectives, other", [g for g, b in zip(between, blocking) if not b], STYLES["comm"].colour, "/"),
        ("idle", list(idle), STYLES["idle"].colour, ""),
    )
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                x=labels,
                y=np.histogram(values, edges)[0].tolist(),
                marker=filling(colour, pattern),
                hovertemplate=f"%{{x}}: %{{y}} ({name})<extra></extra>",
            )
            for name, values, colour, pattern in sets
            if values
        ]
    )
    figure.update_layout(template=THEME, barmode="group", height=320, showlegend=True, bargap=0.15)
    figure.update_xaxes(
        title_text="length of the gap", tickangle=-40, tickvals=labels, ticktext=[format_ns(e) for e in edges[:-1]]
    )
    return figure.update_yaxes(title_text="gaps")


def memory_curves(points: Sequence[MemoryPoint]) -> go.Figure:
    """Bytes over time, a curve per device."""
    first = min(point.ns for point in points)
    unit, size = _unit(max(point.ns for point in points) - first)
    name, bytes_each = next(
        ((label, each) for label, each in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if _most(points) >= each), ("B", 1)
    )
    figure = go.Figure()
    for place, device in enumerate(dict.fromkeys(point.device for point in points)):
        mine = thinned([point for point in points if point.device == device])
        figure.add_scatter(
            name=label_text(device),
            x=[(point.ns - first) / size for point in mine],
            y=[point.bytes / bytes_each for point in mine],
            mode="lines",
            line={"shape": "hv", "color": OKABE_ITO[place % len(OKABE_ITO)], "dash": DASHES[place % len(DASHES)]},
            customdata=[format_bytes(point.bytes) for point in mine],
            hovertemplate=f"{label_text(device)}<br>%{{x:.4g}} {unit}: %{{customdata}}<extra></extra>",
        )
    figure.update_layout(template=THEME, height=300, showlegend=len(figure.data) > 1)
    figure.update_xaxes(title_text=f"{unit} from the first event")
    return figure.update_yaxes(title_text=name, rangemode="tozero")


def _most(points: Sequence[MemoryPoint]) -> int:
    return max(point.bytes for point in points)


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


def _unit(ns: float) -> tuple[str, int]:
    return next(((name, size) for name, size in _UNITS if ns >= size), ("ns", 1))
