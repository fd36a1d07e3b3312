"""What all charts share: stacked bars, and looks that can be told apart."""

import json

import pytest

from refshard.report.draw import palette
from refshard.report.draw.charts import Bar, Row, chart, stacked
from refshard.report.draw.palette import Look, look
from tests.report.runs import HOSTILE

GIB = 2**30


def test_stacked_bars_hold_each_part_in_the_unit_of_the_longest() -> None:
    bars = [
        Bar(place=1, name="a", parts={"x": 1.0 * GIB, "y": 3.0 * GIB}),
        Bar(place=2, name="b", parts={"x": 0.5 * GIB, "y": 0.0}),
    ]
    rows = [Row(text="<b>both</b>"), Row(text="a", case=0), Row(text="b", case=1)]
    figure = stacked(rows, bars, {"x": look(0), "y": look(1), "nowhere": look(2)}, "B", "per rank")
    assert [(bar.name, bar.x, bar.y) for bar in figure.data] == [("x", (1, 0.5), (1, 2)), ("y", (3, 0), (1, 2))]
    assert figure.data[1].customdata[0] == "a<br>y: 3.00 GiB, 75.0 %"
    assert figure.layout.xaxis.title.text == "GiB per rank"
    assert figure.layout.barmode == "stack"
    assert list(figure.layout.yaxis.ticktext) == ["<b>both</b>", "a", "b"]


def test_names_of_bars_and_parts_stay_text() -> None:
    figure = stacked([Row(text="row")], [Bar(place=0, name=HOSTILE, parts={HOSTILE: 1.0})], {HOSTILE: look(0)}, "s", "")
    drawn = json.dumps(chart("c", "t", figure, "a").figure)
    assert "&lt;script" in drawn
    assert "<script" not in drawn
    assert "<img" not in drawn


def test_a_chart_leaves_its_theme_to_the_page_and_knows_its_height() -> None:
    found = chart("c", "t", stacked([Row(text="a")], [], {}, "s", ""), "a")
    assert "template" not in found.figure["layout"]
    assert found.height_px == found.figure["layout"]["height"] > 0


@pytest.mark.parametrize("looks", [palette.MEMORY, palette.SPANS, palette.STEP])
def test_what_differs_in_colour_differs_in_its_pattern_or_is_plain_grey(looks: dict[str, Look]) -> None:
    """``unit`` and ``unit-odd`` are one thing; ``gap`` is lower than others, ``idle`` never beside its causes."""
    chosen = [one for name, one in looks.items() if not name.startswith(("unit", "gap", "idle"))]
    assert len({one.pattern for one in chosen}) == len({one.colour for one in chosen})


def test_as_many_parts_as_a_plan_has_look_different() -> None:
    assert len({look(place) for place in range(20)}) == 20
