"""How long the device idles at a time, and the streams of collectives between two of them: by bins, weighed by time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from refshard.events.timeline import Timeline
from refshard.quantities import format_ns
from refshard.report.blocks import Cell
from refshard.report.draw.charts import THEME, filling
from refshard.report.draw.palette import SPANS
from refshard.report.trace import captions as trace_captions
from refshard.report.trace.idle import NAMES as IDLE
from refshard.report.trace.lanes import idle_styles
from refshard.tracing.figures import TraceFigures

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
    return trace_captions.gaps(collective, blocking, idle)


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
