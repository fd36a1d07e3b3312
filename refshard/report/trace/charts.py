"""What each chart of a trace shows, in a sentence that stands in for it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from refshard.analysis.figures import Breakdown, Cause, MemoryPoint, TraceFigures
from refshard.events.timeline import Timeline
from refshard.quantities import axis_unit, format_bytes, format_ns, format_percent
from refshard.report.blocks import Cell
from refshard.report.draw.charts import THEME, Bar, Chart, Row, chart, filling, label_text, shortened, stacked
from refshard.report.draw.palette import INK, OKABE_ITO, SPANS, STEP
from refshard.report.trace import wording
from refshard.report.trace.idle import BETWEEN_OPERATORS, NAMES
from refshard.report.trace.idle import NAMES as IDLE
from refshard.report.trace.lanes import Window, drawn_windows, idle_styles, step_rows
from refshard.report.trace.spans_figure import Extent, find_layer, layer_chart, spans_figure
from refshard.report.trace.wording import counted, each, has_steps, parts, per, who


def ranks_caption(shown: Sequence[TraceFigures], whole: int, names: dict[int, str]) -> str:
    """What the bars of all ranks show, and which of them are left out."""
    shortest, longest = min(shown, key=mean_span), max(shown, key=mean_span)
    left_out = f" Of {whole} ranks, the {len(shown)} with the longest step are drawn." if len(shown) < whole else ""
    return (
        f"Mean {each(longest)} of each rank: from {format_ns(mean_span(shortest))} on {_where(shortest, names)} to "
        f"{format_ns(mean_span(longest))} on {_where(longest, names)}.{left_out}"
    )


def _where(one: TraceFigures, names: dict[int, str]) -> str:
    return who(one) if len(names) == 1 or one.rank is None else f"{who(one)} of {names[one.job]}"


def mean_span(one: TraceFigures) -> float:
    """Nanoseconds of a step of one rank, in the mean."""
    spans = [part.breakdown.span_ns for part in parts(one)]
    return sum(spans) / len(spans)


def timeline_caption(label: str, whose: str, cell_ns: int, undrawn_lanes: int) -> str:
    """What a timeline shows, what it leaves out, and how to read it."""
    sentences = [f"{label[0].upper()}{label[1:]}, of {whose}."]
    if cell_ns:
        sentences.append(
            f"There are too many spans to draw: those under {format_ns(cell_ns)} that begin within that time of each "
            "other are one block."
        )
    if undrawn_lanes:
        sentences.append(
            f"{counted(undrawn_lanes, 'more lane')}, the least busy, {'is' if undrawn_lanes == 1 else 'are'} not drawn."
        )
    return " ".join([*sentences, "Point at a block for its name and duration; drag to zoom; double-click to zoom out."])


def steps_caption(figures: TraceFigures) -> str:
    """What the bars of the steps show."""
    every = [part.breakdown for part in parts(figures)]
    exposed = [part.exposed_ns / part.span_ns for part in every if part.span_ns]
    idle = [part.idle_ns / part.span_ns for part in every if part.span_ns]
    if not exposed:
        return "The trace holds no time."
    what = counted(len(every), each(figures)) if has_steps(figures) else "The whole trace, which has no steps"
    return f"{what}: exposed communication takes {_range(exposed)}, idle time {_range(idle)} of it."


def _gaps_text(noun: str, lengths: Sequence[int]) -> str:
    if not lengths:
        return f"No {noun.format('')}"
    middle, longest = sorted(lengths)[len(lengths) // 2], max(lengths)
    return (
        f"{len(lengths):,} {noun.format('' if len(lengths) == 1 else 's')}, {format_ns(sum(lengths))} together, median "
        f"{format_ns(middle)}, longest {format_ns(longest)}"
    )


def memory_caption(points: Sequence[MemoryPoint]) -> str:
    """The peak of every device."""
    sentences = []
    for device in dict.fromkeys(point.device for point in points):
        mine = [point.bytes for point in points if point.device == device]
        sentences.append(f"{device}: from {format_bytes(mine[0])} at first to a peak of {format_bytes(max(mine))}.")
    return f"Bytes that torch's allocator holds. {' '.join(sentences)}"


def _range(shares: Sequence[float]) -> str:
    ends = format_percent(min(shares)), format_percent(max(shares))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


_CPU_NAME = (NAMES[Cause.LAUNCH], f"idle, {BETWEEN_OPERATORS}")


def chart_of_cpu(chart: Chart) -> Chart:
    """The same with the name in its legend and in what it says of each block."""
    return replace(chart, figure=json.loads(json.dumps(chart.figure).replace(*_CPU_NAME)))


_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3))
_NAMES = {
    "gap-blocking": "between collectives, blocking",
    "gap": "between collectives, other",
    **{f"idle-{cause}": name for cause, name in IDLE.items()},
}
"""By the style of :mod:`refshard.report.trace.lanes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSet:
    """The lengths of gaps of one style, in nanoseconds, none of them 0."""

    style: str
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """What they are called in a legend."""
        return _NAMES[self.style]


def gaps_of(figures: TraceFigures, timeline: Timeline) -> tuple[GapSet, ...]:
    """The gaps between collectives by whether they block, and idle gaps by cause, over the whole trace."""
    found: dict[str, list[int]] = {style: [] for style in _NAMES}
    for one in figures.collectives:
        if one.gap_ns is not None and one.gap_ns > 0:
            found["gap-blocking" if one.gap_blocking else "gap"].append(one.gap_ns)
    spans = timeline.spans
    if len(spans):
        for style, gaps in idle_styles(timeline, int(spans.starts.min()), int(spans.ends.max())):
            found[style] += (gaps.ends - gaps.starts).tolist()
    return tuple(GapSet(style=style, lengths=tuple(lengths)) for style, lengths in found.items() if lengths)


def sentence_of(sets: Sequence[GapSet]) -> str:
    """What they come to."""
    collective = [length for one in sets if one.style.startswith("gap") for length in one.lengths]
    blocking = sum(len(one.lengths) for one in sets if one.style == "gap-blocking")
    idle = [length for one in sets if not one.style.startswith("gap") for length in one.lengths]
    between = _gaps_text("gap{} between collectives", collective)
    blocks = f"; {blocking} blocking" if collective else ""
    return f"Over the whole trace. {between}{blocks}. {_gaps_text('idle gap{}', idle)}."


def edges_of(sets: Sequence[GapSet]) -> list[int]:
    """Edges of bins that hold every length, at 1, 2 and 5 times the powers of ten.

    >>> edges_of([GapSet(style="idle", lengths=(7, 30))])
    [5, 10, 20, 50]
    """
    every = [length for one in sets for length in one.lengths]
    steps = [n * 10**power for power in range(len(str(max(every))) + 1) for n in (1, 2, 5)]
    first = max(place for place, edge in enumerate(steps) if edge <= min(every))
    last = min(place for place, edge in enumerate(steps) if edge > max(every))
    return steps[first : last + 1]


def _binned(one: GapSet, edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """How many gaps each bin holds, and their nanoseconds."""
    place = np.searchsorted(edges, one.lengths, side="right") - 1
    counts = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, weights=one.lengths, minlength=len(edges) - 1)
    return counts.tolist(), [round(ns) for ns in sums.tolist()]


def gap_histogram(sets: Sequence[GapSet]) -> go.Figure:
    """How much time gaps of each length take."""
    edges = edges_of(sets)
    labels = [_between(low, high) for low, high in pairwise(edges)]
    binned = [_binned(one, edges) for one in sets]
    unit, size = _unit(max(ns for _, sums in binned for ns in sums))
    # Idle gaps have an axis of their own, for they may be a hundredth of what lies between collectives.
    above = [one.style.startswith("gap") for one in sets]
    rows = 2 if any(above) and not all(above) else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for one, (counts, sums), is_above in zip(sets, binned, above):
        bar = go.Bar(
            name=one.name,
            x=labels,
            y=[ns / size for ns in sums],
            marker=filling(SPANS[one.style]),
            customdata=[[count, format_ns(ns)] for count, ns in zip(counts, sums)],
            hovertemplate=f"%{{x}}: %{{customdata[0]}} gaps, %{{customdata[1]}} together<br>{one.name}<extra></extra>",
        )
        figure.add_trace(bar, row=1 if is_above else rows, col=1)
    figure.update_layout(template=THEME, barmode="group", height=170 + 170 * rows, showlegend=True, bargap=0.15)
    figure.update_xaxes(
        tickangle=-60, tickvals=labels, ticktext=[_short(edge) for edge in edges[:-1]], tickfont={"size": 11}
    )
    figure.update_xaxes(title_text="length of the gap, from", row=rows, col=1)
    return figure.update_yaxes(title_text=f"{unit} together", nticks=5, rangemode="tozero")


def gap_table(sets: Sequence[GapSet]) -> list[dict[str, Cell]]:
    """The same in numbers: for each bin how many gaps of each style, and their time together."""
    edges = edges_of(sets)
    binned = {one.name: _binned(one, edges) for one in sets}
    rows = list[dict[str, Cell]]()
    for place, (low, high) in enumerate(pairwise(edges)):
        row: dict[str, Cell] = {"length": _between(low, high)}
        for name, (counts, sums) in binned.items():
            row[name] = f"{counts[place]:,} ({format_ns(sums[place])})" if counts[place] else None
        rows.append(row)
    return rows


def _between(low: int, high: int) -> str:
    return f"{_short(low)} to {_short(high)}"


def _short(ns: int) -> str:
    unit, size = _unit(ns)
    return f"{ns // size} {unit}"


def _unit(ns: float) -> tuple[str, int]:
    return next(((name, size) for name, size in _UNITS if ns >= size), ("ns", 1))


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
    names = wording.job_names(figures)
    kept = sorted(range(len(figures)), key=lambda place: -mean_span(figures[place]))[:MOST_RANKS]
    shown = [figures[place] for place in sorted(kept)]
    sentence = ranks_caption(shown, len(figures), names)
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
    found = []
    for n, window in enumerate(windows):
        rows, undrawn = step_rows(timeline, figures, window)
        title = f"from the start of the {'trace' if window.step is None else 'step'}"
        extent = Extent(begin=window.begin, close=window.close, origin=window.begin, title=title)
        figure, cell = spans_figure(rows, extent, MOST_SPANS)
        sentence = timeline_caption(window.label, wording.who(figures), cell, undrawn)
        drawn = chart(f"{prefix}-timeline-{n}", f"Timeline of {window.label}", figure, sentence)
        found.append(replace(drawn, folded=n > 0))
    return tuple(found)


def charts_of(figures: TraceFigures, gaps: Sequence[GapSet], prefix: str) -> tuple[Chart, ...]:
    """The charts that this trace has data for."""
    title = "Where each step goes" if has_steps(figures) else "Where the time goes"
    drawn = [chart(f"{prefix}-steps", title, step_bars(figures), steps_caption(figures))]
    if gaps:
        histogram = chart(f"{prefix}-gaps", "Gaps", gap_histogram(gaps), sentence_of(gaps))
        drawn.append(replace(histogram, folded=True))
    if figures.memory:
        sentence = memory_caption(figures.memory)
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
    every = [split(part.breakdown) for part in wording.parts(figures)]
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
    for job, members in wording.jobs(figures).items():
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
