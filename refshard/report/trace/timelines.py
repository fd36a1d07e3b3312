"""A timeline as pages show it: some of its steps, drawn at every level of detail, and what a reader must know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refshard.report.trace import words as trace_words
from refshard.report.trace.encode import encode
from refshard.report.trace.lanes import Window, draw_step
from refshard.timeline import Timeline
from refshard.tracing.figures import TraceFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One step as the timeline shows it: ``data`` is for the script, ``name`` on its button, ``label`` in sentences."""

    id: str
    name: str
    label: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """What the macro ``timeline`` of ``dashboards/macros.html.j2`` lays out.

    ``steps`` are those that can be chosen; ``whole`` is what one of them is called. ``present`` are the styles that
    occur, of :data:`refshard.report.draw.palette.STYLES`. Spans closer than ``finest_ns`` are drawn as one.
    """

    id: str
    who: str
    steps: tuple[DrawnStep, ...]
    whole: str
    present: frozenset[str]
    finest_ns: int
    undrawn_lanes: int


def view_timeline(
    timeline: Timeline, figures: TraceFigures, windows: Sequence[Window], identity: str, most: int
) -> TimelineView:
    """The windows drawn, of ``most`` blocks together at full detail; ids in the page begin with ``identity``."""
    drawings = [draw_step(timeline, figures, window, most // len(windows)) for window in windows]
    return TimelineView(
        id=identity,
        who=trace_words.who(figures),
        steps=tuple(
            DrawnStep(id=f"{identity}-drawing-{n}", name=window.name, label=window.label, data=encode(drawing))
            for n, (window, drawing) in enumerate(zip(windows, drawings))
        ),
        whole="step" if trace_words.has_steps(figures) else "trace",
        present=frozenset(group.style for drawing in drawings for group in drawing.groups),
        finest_ns=max((drawing.levels[0].resolution for drawing in drawings), default=0),
        undrawn_lanes=max((drawing.undrawn_lanes for drawing in drawings), default=0),
    )
