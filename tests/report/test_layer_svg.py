"""The drawing of one layer: well-formed, in words too, and dimmed where it belongs to others."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from refshard.report.layer_svg import Layer, draw_layer
from refshard.timeline import Timeline
from tests.report import traces

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\x00\x1f"


def layer_of(timeline: Timeline) -> Layer:
    window = timeline.windows[0]
    layer = draw_layer(timeline, window.start, window.end)
    assert layer is not None
    return layer


def texts(layer: Layer) -> list[str]:
    return [element.text or "" for element in ET.fromstring(layer.svg).iter(f"{SVG}text")]


def test_the_layers_kernels_and_collectives_are_told_by_name() -> None:
    layer = layer_of(traces.gpu())
    assert layer.title == "The backward of model.layers.12"
    told = texts(layer)
    assert "stream 7" in told
    assert "stream 20" in told
    assert any(text.startswith("ncclDevKernel_All") for text in told)
    assert any(text.startswith("ncclDevKernel_Reduce") for text in told)
    assert "0 s" in told


def test_what_belongs_to_other_units_is_dimmed_and_unnamed() -> None:
    root = ET.fromstring(layer_of(traces.gpu()).svg)
    groups = root.findall(f"{SVG}g")
    dimmed = [group for group in groups if group.get("class") == "other"]
    assert 0 < len(dimmed) < len(groups)
    assert not any(group.findall(f"{SVG}text") for group in dimmed)
    own = [group.findtext(f"{SVG}title") or "" for group in groups if group.get("class") is None]
    assert sum("ReduceScatter" in title for title in own) == 1
    assert sum("AllGather" in title for title in own) == 1
    assert sum("preparation" in title for title in own) == 1
    assert sum("(compute)" in title for title in own) == 24


def test_its_sentence_says_when_the_collectives_run() -> None:
    layer = layer_of(traces.gpu(layers=5))
    unit = layer.title.rpartition(" ")[2]
    assert f"{unit}: backward takes " in layer.alternative
    assert "Its all-gather takes 700 us and ends " in layer.alternative
    assert "Its reduction takes 1.10 ms and starts " in layer.alternative


def test_hostile_names_leave_it_well_formed() -> None:
    layer = layer_of(traces.renamed(traces.gpu(layers=4), HOSTILE))
    root = ET.fromstring(layer.svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "g", "rect", "text", "title", "line"}
    assert any("<img src=x onerror=alert(2)>" in (title.text or "") for title in root.iter(f"{SVG}title"))


def test_thousands_of_kernels_are_merged() -> None:
    layer = layer_of(traces.gpu(layers=6, kernels=2000, steps=1))
    assert layer.svg.count("<rect") < 4000
    assert " spans: " in layer.svg


@pytest.mark.parametrize("timeline", [traces.gpu(layers=1), traces.cpu()])
def test_small_traces_and_those_of_a_cpu_can_be_drawn(timeline: Timeline) -> None:
    ET.fromstring(layer_of(timeline).svg)


def test_without_units_there_is_nothing_to_draw() -> None:
    timeline = traces.gpu(layers=2)
    bare = replace(timeline, spans=replace(timeline.spans, units=timeline.spans.units * 0 - 1))
    assert draw_layer(bare, timeline.windows[0].start, timeline.windows[0].end) is None


def test_a_unit_that_stays_gathered_has_no_gather_before_its_backward() -> None:
    layer = layer_of(traces.cpu())
    assert "No all-gather of it leads to this." in layer.alternative
    assert "Its reduction takes " in layer.alternative
