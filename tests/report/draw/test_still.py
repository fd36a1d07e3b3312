"""Drawings for browsers without scripts say what plotly's do."""

import re
from xml.etree import ElementTree as ET

import pytest

from refshard.analysis.evidence import gather
from refshard.report.draw.charts import Chart, label_text
from refshard.report.draw.still import WIDTH, hatches, still
from refshard.report.run import charts
from refshard.report.run.losses import losses
from refshard.report.run.memory import memory
from refshard.report.run.scaling import scalings
from tests.report.run.test_scaling import RATES, scaled
from tests.report.runs import CASES, HOSTILE, run

EVIDENCE = gather(run())
SETTING = EVIDENCE.settings[0]


def every() -> list[Chart]:
    curves, remembered = losses(EVIDENCE.trainings[0], "t"), memory(SETTING, "s")
    assert curves is not None
    assert remembered is not None
    (scaling,) = scalings(gather(scaled(RATES)))
    bars = charts.bar_charts(SETTING, "s").values()
    return [
        *bars,
        charts.breakdown_chart(SETTING, "s"),
        remembered.parts,
        remembered.steps,
        curves.chart,
        scaling.chart,
    ]


@pytest.mark.parametrize("chart", every(), ids=lambda chart: chart.id)
def test_every_name_and_every_curve_is_there(chart: Chart) -> None:
    drawing = ET.fromstring(chart.still)
    texts = {text.text for text in drawing.iter("text")}
    traces, rows = chart.figure["data"], (chart.figure["layout"].get("meta") or {}).get("rows", [])
    assert {re.sub("</?b>", "", row["text"]) for row in rows} <= texts
    if chart.figure["layout"].get("showlegend"):
        assert {trace["name"] for trace in traces} <= texts
    assert not re.search(r"\bnan\b|\binf\b", chart.still)


def test_bars_are_as_long_as_they_say() -> None:
    chart = charts.bar_charts(SETTING, "s")["peak_memory_bytes"]
    widths = [
        float(box.get("width", 0)) for box in ET.fromstring(chart.still).iter("rect") if box.get("fill", "")[0] == "#"
    ]
    values = [value for trace in chart.figure["data"][:-1] for value in trace["x"]]
    assert [width / widths[0] for width in widths] == pytest.approx([value / values[0] for value in values], rel=1e-2)


def test_an_interval_is_drawn_around_its_bars_end() -> None:
    chart = charts.bar_charts(SETTING, "s")["step_time_s"]
    drawing = ET.fromstring(chart.still)
    whiskers = [path for path in drawing.iter("path") if path.get("class") == "error"]
    boxes = [box for box in drawing.iter("rect") if box.get("fill", "")[0] == "#"]
    assert len(whiskers) == len(boxes) == len(CASES)
    for whisker, box in zip(whiskers, boxes):
        low, high = map(float, re.findall(r"[MH]([\d.]+)", whisker.get("d", "")))
        end = float(box.get("x", 0)) + float(box.get("width", 0))
        assert low < end < high


def test_a_mark_past_all_bars_stays_in_the_drawing() -> None:
    mark = {
        "type": "scatter",
        "name": "measured",
        "mode": "markers",
        "x": [3.0],
        "y": [0],
        "marker": {"symbol": "line-ns"},
    }
    bar = {"type": "bar", "name": "part", "x": [1.0], "y": [0], "marker": {"color": "#000000"}}
    drawing = still({"data": [bar, mark], "layout": {"meta": {"rows": [{"text": "a", "case": 0}]}, "barmode": "stack"}})
    (x,) = [float(found) for found in re.findall(r"translate\(([\d.]+)", drawing)]
    assert x < WIDTH


def test_ticks_that_have_names_show_them() -> None:
    trace = {"type": "scatter", "name": "a", "x": [0, 1], "y": [1.0, 2.0], "mode": "lines"}
    drawing = still({"data": [trace], "layout": {"xaxis": {"tickvals": [0, 1], "ticktext": ["first", "second"]}}})
    assert {"first", "second"} <= {text.text for text in ET.fromstring(drawing).iter("text")}


def test_hatches_that_bars_wear_are_defined() -> None:
    worn = {url for chart in every() for url in re.findall(r"url\(#(still-\d+)\)", chart.still)}
    assert worn
    assert worn <= set(re.findall(r'id="(still-\d+)"', hatches()))


def test_hostile_names_stay_text() -> None:
    name = label_text(HOSTILE)
    row = {"text": name, "case": 0}
    bars = {
        "data": [
            {"type": "bar", "name": name, "x": [1.0], "y": [0], "marker": {"color": "#000000"}, "customdata": [name]}
        ],
        "layout": {"meta": {"rows": [row]}, "showlegend": True, "barmode": "stack"},
    }
    curve = {"type": "scatter", "name": name, "x": [1, 2], "y": [1.0, None], "mode": "lines+markers"}
    for figure in (bars, {"data": [curve], "layout": {"xaxis": {"title": {"text": name}}}}):
        drawing = still(figure)
        assert "<script" not in drawing
        assert HOSTILE in {text.text for text in ET.fromstring(drawing).iter("text")}


@pytest.mark.parametrize("values", [[5.0], [3.0, 3.0], [0.0, 0.0], []])
def test_a_curve_of_one_level_or_of_nothing_can_be_drawn(values: list[float]) -> None:
    trace = {"type": "scatter", "name": "a", "x": list(range(1, len(values) + 1)), "y": values, "mode": "lines"}
    for kind in ("linear", "log"):
        ET.fromstring(still({"data": [trace], "layout": {"xaxis": {"type": kind}}}))
