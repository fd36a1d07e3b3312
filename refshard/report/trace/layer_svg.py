"""One layer's backward as a drawing that needs no script: its compute, its collectives, what prepares them.

Drawn is the unit whose backward is of median length among those in the middle, from the all-gather that leads to it to
the end of its reduction, as far as these are near; what belongs to other units is dimmed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from refshard.quantities import format_ns
from refshard.report.draw.palette import STYLES
from refshard.report.trace.hulls import Hull, Ran, gather_of, hulls, reduction_of, within
from refshard.report.trace.pyramid import levels
from refshard.timeline import Kind, Timeline

WIDTH = 960
_LEFT, _RIGHT, _TOP = 8, 8, 24
_LANE, _ROW, _GAP = 16, 26, 8
MOST_BLOCKS = 1500
_MOST_LANES = 6
_WIDEST = 3
"""The drawing reaches at most this many times the layer's own length to either side."""
_NOT_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")
_KIND_ORDER = (Kind.COMPUTE, Kind.UNCLASSIFIED, Kind.COPY, Kind.PREP, Kind.COMM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A drawing of one layer's backward (of its forward and backward where the trace does not tell them apart)."""

    title: str
    alternative: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of the timeline is drawn, and how time becomes pixels: a layer, and what leads to it and follows from it."""

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

    def stretched(self, length: int) -> "View":
        """The same over ``length`` nanoseconds, so that several drawings have one scale."""
        return replace(self, end=self.begin + length)

    @property
    def unit(self) -> str:
        """The layer's name."""
        return self.timeline.spans.unit_names[self.hull.unit]

    def x(self, ns: float) -> float:
        """Pixels from the left, of a moment in the drawing or of its nearer end."""
        clipped = min(max(ns, self.begin), self.end)
        return _LEFT + (clipped - self.begin) / (self.end - self.begin) * (WIDTH - _LEFT - _RIGHT)


def draw_layer(timeline: Timeline, begin: int, close: int) -> Layer | None:
    """The drawing; None where no span of the window belongs to a known unit."""
    view = find_layer(timeline, begin, close)
    return None if view is None else draw(view)


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


def draw(view: View, most_blocks: int = MOST_BLOCKS) -> Layer:
    """The drawing, of at most ``most_blocks`` of a kind on a lane where merging can reach that."""
    return Layer(
        title=f"The {view.hull.phase} of {view.unit}" if view.hull.phase else view.unit,
        alternative=_alternative(view, view.gather, view.reduce),
        svg="".join(_svg(view, most_blocks)),
    )


def _typical(found: Sequence[Hull]) -> Hull | None:
    """Of median length among the middle half of the backward hulls; of all where none is known to be backward."""
    candidates = [hull for hull in found if hull.phase == "backward" and hull.end > hull.start]
    candidates = candidates or [hull for hull in found if hull.end > hull.start]
    quarter = len(candidates) // 4
    middle = candidates[quarter : len(candidates) - quarter]
    ordered = sorted(middle, key=lambda hull: hull.end - hull.start)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _alternative(view: View, gather: Ran | None, reduce: Ran | None) -> str:
    """When what happens, and what of the collectives is not in the drawing."""
    hull = view.hull
    noun = "kernel" if view.timeline.on_device else "operator"
    told = [f"{view.unit}: {hull.phase or 'compute'} takes {format_ns(hull.end - hull.start)}."]
    if gather is None:
        told.append("No all-gather of it leads to this.")
    else:
        told.append(
            f"Its all-gather takes {format_ns(gather.end - gather.start)} and ends "
            f"{_relative(gather.end - hull.start, f'its first {noun} starts')}{_undrawn(view, gather)}."
        )
    if reduce is None:
        told.append("No reduction of it follows.")
    else:
        told.append(
            f"Its reduction takes {format_ns(reduce.end - reduce.start)}, starts "
            f"{_relative(reduce.start - hull.end, f'its last {noun} ends')} and ends "
            f"{_relative(reduce.end - hull.end, 'that')}{_undrawn(view, reduce)}."
        )
    return " ".join(told)


def _undrawn(view: View, ran: Ran) -> str:
    """What of a collective lies beyond the drawing."""
    drawn = min(ran.end, view.end) - max(ran.start, view.begin)
    if drawn >= ran.end - ran.start:
        return ""
    if drawn <= 0:
        return ", too far away to be drawn"
    return f"; {format_ns(ran.end - ran.start - drawn)} of it lie beyond the drawing"


def _relative(ns: int, event: str) -> str:
    return f"{format_ns(abs(ns))} {'before' if ns < 0 else 'after'} {event}"


def _svg(view: View, most_blocks: int) -> Iterator[str]:
    lanes = _lanes(view)
    height = _TOP + len(lanes) * (_LANE + _ROW + _GAP) + 4
    yield (
        f'<svg class="layer" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" aria-hidden="true" focusable="false">'
    )
    yield from _axis(view, height)
    for place, lane in enumerate(lanes):
        top = _TOP + place * (_LANE + _ROW + _GAP)
        label = view.timeline.spans.lane_names[lane]
        yield f'<text class="lane" x="{_LEFT}" y="{top + 12}">{_xml(label)}</text>'
        yield from _lane(view, lane, top + _LANE, most_blocks)
    yield "</svg>"


def _lanes(view: View) -> list[int]:
    """The main lane, then those on which this unit has most spans, then the others."""
    spans = view.timeline.spans
    seen = within(spans, view.begin, view.end)
    mine = np.bincount(spans.lanes[seen & (spans.units == view.hull.unit)], minlength=len(spans.lane_names))
    main = spans.main_lane()
    present = np.unique(spans.lanes[seen]).tolist()
    return sorted(present, key=lambda lane: (lane != main, -mine[lane], lane))[:_MOST_LANES]


def _axis(view: View, height: int) -> Iterator[str]:
    """Time from the layer's first kernel."""
    step = _round_step((view.end - view.begin) / 8)
    first = -int((view.hull.start - view.begin) // step)
    for n in range(first, int((view.end - view.hull.start) // step) + 1):
        x = view.x(view.hull.start + n * step)
        label = format_ns(n * step)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}"/>'
        anchor = "start" if x < 40 else "end" if x > WIDTH - 60 else "middle"
        yield f'<text class="time" x="{x:.1f}" y="12" text-anchor="{anchor}">{label}</text>'


def _round_step(least: float) -> int:
    """The next of 1, 2, 5, 10, ... nanoseconds."""
    power = 10 ** int(np.floor(np.log10(max(least, 1))))
    return int(next(power * n for n in (1, 2, 5, 10) if power * n >= least))


def _lane(view: View, lane: int, top: int, most_blocks: int) -> Iterator[str]:
    """Blocks of this unit on top of the dimmed ones of others, under a pixel's width merged."""
    spans = view.timeline.spans
    seen = within(spans, view.begin, view.end) & (spans.lanes == lane)
    own = spans.units == view.hull.unit
    for mine in (False, True):
        for kind in _KIND_ORDER:
            rows = np.flatnonzero(seen & (own == mine) & spans.of_kind(kind))
            if not len(rows):
                continue
            made = levels(
                np.zeros(len(rows), np.int32), spans.starts[rows], spans.ends[rows],
                length=view.end - view.begin, most=most_blocks,
            )  # fmt: skip
            pixel = (view.end - view.begin) / (WIDTH - _LEFT - _RIGHT)
            level = max((one for one in made if one.resolution <= pixel), key=lambda o: o.resolution, default=made[0])
            for start, end, first, count in zip(level.starts, level.ends, level.firsts, level.counts):
                row = int(rows[first])
                name = spans.name_table[spans.names[row]] if count == 1 else f"{count} spans"
                yield _block(view, kind, mine, name, int(start), int(end), top)


def _block(view: View, kind: Kind, mine: bool, name: str, start: int, end: int, top: int) -> str:
    style = STYLES[kind.value]
    x = view.x(start)
    width = max(view.x(end) - x, 0.5)
    dimmed = "" if mine else ' class="other"'
    title = _xml(f"{name}: {format_ns(end - start)} ({style.label})")
    rect = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}"'
    hatch = f'<rect {rect} fill="url(#hatch-{kind.value})"/>' if style.pattern and width > 3 else ""
    label = _fitting(name, width)
    text = (
        f'<text x="{x + 4:.1f}" y="{top + 17}" fill="{style.ink}">{_xml(label)}</text>' if mine and label else ""
    )  # fmt: skip
    backing = (
        f'<rect x="{x + 2:.1f}" y="{top + 5}" width="{len(label) * 6.4 + 4:.1f}" height="16" fill="{style.colour}"/>'
        if text and hatch else ""
    )  # fmt: skip
    return f'<g{dimmed}><title>{title}</title><rect {rect} fill="{style.colour}"/>{hatch}{backing}{text}</g>'


def _fitting(name: str, width: float) -> str:
    """As much of a name as fits, without what every kernel's begins with; nothing where that says nothing."""
    plain = name.removeprefix("void ").removeprefix("gloo:").removeprefix("emulated:")
    short = plain.partition("<")[0].partition("(")[0] or name
    room = int((width - 10) / 6.4)
    return short if len(short) <= room else f"{short[: room - 1]}…" if room >= 5 else ""


def _xml(text: str) -> str:
    """Text as XML may hold it: escaped, and without the control characters that it forbids."""
    kept = "".join(c if c >= " " and not _NOT_XML.match(c) else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(kept, quote=True)
