"""Step time against memory: the front, the limit, ties and wide ranges, on points whose answers are known."""

from collections.abc import Sequence
from typing import Any

import pytest

from refshard.quantities import GIB
from refshard.report.draw.tradeoff import Frame, Point, front, shows_limit, tradeoff_figure


def points(*places: tuple[float, float]) -> list[Point]:
    """Points at these memories, GiB, and times, s; named by their order."""
    return [
        Point(name=f"p{n}", time=time, memory=memory * GIB, tip="", colour="#000000", place=n, number=n)
        for n, (memory, time) in enumerate(places)
    ]


def drawn(found: Sequence[Point], frame: Frame) -> Any:
    return tradeoff_figure(found, frame).layout


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    found = front(points((40, 1.0), (50, 0.9), (45, 1.1), (50, 0.95), (60, 0.9)))
    assert [point.name for point in found] == ["p0", "p1"]


def test_a_near_limit_is_drawn_and_stretches_the_axis() -> None:
    found = points((40, 1.0), (50, 0.9))
    near, far = (Frame(memory="memory", limit=limit * GIB, limit_text=f"{limit} GiB") for limit in (78, 140))
    assert shows_limit(found, near)
    layout = drawn(found, near)
    assert [(shape.name, shape.x0) for shape in layout.shapes] == [("limit", 78)]
    assert layout.xaxis.range[1] > 78
    (label,) = layout.annotations
    assert (label.text, label.y, label.yanchor) == ("limit: 78 GiB", 1, "bottom"), "above the chart, clear of points"
    assert not shows_limit(found, far)
    assert not drawn(found, far).shapes
    assert drawn(found, far).xaxis.range[1] < 60


def test_memories_far_apart_stand_on_a_logarithmic_axis() -> None:
    layout = drawn(points((0.07, 1.0), (2, 0.9)), Frame(memory="memory"))
    assert layout.xaxis.type == "log"
    assert list(layout.xaxis.ticktext) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert drawn(points((40, 1.0), (50, 0.9)), Frame(memory="memory")).xaxis.type == "linear"


def test_ties_are_shaded_from_the_fastest_on() -> None:
    (shape,) = drawn(points((40, 1.0), (50, 0.9)), Frame(memory="memory", tie=0.927)).shapes
    assert (shape.name, shape.y0, shape.y1) == ("tie", pytest.approx(0.9), pytest.approx(0.927))


def test_intervals_are_error_bars_and_within_the_axis() -> None:
    measured = Point(name="a", time=1.0, low=0.8, high=1.5, memory=GIB, tip="", colour="#000000", place=0)
    figure = tradeoff_figure([measured], Frame(memory="memory"))
    (trace,) = [trace for trace in figure.data if trace.error_y.array is not None]
    assert [*trace.error_y.array, *trace.error_y.arrayminus] == pytest.approx([0.5, 0.2])
    low, high = figure.layout.yaxis.range
    assert low < 0.8
    assert high > 1.5


def test_dry_runs_are_hollow_and_have_no_label() -> None:
    figure = tradeoff_figure(points((40, 1.0)), Frame(memory="memory"), points((41, 1.1)))
    hollow, filled = figure.data[1:]
    assert (hollow.mode, filled.mode) == ("markers", "markers+text")
    assert hollow.marker.symbol == ("circle-open",)
