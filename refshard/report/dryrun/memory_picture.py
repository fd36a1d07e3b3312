"""Charts of memory over a dry run: allocated bytes stacked by category, reserved bytes, and what the GPU has."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import MemoryCourse, call_clock, gpu_clock, memory_course
from refshard.dryrun.phases import OUTSIDE
from refshard.dryrun.recording import Category, Kind, Phase, Recording
from refshard.dryrun.steps import steps_of
from refshard.quantities import axis_unit, format_bytes
from refshard.report.draw.charts import THEME, Chart, chart, pattern, shortened
from refshard.report.draw.palette import INK, MEMORY, RED
from refshard.report.dryrun.answer import moment
from refshard.report.dryrun.categories import CATEGORIES

_GREYS = {Phase.FORWARD: 0.12, Phase.BACKWARD: 0.3, Phase.OPTIMIZER: 0.55}
"""How dark each phase is in the strip above the picture."""
_OWN_GREYS = (0.12, 0.3, 0.55, 0.2, 0.42)
"""Likewise of phases that the script annotates."""
_STRIP = (0.94, 1.0)
_HEADROOM = 1.22
"""Room above the highest line: for the strip, and for the label of a phase too short to hold it."""
_FAR = 4
"""A limit this many times the reserved memory is not drawn: it would flatten the picture."""
_NARROW = 0.16
"""Share of the picture that a phase's name takes on a phone."""
_MOST_RUNS = 200
_MOST_CHARACTERS = 44
_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the strip, between two places of the clock."""

    name: str
    begin: int
    end: int
    grey: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What a course goes along: ``unit`` places of its clock are 1 on the axis, which counts from the course's first.

    ``name`` is what follows a number on it. ``marks`` are places for dotted lines.
    """

    title: str
    name: str
    unit: int
    marks: tuple[int, ...] = ()


def memory_charts(found: Analysis) -> list[Chart]:
    """Memory over the last whole step; also over the whole run, if the script's phases are accounted, and unless that
    step has the peak and the job fits.
    """
    recording, step = found.run.recording, found.step
    if not found.memory.peak_bytes:
        return []
    charts = []
    if step is not None:
        clock = gpu_clock(recording, found.replayed)
        course = memory_course(recording, found.memory, clock, first=step.first, end=step.end)
        unit, size = axis_unit("s", (course.places[-1] - course.places[0]) / 1e9)
        caption = (
            f"{_caption(found, course, f'Step {step.number} (the last)')} Time is GPU time: each change is drawn where "
            "the compute stream has finished everything launched before it. The script allocates earlier, in the "
            "same order."
        )
        axis = Axis(title=f"GPU time in the step ({unit})", name=unit, unit=round(size * 1e9))
        drawn = picture(recording, course, axis, found.usable_bytes)
        charts.append(chart("memory-step", "Over the last step", drawn, caption))
        if found.fits and not found.phases and course.peak_bytes == found.memory.peak_bytes:
            return charts
    return [*charts, _run_chart(found)]


def _run_chart(found: Analysis) -> Chart:
    recording, clock = found.run.recording, call_clock(found.run.recording)
    course = memory_course(recording, found.memory, clock, first=0, end=_end(found))
    marks = tuple(int(clock[step.end]) for step in steps_of(recording, "step")) if found.step else ()
    axis = Axis(
        title=f"allocations and frees{'; dotted: a step ends' if marks else ''}", name="calls", unit=1,
        marks=marks,
    )  # fmt: skip
    ends = {"oom": " It ends where memory ran out.", "failed": " It ends where the script failed."}
    caption = _caption(found, course, "The whole run") + ends.get(found.run.answer.outcome, "")
    greys = dict(zip((one.name for one in found.phases), cycle(_OWN_GREYS)))
    own = [
        _Piece(one.name, int(clock[one.first]), int(clock[one.end]), greys[one.name])
        for phase in found.phases for one in phase.ranges if one.name != OUTSIDE
    ]  # fmt: skip
    drawn = picture(recording, course, axis, found.usable_bytes, own)
    return chart("memory-run", "Over the whole run", drawn, caption)


def _end(found: Analysis) -> int:
    """The end of the run; if the run failed, the last event before it freed its memory."""
    recording = found.run.recording
    if found.run.answer.outcome in ("stepped", "ended"):
        return len(recording)
    return int(np.flatnonzero(recording.kinds != Kind.FREE)[-1]) + 1


def _caption(found: Analysis, course: MemoryCourse, what: str) -> str:
    """The picture in words."""
    at_peak = course.held[course.peak]
    order = sorted(Category, key=lambda category: -at_peak[category])[:_NAMED]
    most = ", ".join(f"{CATEGORIES[one]} {format_bytes(int(at_peak[one]))}" for one in order if at_peak[one])
    when = moment(found.run.recording, int(course.counts[course.peak]) - 1)
    return (
        f"{what}: memory peaks {when}, with {format_bytes(course.peak_bytes)} allocated (largest: {most}). At most "
        f"{format_bytes(course.peak_reserved_bytes)} of {format_bytes(found.usable_bytes)} usable are reserved."
    )


def picture(
    recording: Recording, course: MemoryCourse, axis: Axis, usable_bytes: int, pieces: Sequence[_Piece] = ()
) -> go.Figure:
    """A course of ``recording``. The allocator cannot pass ``usable_bytes``, a line unless it is far above. The strip
    shows ``pieces``, by default forward, backward and the optimizer's step.
    """
    shown = course.peak_reserved_bytes >= usable_bytes / _FAR
    highest = max(course.peak_reserved_bytes, course.peak_bytes, usable_bytes if shown else 0, 1)
    unit, size = axis_unit("B", highest)
    xs = [_x(place, course, axis) for place in course.places.tolist()]
    figure = go.Figure([*_stack(course, xs, unit, size), *_lines(recording, course, xs, unit, size)])
    _add_phases(figure, course, axis, pieces or _parts_of_step(course))
    for mark in axis.marks:
        figure.add_shape(_line(_x(mark, course, axis)))
    top = _HEADROOM * highest / size
    limit = usable_bytes / size if shown else None
    if limit is not None:
        is_late = xs[course.peak] > xs[-1] / 2
        _add_limit(figure, limit, f"usable: {format_bytes(usable_bytes)}", "left" if is_late else "right")
    _add_peak(figure, course, xs, size, _label_height(course, size, top, limit))
    figure.update_layout(template=THEME, height=460, showlegend=True, hovermode="x unified")
    figure.update_xaxes(
        title_text=axis.title, nticks=6, range=[0, xs[-1] or 1],
        unifiedhovertitle={"text": f"%{{x:,.4~r}} {axis.name}"},
    )  # fmt: skip
    return figure.update_yaxes(title_text=unit, range=[0, top], nticks=7)


def _x(place: int, course: MemoryCourse, axis: Axis) -> float:
    return float(f"{(place - int(course.places[0])) / axis.unit:.6g}")


def _stack(course: MemoryCourse, xs: list[float], unit: str, size: float) -> list[go.Scatter]:
    """A band for each category that ever holds anything."""
    return [
        go.Scatter(
            name=CATEGORIES[category],
            x=xs,
            y=_scaled(course.held[:, category].tolist(), size),
            mode="lines",
            stackgroup="held",
            line={"shape": "hv", "width": 0, "color": look.colour},
            fillcolor=look.colour,
            fillpattern=pattern(look),
            hovertemplate=f"%{{y:.2f}} {unit}",
        )
        for category, look in ((Category[name.upper()], look) for name, look in MEMORY.items())
        if course.held[:, category].any()
    ]  # fmt: skip


def _lines(recording: Recording, course: MemoryCourse, xs: list[float], unit: str, size: float) -> list[go.Scatter]:
    """What is allocated, which the stack shows already and which carries the moments; and what is reserved."""
    line = {"shape": "hv", "color": INK}
    return [
        go.Scatter(
            name="allocated", x=xs, y=_scaled(course.allocated.tolist(), size), mode="lines", showlegend=False,
            line={**line, "width": 1},
            customdata=[shortened(moment(recording, count - 1), _MOST_CHARACTERS) for count in course.counts.tolist()],
            hovertemplate=f"%{{y:.2f}} {unit}<br>%{{customdata}}",
        ),
        go.Scatter(
            name="reserved", x=xs, y=_scaled(course.reserved.tolist(), size), mode="lines", line={**line, "width": 2.5},
            hovertemplate=f"%{{y:.2f}} {unit}",
        ),
    ]  # fmt: skip


def _scaled(values: Sequence[int], size: float) -> list[float]:
    return [float(f"{value / size:.5g}") for value in values]


def _line(x: float) -> dict[str, Any]:
    return {
        "type": "line", "x0": x, "x1": x, "y0": 0, "y1": _STRIP[0], "yref": "paper",
        "line": {"dash": "dot", "width": 1, "color": INK},
    }  # fmt: skip


def _parts_of_step(course: MemoryCourse) -> list[_Piece]:
    return [_Piece(run.phase.name.lower(), run.begin, run.end, _GREYS[run.phase]) for run in course.phases]


def _add_phases(figure: go.Figure, course: MemoryCourse, axis: Axis, pieces: Sequence[_Piece]) -> None:
    """A strip of all phases, with their names in the pieces that are long enough."""
    whole = _x(int(course.places[-1]), course, axis)
    extents = [(one, _x(one.begin, course, axis), _x(one.end, course, axis)) for one in pieces[:_MOST_RUNS]]
    for piece, begin, end in extents:
        grey = f"rgba(128,128,128,{piece.grey})"
        figure.add_shape(
            type="rect", x0=begin, x1=end, y0=_STRIP[0], y1=_STRIP[1], yref="paper", fillcolor=grey, line={"width": 0}
        )
    named = {"yref": "paper", "showarrow": False, "font": {"size": 11}, "borderpad": 1}
    wide = [(one.name, (begin + end) / 2) for one, begin, end in extents if end - begin >= _NARROW * whole]
    for name, middle in wide:
        figure.add_annotation(
            x=middle, y=sum(_STRIP) / 2, yanchor="middle", text=shortened(name, _MOST_CHARACTERS), **named
        )
    below: list[float] = []
    for name in dict.fromkeys(one.name for one, _, _ in extents if one.name not in dict(wide)):
        length, begin = max((end - begin, begin) for one, begin, end in extents if one.name == name)
        late = begin > whole / 2
        x = begin + length if late else begin
        if all(abs(x - other) >= _NARROW * whole for other in below):
            below.append(x)
            figure.add_annotation(
                x=x,
                y=_STRIP[0],
                xanchor="right" if late else "left",
                yanchor="top",
                text=shortened(name, _MOST_CHARACTERS),
                **named,
            )


def _add_limit(figure: go.Figure, y: float, text: str, side: Literal["left", "right"]) -> None:
    """A line, with its name where the peak's label is not."""
    figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=y, y1=y, line={"dash": "dash", "width": 2, "color": RED})
    figure.add_annotation(
        x=int(side == "right"), xref="paper", xanchor=side, xshift=-4 if side == "right" else 4, y=y, yanchor="bottom",
        showarrow=False, text=text,
    )  # fmt: skip


def _label_height(course: MemoryCourse, size: float, top: float, limit: float | None) -> float:
    """Where the label of the peak stands: above the line of what is reserved, and not on that of the limit."""
    above = max(int(course.reserved[course.peak]), course.peak_bytes) / size + 0.05 * top
    if limit is not None and abs(above + 0.03 * top - limit) < 0.05 * top:
        return limit + 0.02 * top
    return above


def _add_peak(figure: go.Figure, course: MemoryCourse, xs: list[float], size: float, label: float) -> None:
    """An arrow to it from ``label``."""
    x, whole = xs[course.peak], xs[-1] or 1
    side = "left" if x < 0.2 * whole else "right" if x > 0.8 * whole else "center"
    figure.add_annotation(
        x=x, y=course.peak_bytes / size, text=f"<b>peak: {format_bytes(course.peak_bytes)}</b>", xanchor=side,
        showarrow=True, arrowhead=2, arrowwidth=1.5, arrowcolor=INK, ax=0, ay=label, ayref="y", yanchor="bottom",
        borderpad=0,
    )  # fmt: skip
