"""One layer's backward: its compute, its collectives, what prepares them.

Drawn is the unit whose backward is of median length among those in the middle, from the all-gather that leads to it to
the end of its reduction, as far as these are near; what belongs to other units is dimmed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refshard.events.timeline import Timeline
from refshard.quantities import format_ns
from refshard.report.draw.charts import Chart, chart
from refshard.report.trace.details import collectives_of
from refshard.report.trace.hulls import Hull, Ran, gather_of, hulls, reduction_of, within
from refshard.report.trace.lanes import lane_rows
from refshard.report.trace.spans_figure import Extent, spans_figure
from refshard.tracing.figures import TraceFigures

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
    told = [f"{view.unit}: {hull.phase or 'compute'} takes {format_ns(hull.end - hull.start)}."]
    if gather is None:
        told.append("No all-gather precedes it.")
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
