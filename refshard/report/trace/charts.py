"""Figures of one trace as plotly charts, in the theme and colours of the rest of the page."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from refshard.quantities import GIB, KIB, MIB, format_bytes, format_ns, format_percent
from refshard.report.draw.charts import OKABE_ITO, THEME, Chart, chart, filling, label_text
from refshard.report.draw.palette import STYLES
from refshard.report.trace import captions as trace_captions
from refshard.report.trace import words as trace_words
from refshard.report.trace.gaps import GapSet, gap_histogram, sentence_of
from refshard.tracing.figures import Breakdown, MemoryPoint, TraceFigures

MOST_STEPS = 60
MOST_RANKS = 40
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


def ranks_chart(figures: Sequence[TraceFigures]) -> Chart | None:
    """A bar per rank of every job; None where there is but one trace."""
    if len(figures) < 2:
        return None
    names = trace_words.job_names(figures)
    kept = sorted(range(len(figures)), key=lambda place: -trace_captions.mean_span(figures[place]))[:MOST_RANKS]
    shown = [figures[place] for place in sorted(kept)]
    sentence = trace_captions.ranks(shown, len(figures), names)
    return chart("ranks", "Ranks beside each other", rank_bars(shown, names), sentence, with_still=False)


def charts_of(figures: TraceFigures, gaps: Sequence[GapSet], prefix: str) -> tuple[Chart, ...]:
    """The charts that this trace has data for."""
    title = "Where each step goes" if trace_words.has_steps(figures) else "Where the time goes"
    drawn = [chart(f"{prefix}-steps", title, step_bars(figures), trace_captions.steps(figures), with_still=False)]
    if gaps:
        drawn.append(chart(f"{prefix}-gaps", "Gaps", gap_histogram(gaps), sentence_of(gaps), with_still=False))
    if figures.memory:
        sentence = trace_captions.memory(figures.memory)
        drawn.append(chart(f"{prefix}-memory", "Memory", memory_curves(figures), sentence, with_still=False))
    return tuple(drawn)


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


def mean_split(figures: TraceFigures) -> dict[str, float]:
    """The parts of a trace's mean step."""
    every = [split(part.breakdown) for part in trace_words.parts(figures)]
    return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}


def step_bars(figures: TraceFigures) -> go.Figure:
    """One stacked bar per step, the last :data:`MOST_STEPS` of them."""
    every = [(f"step {step.step}", split(step.breakdown)) for step in figures.steps if step.step is not None]
    every = every[-MOST_STEPS:] or [("whole trace", split(figures.whole))]
    figure, unit = _stacked([parts for _, parts in every], [label for label, _ in every], list(range(len(every))))
    figure.update_layout(height=130 + 28 * len(every))
    return figure.update_xaxes(title_text=f"{unit} per {trace_words.each(figures)}")


def rank_bars(figures: Sequence[TraceFigures], names: Mapping[int, str]) -> go.Figure:
    """One stacked bar per rank, jobs below each other under their names."""
    rows, labels, places, heads = list[dict[str, float]](), list[str](), list[int](), list[tuple[int, str]]()
    place = 0
    for job, members in trace_words.jobs(figures).items():
        heads.append((place, names[job]))
        for one in members:
            place += 1
            rows.append(mean_split(one))
            labels.append(f"rank {'?' if one.rank is None else one.rank}")
            places.append(place)
        place += 1
    figure, unit = _stacked(rows, labels, places)
    for at, name in heads:
        figure.add_annotation(
            x=0, y=at, xref="x", yref="y", xanchor="left", showarrow=False, text=f"<b>{label_text(name)}</b>"
        )
    figure.update_layout(height=130 + 26 * place)
    figure.update_yaxes(range=[place - 0.4, -0.6], autorange=False)
    return figure.update_xaxes(title_text=f"{unit} of the mean step")


def _stacked(
    rows: Sequence[Mapping[str, float]], labels: Sequence[str], places: Sequence[int]
) -> tuple[go.Figure, str]:
    """Bars of parts, one row at each place from above, and the unit of their axis."""
    unit, size = _unit(max(sum(parts.values()) for parts in rows))
    shown = [label_text(label) for label in labels]
    figure = go.Figure(
        [
            go.Bar(
                name=part,
                y=list(places),
                x=[parts[part] / size for parts in rows],
                orientation="h",
                marker=filling(colour, pattern),
                customdata=[
                    [label, format_ns(parts[part]), format_percent(parts[part] / (sum(parts.values()) or 1))]
                    for label, parts in zip(shown, rows)
                ],
                hovertemplate=f"%{{customdata[0]}}<br>{part}: %{{customdata[1]}}, %{{customdata[2]}}<extra></extra>",
            )
            for part, (colour, pattern) in PARTS.items()
            if any(parts[part] for parts in rows)
        ]
    )
    figure.update_layout(template=THEME, barmode="stack", showlegend=True)
    figure.update_yaxes(
        autorange="reversed", ticklabelstandoff=6, showgrid=False, zeroline=False, tickvals=list(places), ticktext=shown
    )
    return figure.update_xaxes(nticks=6), unit


def memory_curves(figures: TraceFigures) -> go.Figure:
    """Bytes over time, a curve per device; dotted where a step begins."""
    points = figures.memory
    first, last = min(point.ns for point in points), max(point.ns for point in points)
    unit, size = _unit(last - first)
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
             "line": {"dash": "dot", "width": 1, "color": "#888888"}}
            for ns in begins
        ],
    )  # fmt: skip
    figure.update_xaxes(
        title_text=f"{unit} from the first event{'; dotted: a step begins' if begins else ''}", nticks=6
    )
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
