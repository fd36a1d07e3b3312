"""Rows of blocks over time as a figure: the timeline of a step, and the picture of a layer.

Each style in a row is one curve that steps up where a block begins and down where it ends, filled: an SVG path, however
many blocks it has, where bars would be an element each. An invisible curve in each row carries what pointing says; its
points are the blocks' ends, so that the nearest point belongs to the block under the pointer. The texts are in the
layout's ``meta`` once, and each block's code in the curve's.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from refshard.analysis.figures import TraceFigures
from refshard.events.timeline import Nanoseconds, Timeline
from refshard.quantities import axis_unit, format_ns
from refshard.report.draw.charts import THEME, Chart, chart, label_text, pattern, shortened
from refshard.report.draw.palette import BLUE, INK, SPANS, Look, dimmed
from refshard.report.trace.lanes import (
    NAMES,
    Blocks,
    Hull,
    LaneRow,
    Note,
    Ran,
    collectives_of,
    gather_of,
    hulls,
    lane_rows,
    reduction_of,
    within,
)

_ROW, _NARROW, _LABEL, _PAUSE = 24, 12, 17, 5
"""Heights in pixels: of a row, a narrow row, a lane's name, and what is left free above that."""
_AXIS, _MODES, _LEGEND = 48, 26, 26
"""And of the axis, the buttons that zoom and pan, and the legend."""
_BETWEEN = ("gap", "gap-blocking")
_LOW = 0.3
"""Of a row: how high gaps between collectives are."""
_HIGH = (1.0, 0.9)
"""Of a row: how high blocks are, in turn, so that those that touch can be told apart."""
_NUDGE = 1 / 30_000
"""Of the figure's width: how far within a block its points lie, so that none is on its neighbour's. Plotly compares
hundredths of a pixel."""
_LABELLED = ("comm", "unit", "unit-odd")
_CHARACTER = 1 / 100
"""Of the figure's width: room for a character of a label."""
_LINE, _LINES = 48, 6
"""Most characters of a line that pointing shows, and most lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The time that a figure shows at first, ``[begin, close)``, and the moment that its axis counts from."""

    begin: int
    close: int
    origin: int
    title: str


def spans_figure(rows: Sequence[LaneRow], extent: Extent, most: int) -> tuple[go.Figure, int]:
    """The figure, and the nanoseconds within which shorter blocks are drawn as one: 0 if all are drawn."""
    rows, cell = fitting(rows, most)
    unit, size = axis_unit("s", (extent.close - extent.begin) / 1e9)
    heights = [_NARROW if row.narrow else _ROW for row in rows]
    whole = sum(heights) + sum(_LABEL + _PAUSE for row in rows if row.label)
    figure, top = go.Figure(), 0
    drawer = _Drawer(figure=figure, extent=extent, size_ns=size * 1e9, texts={}, named=set())
    for place, (row, height) in enumerate(zip(rows, heights), 1):
        if row.label:
            top += _PAUSE + _LABEL
            figure.add_annotation(
                x=0, y=1 - top / whole, xref="paper", yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
                borderpad=0, font={"size": 12}, text=shortened(row.label, _LINE),
            )  # fmt: skip
        figure.layout[f"yaxis{place}"] = {
            "domain": [max(0, 1 - (top + height) / whole), 1 - top / whole], "range": [0, 1], "fixedrange": True,
            "visible": False,
        }  # fmt: skip
        drawer.add_row(row, f"y{place}")
        top += height
    figure.update_layout(
        template=THEME,
        height=whole + _MODES + _AXIS + _LEGEND,
        hovermode="x",
        hoverdistance=-1,
        meta={"texts": list(drawer.texts)},
        legend={"y": -_AXIS / whole, "yanchor": "top"},
        hoverlabel={"bgcolor": "#444444", "align": "left"},
        margin={"t": _MODES},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": BLUE},
    )
    figure.update_xaxes(
        title_text=extent.title,
        title_standoff=4,
        anchor=f"y{len(rows)}",
        range=[(end - extent.origin) / drawer.size_ns for end in (extent.begin, extent.close)],
        nticks=6,
        ticks="outside",
        ticksuffix=f" {unit}",
        hoverformat=",.7~r",
        showgrid=False,
        zeroline=False,
    )
    return figure, cell


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawer:
    """``texts`` holds what pointing says so far, by its code; ``named`` the styles that are in the legend."""

    figure: go.Figure
    extent: Extent
    size_ns: float
    texts: dict[str, int]
    named: set[str]

    def add_row(self, row: LaneRow, axis: str) -> None:
        for blocks in row.blocks:
            self._add_fills(blocks, axis)
        starts, ends = (np.concatenate([getattr(one, end) for one in row.blocks]) for end in ("starts", "ends"))
        notes = [note for one in row.blocks for note in one.notes]
        order = np.argsort(starts, kind="stable")
        nudge = _NUDGE * (self.extent.close - self.extent.begin)
        inset = np.repeat(np.minimum(nudge, (ends - starts)[order] / 4), 2) / self.size_ns
        inset[1::2] *= -1
        self.figure.add_scatter(
            x=self._x(np.stack([starts, ends], 1)[order].ravel()) + inset,
            y=np.ones(2 * len(order), np.int8),
            yaxis=axis,
            mode="none",
            showlegend=False,
            customdata=np.repeat((ends - starts)[order] / 1e9, 2).astype(np.float32),
            meta={"codes": [self.texts.setdefault(_text(notes[place]), len(self.texts)) for place in order.tolist()]},
            hovertemplate="%{text}<br>%{customdata:.3s}s<extra></extra>",
        )
        labels = [label for one in row.blocks for label in self._labels(one)]
        if labels:
            self.figure.add_scatter(
                x=[x for x, _ in labels], y=[0.5] * len(labels), yaxis=axis, mode="text", text=[t for _, t in labels],
                textfont={"size": 11}, hoverinfo="skip", showlegend=False,
            )  # fmt: skip

    def _add_fills(self, blocks: Blocks, axis: str) -> None:
        look, name = SPANS[blocks.style], NAMES.get(blocks.style)
        starts = np.maximum(blocks.starts, np.append(blocks.starts[:1], np.maximum.accumulate(blocks.ends)[:-1]))
        heights = np.zeros((len(blocks), 2), np.float32)
        heights[:, 0] = _LOW if blocks.style in _BETWEEN else np.resize(_HIGH, len(blocks))
        self.figure.add_scatter(
            x=self._x(np.stack([starts, np.maximum(starts, blocks.ends)], 1).ravel()),
            y=heights.ravel(),
            yaxis=axis,
            mode="lines",
            line={"shape": "hv", "width": 0, "color": look.colour},
            fill="tozeroy",
            fillcolor=dimmed(look.colour) if blocks.dimmed else look.colour,
            fillpattern=pattern(Look("") if blocks.dimmed else look),
            hoverinfo="skip",
            name=name,
            legendgroup=name,
            showlegend=name is not None and not blocks.dimmed and blocks.style not in self.named,
        )
        if not blocks.dimmed:
            self.named.add(blocks.style)

    def _labels(self, blocks: Blocks) -> Iterator[tuple[float, str]]:
        """The names of blocks that are wide enough, each at the middle of what is shown of it."""
        if blocks.style not in _LABELLED or blocks.dimmed:
            return
        starts, ends = (end.clip(self.extent.begin, self.extent.close) for end in (blocks.starts, blocks.ends))
        shares = (ends - starts) / (self.extent.close - self.extent.begin)
        for middle, share, (name, _) in zip(
            ((self._x(starts) + self._x(ends)) / 2).tolist(), shares.tolist(), blocks.notes
        ):
            short = name.partition(" ")[0]
            for label in (name, short):
                if share >= _CHARACTER * len(label):
                    yield middle, label_text(label)
                    break

    def _x(self, moments: Nanoseconds) -> npt.NDArray[np.float64]:
        """Places on the axis; a float would not hold nanoseconds since 1970."""
        return np.asarray((moments - self.extent.origin) / self.size_ns, np.float64)


def _text(note: Note) -> str:
    lines = [line for part in note for line in textwrap.wrap(part, _LINE)]
    return "<br>".join(label_text(line) for line in lines[:_LINES])


def fitting(rows: Sequence[LaneRow], most: int) -> tuple[Sequence[LaneRow], int]:
    """The rows with at most ``most`` blocks, if merging can reach that, and the cell in ns within which it merged."""
    cell, found = 0, rows
    longest = max((int(one.ends.max() - one.starts.min()) for row in rows for one in row.blocks), default=0)
    while sum(len(one) for row in found for one in row.blocks) > most and cell <= longest:
        cell = 2 * cell or 256
        found = [replace(row, blocks=tuple(merged(one, cell) for one in row.blocks)) for row in rows]
    return found, cell


def merged(blocks: Blocks, cell: int) -> Blocks:
    """The same with one block in place of all that begin in one cell of so many nanoseconds and are shorter."""
    short, place = blocks.ends - blocks.starts < cell, blocks.starts // cell
    heads = np.flatnonzero(np.append(True, ~(short[1:] & short[:-1] & (place[1:] == place[:-1]))))
    counts = np.diff(np.append(heads, len(blocks))).tolist()
    notes = [
        blocks.notes[head] if count == 1 else (f"{count} spans", "") for head, count in zip(heads.tolist(), counts)
    ]
    return replace(blocks, starts=blocks.starts[heads], ends=np.maximum.reduceat(blocks.ends, heads), notes=notes)


MOST_BLOCKS = 2_000
_MOST_LANES = 6
_WIDEST = 3
"""The drawing reaches at most this many times the layer's own length to either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of the timeline is drawn: a layer, and what leads to it and follows from it."""

    timeline: Timeline
    hull: Hull
    gather: Ran | None
    reduce: Ran | None
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Nanoseconds that the drawing spans."""
        return self.end - self.begin

    @property
    def before(self) -> int:
        """Nanoseconds drawn before the layer starts."""
        return self.hull.start - self.begin

    def spanning(self, before: int, after: int) -> "View":
        """The same from ``before`` to ``after`` the layer's start, ns, so that several charts share scale and zero."""
        return replace(self, begin=self.hull.start - before, end=self.hull.start + after)

    @property
    def unit(self) -> str:
        """The layer's name."""
        return self.timeline.spans.unit_names[self.hull.unit]


def find_layer(timeline: Timeline, begin: int, close: int, unit: str | None = None) -> View | None:
    """What to draw of a window; None where no span of it belongs to a known unit. ``unit`` is drawn if it is there."""
    found = hulls(timeline, begin, close)
    named = [hull for hull in found if timeline.spans.unit_names[hull.unit] == unit]
    hull = _typical(named) or _typical(found)
    if hull is None:
        return None
    gather = gather_of(timeline, hull, found, begin)
    reduce = reduction_of(timeline, hull, found, close)
    far = _WIDEST * (hull.end - hull.start)
    earliest, latest, first, last = hull.start - far, hull.end + far, hull.start, hull.end
    if gather is not None and gather.end > earliest:
        first = min(first, max(gather.start, earliest))
    if reduce is not None and reduce.start < latest:
        last = max(last, min(reduce.end, latest))
    margin = (last - first) // 24 + 1
    return View(
        timeline=timeline, hull=hull, gather=gather, reduce=reduce, begin=first - margin, end=last + margin
    )  # fmt: skip


def layer_chart(view: View, figures: TraceFigures, identity: str) -> Chart:
    """The drawing, over the extent of the view."""
    timeline, hull = view.timeline, view.hull
    spans = timeline.spans
    seen = within(spans, view.begin, view.end)
    parts = collectives_of(spans, figures.collectives)
    rows = [
        row
        for lane in _lanes(view)
        for row in lane_rows(
            spans, seen & (spans.lanes == lane), spans.lane_names[lane], figures.collectives, parts, hull.unit
        )
    ]
    noun = "kernel" if timeline.on_device else "operator"
    extent = Extent(
        begin=view.begin, close=view.end, origin=hull.start, title=f"from the start of the layer's first {noun}"
    )
    figure, _ = spans_figure(rows, extent, MOST_BLOCKS)
    title = f"The {hull.phase} of {view.unit}" if hull.phase else view.unit
    return chart(identity, title, figure, f"{_alternative(view)} Dimmed: other units.")


def _typical(found: Sequence[Hull]) -> Hull | None:
    """Of median length among the middle half of the backward hulls; of all where none is known to be backward."""
    candidates = [hull for hull in found if hull.phase == "backward" and hull.end > hull.start]
    candidates = candidates or [hull for hull in found if hull.end > hull.start]
    quarter = len(candidates) // 4
    middle = candidates[quarter : len(candidates) - quarter]
    ordered = sorted(middle, key=lambda hull: hull.end - hull.start)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _alternative(view: View) -> str:
    """When what happens, and what of the collectives is not in the drawing."""
    hull, gather, reduce = view.hull, view.gather, view.reduce
    noun = "kernel" if view.timeline.on_device else "operator"
    sentences = [f"{view.unit}: {hull.phase or 'compute'} takes {format_ns(hull.end - hull.start)}."]
    if gather is None:
        sentences.append("No all-gather precedes it.")
    else:
        sentences.append(
            f"Its all-gather takes {format_ns(gather.end - gather.start)} and ends "
            f"{_relative(gather.end - hull.start, f'its first {noun} starts')}{_undrawn(view, gather)}."
        )
    if reduce is None:
        sentences.append("No reduction of it follows.")
    else:
        sentences.append(
            f"Its reduction takes {format_ns(reduce.end - reduce.start)}, starts "
            f"{_relative(reduce.start - hull.end, f'its last {noun} ends')} and ends "
            f"{_relative(reduce.end - hull.end, 'that')}{_undrawn(view, reduce)}."
        )
    return " ".join(sentences)


def _undrawn(view: View, ran: Ran) -> str:
    """What of a collective lies beyond the drawing."""
    drawn = min(ran.end, view.end) - max(ran.start, view.begin)
    if drawn >= ran.end - ran.start:
        return ""
    if drawn <= 0:
        return ", too far away to be drawn"
    return f"; {format_ns(ran.end - ran.start - drawn)} of it are not drawn"


def _relative(ns: int, event: str) -> str:
    return f"{format_ns(abs(ns))} {'before' if ns < 0 else 'after'} {event}"


def _lanes(view: View) -> list[int]:
    """The main lane, then those on which this unit has most spans, then the others."""
    spans = view.timeline.spans
    seen = within(spans, view.begin, view.end)
    mine = np.bincount(spans.lanes[seen & (spans.units == view.hull.unit)], minlength=len(spans.lane_names))
    main = spans.main_lane()
    present = np.unique(spans.lanes[seen]).tolist()
    return sorted(present, key=lambda lane: (lane != main, -mine[lane], lane))[:_MOST_LANES]
