"""The picture of one layer: what is in it, what is dimmed, and the sentence that goes with it."""

from dataclasses import replace
from typing import Any

import pytest

from refshard.events.timeline import Kind, Meaning, Timeline, Window
from refshard.report.draw.charts import Chart
from refshard.report.draw.palette import SPANS, dimmed
from refshard.report.trace.spans_figure import MOST_BLOCKS, View, find_layer, layer_chart
from tests.report import traces
from tests.report.pages import numbers

US = traces.US


def view_of(timeline: Timeline, unit: str | None = None) -> View:
    window = timeline.windows[0]
    view = find_layer(timeline, window.start, window.end, unit)
    assert view is not None
    return view


def layer_of(timeline: Timeline) -> Chart:
    return layer_chart(view_of(timeline), traces.figures(timeline), "layer")


def texts(layer: Chart) -> list[str]:
    """What pointing says, block by block."""
    told = layer.figure["layout"]["meta"]["texts"]
    return [told[code] for trace in layer.figure["data"] for code in (trace.get("meta") or {}).get("codes", ())]


def filled(layer: Chart, kind: Kind) -> list[dict[str, Any]]:
    """The filled curves of a kind, those that are not dimmed."""
    return [trace for trace in layer.figure["data"] if trace.get("fillcolor") == SPANS[kind.value].colour]


def blocks(layer: Chart, kind: Kind) -> list[tuple[float, float]]:
    """Ends of its own blocks of a kind, in the axis's unit."""
    ends = [numbers(trace["x"]) for trace in filled(layer, kind)]
    return [pair for xs in ends for pair in zip(xs[::2], xs[1::2])]


def test_the_layers_kernels_and_collectives_are_told_by_name() -> None:
    layer = layer_of(traces.gpu())
    assert layer.title == "The backward of model.layers.12"
    assert [note["text"] for note in layer.figure["layout"]["annotations"]] == ["stream 7", "stream 20"]
    labels = [text for trace in layer.figure["data"] if trace["mode"] == "text" for text in trace["text"]]
    assert "all_gather" in labels
    assert "reduce_scatter" in labels
    assert any(text.startswith("all_gather model.layers.12<br>416 MiB; algorithm bandwidth") for text in texts(layer))
    assert numbers(layer.figure["layout"]["xaxis"]["range"])[0] < 0, "it begins before the first kernel"


def test_what_belongs_to_other_units_is_dimmed() -> None:
    layer = layer_of(traces.gpu())
    assert [len(blocks(layer, kind)) for kind in (Kind.COMPUTE, Kind.COMM, Kind.PREP)] == [24, 2, 1]
    faint = [trace for trace in layer.figure["data"] if trace.get("fillcolor") == dimmed(SPANS["compute"].colour)]
    assert faint
    assert not any(trace["showlegend"] for trace in faint)


def test_its_sentence_says_when_the_collectives_run() -> None:
    layer = layer_of(traces.gpu(layers=5))
    assert layer.title == "The backward of model.layers.2"
    assert layer.alternative == (
        "model.layers.2: backward takes 1.30 ms. Its all-gather takes 700 us and ends 180 us before its first kernel "
        "starts. Its reduction takes 1.10 ms, starts 344 us after its last kernel ends and ends 1.44 ms after that. "
        "Dimmed: other units."
    )


def one_layer(*, gather: tuple[int, int], reduce: tuple[int, int]) -> Chart:
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
        ((850, 900), (1150, 1500), "ends 400 us after that; 77.1 us of it are not drawn.", 2),
        ((650, 680), (1150, 1350), "ends 320 us before its first kernel starts, too far away to be drawn.", 1),
        ((300, 950), (1150, 1350), "before its first kernel starts; 373 us of it are not drawn.", 2),
        ((300, 310), (5000, 5010), "ends 3.91 ms after that, too far away to be drawn.", 0),
    ],
)
def test_a_collective_that_is_far_away_is_told_not_drawn(
    gather: tuple[int, int], reduce: tuple[int, int], sentence: str, drawn: int
) -> None:
    layer = one_layer(gather=gather, reduce=reduce)
    assert sentence in layer.alternative
    assert len(blocks(layer, Kind.COMM)) == drawn
    (begin, close), ((first, last),) = numbers(layer.figure["layout"]["xaxis"]["range"]), blocks(layer, Kind.COMPUTE)
    assert drawn or last - first > 0.8 * (close - begin)  # what is too far away takes no room


def test_thousands_of_kernels_are_merged() -> None:
    layer = layer_of(traces.gpu(layers=6, kernels=2000, steps=1))
    assert len(texts(layer)) <= MOST_BLOCKS
    assert any(text.endswith(" spans") for text in texts(layer))


@pytest.mark.parametrize("timeline", [traces.gpu(layers=1), traces.cpu()])
def test_small_traces_and_those_of_a_cpu_can_be_drawn(timeline: Timeline) -> None:
    assert blocks(layer_of(timeline), Kind.COMPUTE)


def test_without_units_there_is_nothing_to_draw() -> None:
    timeline = traces.gpu(layers=2)
    bare = replace(timeline, spans=replace(timeline.spans, units=timeline.spans.units * 0 - 1))
    assert find_layer(bare, timeline.windows[0].start, timeline.windows[0].end) is None


def test_a_unit_that_stays_gathered_has_no_gather_before_its_backward() -> None:
    layer = layer_of(traces.cpu())
    assert "No all-gather precedes it." in layer.alternative
    assert "Its reduction takes " in layer.alternative


def test_views_that_span_the_same_have_one_scale_and_one_zero() -> None:
    views = view_of(traces.gpu()), view_of(traces.gpu(kernels=12))
    before, after = 2 * max(view.before for view in views), 3 * max(view.length for view in views)
    for view in views:
        layer = layer_chart(view.spanning(before, after), traces.figures(view.timeline), "layer")
        begin, close = numbers(layer.figure["layout"]["xaxis"]["range"])
        assert [begin * 1e6, close * 1e6] == pytest.approx([-before, after])


def test_the_unit_that_is_asked_for_is_drawn_where_it_is() -> None:
    timeline = traces.gpu(layers=6)
    assert view_of(timeline, "model.layers.4").unit == "model.layers.4"
    assert view_of(timeline, "model.layers.40").unit == view_of(timeline).unit
