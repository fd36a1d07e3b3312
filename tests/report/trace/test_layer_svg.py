"""The drawing of one layer: well-formed, in words too, and dimmed where it belongs to others."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from refshard.report.trace.layer_svg import Layer, View, draw, draw_layer, find_layer
from refshard.timeline import Kind, Meaning, Timeline, Window
from tests.report import traces

US = traces.US
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
    assert layer.title == "The backward of model.layers.2"
    assert layer.alternative == (
        "model.layers.2: backward takes 1.30 ms. Its all-gather takes 700 us and ends 180 us before its first kernel "
        "starts. Its reduction takes 1.10 ms, starts 344 us after its last kernel ends and ends 1.44 ms after that."
    )


def one_layer(*, gather: tuple[int, int], reduce: tuple[int, int]) -> Layer:
    """A backward from 1000 to 1100 us, beside collectives of a unit whose forward ran from 0 to 10 us."""
    maker = traces.Maker()
    for start, end, under in ((0, 10, Meaning.FORWARD), (1000, 1100, Meaning.BACKWARD)):
        known = {"unit": "layers.0", "step": 0, "under": under}
        maker.add(Kind.COMPUTE, "stream 7", "gemm", start * US, end * US, **known)  # type: ignore[arg-type]
    for op, (start, end) in (("all_gather", gather), ("reduce_scatter", reduce)):
        maker.collective(op, "stream 20", op, start * US, end * US, unit="layers.0", step=0)
    return layer_of(maker.timeline((Window(step=0, start=0, end=9000 * US),), 0, on_device=True))


@pytest.mark.parametrize(
    ("gather", "reduce", "sentence", "drawn"),
    [
        ((850, 900), (1150, 1350), "starts 50.0 us after its last kernel ends and ends 250 us after that.", 2),
        ((850, 900), (1150, 1500), "ends 400 us after that; 77.1 us of it lie beyond the drawing.", 2),
        ((650, 680), (1150, 1350), "ends 320 us before its first kernel starts, too far away to be drawn.", 1),
        ((300, 950), (1150, 1350), "before its first kernel starts; 373 us of it lie beyond the drawing.", 2),
        ((300, 310), (5000, 5010), "ends 3.91 ms after that, too far away to be drawn.", 0),
    ],
)
def test_a_collective_that_is_far_away_is_told_not_drawn(
    gather: tuple[int, int], reduce: tuple[int, int], sentence: str, drawn: int
) -> None:
    layer = one_layer(gather=gather, reduce=reduce)
    assert sentence in layer.alternative
    titles = [title.text or "" for title in ET.fromstring(layer.svg).iter(f"{SVG}title")]
    assert sum("(communication)" in title for title in titles) == drawn
    widest = max(float(rect.get("width", "0")) for rect in ET.fromstring(layer.svg).iter(f"{SVG}rect"))
    assert drawn or widest > 800  # what is too far away takes no room


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


def view_of(timeline: Timeline, unit: str | None = None) -> View:
    window = timeline.windows[0]
    view = find_layer(timeline, window.start, window.end, unit)
    assert view is not None
    return view


def longest(layer: Layer) -> float:
    """Width of the widest block of compute."""
    blocks = [
        group
        for group in ET.fromstring(layer.svg).iter(f"{SVG}g")
        if "(compute)" in (group.findtext(f"{SVG}title") or "")
    ]
    return max(float(rect.get("width", 0)) for group in blocks for rect in group.findall(f"{SVG}rect"))


def test_views_of_one_length_have_one_scale() -> None:
    """A kernel twice as long is twice as wide beside another strategy's; drawn by itself it is not."""
    short, long = view_of(traces.gpu()), view_of(traces.gpu(kernels=12))
    length = max(short.length, long.length) * 2
    drawn = [longest(draw(view.stretched(length))) for view in (short, long)]
    pixels = [width / (draw_ns(view) / length) for view, width in zip((short, long), drawn)]
    assert pixels[0] == pytest.approx(pixels[1], rel=0.01)


def draw_ns(view: View) -> int:
    """Nanoseconds of the longest kernel of the view's layer."""
    spans = view.timeline.spans
    mine = (spans.units == view.hull.unit) & spans.of_kind(Kind.COMPUTE)
    inside = mine & (spans.starts >= view.begin) & (spans.ends <= view.end)
    return int((spans.ends - spans.starts)[inside].max())


def test_the_unit_that_is_asked_for_is_drawn_where_it_is() -> None:
    timeline = traces.gpu(layers=6)
    assert view_of(timeline, "model.layers.4").unit == "model.layers.4"
    assert view_of(timeline, "model.layers.40").unit == view_of(timeline).unit
