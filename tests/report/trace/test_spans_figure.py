"""Rows of blocks become a figure: every block is in it, says what it is, and merging loses none."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.events.timeline import Kind, Meaning, Timeline, Window
from refshard.report.draw.charts import Chart, chart
from refshard.report.draw.palette import SPANS, dimmed
from refshard.report.trace.lanes import Blocks, LaneRow
from refshard.report.trace.spans_figure import (
    MOST_BLOCKS,
    Extent,
    View,
    find_layer,
    fitting,
    layer_chart,
    merged,
    spans_figure,
)
from tests.report import traces
from tests.report.pages import numbers
from tests.report.traces import HOSTILE

NOW = 1_700_000_000_000_000_000
"""Nanoseconds since 1970, as traces have them."""
pieces = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=60)


def made(parts: Sequence[tuple[int, int]], style: str = "compute") -> Blocks:
    """Blocks of (pause, length) pairs, one after another."""
    flat = np.array(parts, np.int64).reshape(-1, 2)
    ends = NOW + np.cumsum(flat.sum(1))
    return Blocks(
        style=style, starts=ends - flat[:, 1], ends=ends, notes=[(f"{style} {n}", "") for n in range(len(flat))]
    )


def drawn(*rows: LaneRow, close: int = 10_000_000, most: int = 10**6) -> tuple[dict[str, Any], int]:
    extent = Extent(begin=NOW, close=NOW + close, origin=NOW, title="from the start")
    figure, cell = spans_figure(rows, extent, most)
    return chart("c", "t", figure, "a").figure, cell


def told(figure: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Text and ends, in ms, of every block that can be pointed at."""
    texts, found = figure["layout"]["meta"]["texts"], []
    for trace in figure["data"]:
        if trace["mode"] == "none":
            x = numbers(trace["x"])
            found += [(texts[code], *ends) for code, *ends in zip(trace["meta"]["codes"], x[::2], x[1::2])]
    return found


def test_each_block_is_a_step_up_and_a_step_down() -> None:
    row = LaneRow(label="stream 7", blocks=(made([(1000, 2000), (500, 1500)]),))
    figure, cell = drawn(row)
    fill = figure["data"][0]
    assert cell == 0
    assert (fill["line"]["shape"], fill["fill"], fill["fillcolor"]) == ("hv", "tozeroy", SPANS["compute"].colour)
    assert numbers(fill["x"]) == pytest.approx([0.001, 0.003, 0.0035, 0.005])
    assert numbers(fill["y"])[1::2] == [0, 0]
    assert min(numbers(fill["y"])[::2]) > 0.5
    assert figure["layout"]["xaxis"]["ticksuffix"] == " ms"
    assert numbers(figure["layout"]["xaxis"]["range"]) == [0, 10]
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["stream 7"]


def test_pointing_says_name_and_duration_of_the_block_under_the_pointer() -> None:
    """The nearest point decides, so of blocks that touch each has its points within itself."""
    blocks, gap = made([(0, 2000), (0, 1000)]), made([(3000, 400)], "gap")
    figure, _ = drawn(LaneRow(label="s", blocks=(blocks, gap)))
    (texts, begins, ends) = zip(*told(figure))
    assert texts == ("compute 0", "compute 1", "gap 0")
    for end, begin in zip(ends, begins[1:]):
        assert end < begin
    (trace,) = [trace for trace in figure["data"] if trace["mode"] == "none"]
    assert numbers(trace["customdata"]) == pytest.approx([2e-6, 2e-6, 1e-6, 1e-6, 4e-7, 4e-7])


def test_a_style_is_in_the_legend_once_and_rows_share_the_height() -> None:
    rows = [LaneRow(label=label, blocks=(made([(0, 10)]),)) for label in ("a", "", "b")]
    figure, _ = drawn(*rows)
    assert [trace["showlegend"] for trace in figure["data"] if trace["mode"] == "lines"] == [True, False, False]
    domains = [figure["layout"][axis]["domain"] for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert domains[0][0] == pytest.approx(domains[1][1]), "rows of one lane touch"
    assert domains[1][0] > domains[2][1]
    assert domains[2][0] == pytest.approx(0)


def test_names_stand_on_blocks_that_are_wide_enough() -> None:
    blocks = Blocks(
        style="comm", starts=NOW + np.array([0, 5_000_000]), ends=NOW + np.array([4_000_000, 6_500_000]),
        notes=[("all_gather model.layers.0", "416 MiB"), ("all_gather model.layers.1", "416 MiB")],
    )  # fmt: skip
    figure, _ = drawn(LaneRow(label="s", blocks=(blocks,)))
    (labels,) = [trace for trace in figure["data"] if trace["mode"] == "text"]
    assert labels["text"] == ["all_gather model.layers.0", "all_gather"]
    assert numbers(labels["x"]) == [2, 5.75]


def test_hostile_names_stay_text() -> None:
    blocks = Blocks(style="unit", starts=np.array([NOW]), ends=np.array([NOW + 9_000_000]), notes=[(HOSTILE, HOSTILE)])
    figure, _ = drawn(LaneRow(label=HOSTILE, blocks=(blocks,)))
    shown = [note["text"] for note in figure["layout"]["annotations"]] + [
        text.replace("<br>", "") for text, *_ in told(figure)
    ]
    assert not any("<" in text for text in shown)
    assert any("&lt;img" in text for text in shown)


@given(pieces, st.sampled_from([256, 1024, 10**6]))
def test_merging_keeps_longer_blocks_and_leaves_at_most_two_that_begin_in_a_cell(
    parts: list[tuple[int, int]], cell: int
) -> None:
    blocks = made(parts)
    found = merged(blocks, cell)
    long = blocks.ends - blocks.starts >= cell
    kept = set(zip(found.starts.tolist(), found.ends.tolist()))
    assert set(zip(blocks.starts[long].tolist(), blocks.ends[long].tolist())) <= kept
    assert (found.starts[0], found.ends[-1]) == (blocks.starts[0], blocks.ends[-1])
    assert np.all(found.starts[1:] >= found.ends[:-1])
    short = found.ends - found.starts < cell
    assert np.unique(found.starts[short] // cell, return_counts=True)[1].max(initial=0) <= 2
    counts = [int(name.split()[0]) if name.endswith("spans") else 1 for name, _ in found.notes]
    assert sum(counts) == len(parts)


def test_no_more_blocks_are_drawn_than_may_be_and_as_little_as_can_be_is_merged() -> None:
    row = LaneRow(label="s", blocks=(made([(10, 100)] * 5000), made([(10**6, 10)], "gap")))
    (found,), cell = fitting([row], 1000)
    assert 500 < sum(map(len, found.blocks)) <= 1000
    assert cell > 110
    assert fitting([row], 5001) == ([row], 0)
    figure, cell = drawn(row, most=1000)
    assert len(told(figure)) <= 1000


def test_blocks_that_overlap_in_a_row_are_drawn_once() -> None:
    blocks = Blocks(
        style="compute", starts=NOW + np.array([0, 500, 600]), ends=NOW + np.array([1000, 2000, 700]),
        notes=[("a", ""), ("b", ""), ("c", "")],
    )  # fmt: skip
    x = np.array(numbers(drawn(LaneRow(label="s", blocks=(blocks,)))[0]["data"][0]["x"]))
    assert x.tolist() == sorted(x.tolist())
    assert (x[1::2] - x[::2]).sum() == pytest.approx(0.002)


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
