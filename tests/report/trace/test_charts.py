"""Charts: parts add up, every block is drawn and says what it is, and merging loses none."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refshard.analysis.figures import MemoryPoint, TraceFigures
from refshard.events.timeline import Kind, Meaning, Timeline, Window
from refshard.report.draw.charts import Chart, chart
from refshard.report.draw.palette import SPANS, dimmed
from refshard.report.trace import charts
from refshard.report.trace.lanes import Blocks, LaneRow, View, find_layer
from tests.report import traces
from tests.report.pages import numbers
from tests.report.traces import HOSTILE, MS, US, made

NOW = 1_700_000_000_000_000_000
"""Nanoseconds since 1970, as traces have them."""
pieces = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=60)


@pytest.mark.parametrize(
    "figures",
    [made(), made(host=None, dependency=None), *(traces.figures(one) for one in (traces.gpu(), traces.cpu()))],
)
def test_the_parts_of_a_step_add_up_to_it(figures: TraceFigures) -> None:
    for step in figures.steps:
        parts = charts.split(step.breakdown)
        assert sum(parts.values()) == step.breakdown.span_ns
        assert min(parts.values()) >= 0
    assert list(charts.split(made().whole).values())[:4] == [30 * MS, 30 * MS, 20 * MS, 5 * MS]


def test_a_part_of_the_bar_leads_to_its_longest_place() -> None:
    timeline = traces.gpu(layers=6)
    drawn = charts.where_chart(traces.figures(timeline), timeline, "t")
    assert drawn.alternative == f"{drawn.lead}: {', '.join(one.text for one in drawn.jumps)}."
    parts = {bar["name"] for bar in drawn.figure["data"]}
    assert {"other kernels", "communication: transfer or waiting", "idle, launch-bound"} <= parts
    assert {one.part for one in drawn.jumps} <= parts
    late = next(one for one in drawn.jumps if one.part == "idle, launch-bound")
    assert late.note.startswith("906 us: idle before ncclDevKernel_AllGather_RING_LL in model.layers.0")
    assert (late.chart, late.begin) == ("t-timeline-1", 0.0)
    window = timeline.windows[2]
    assert late.end == pytest.approx(906 * US / (window.end - window.start))


def test_a_trace_without_steps_is_one_bar_of_the_whole() -> None:
    figures = made(steps=(msgspec.structs.replace(made().steps[0], step=None),))
    bars = charts.step_bars(figures)
    assert list(bars.layout.yaxis.ticktext) == ["whole trace"]
    assert bars.layout.xaxis.title.text == "ms in the trace"
    (drawn, *_) = charts.all_charts(figures, None, "t")
    assert drawn.alternative.startswith("The whole trace, which has no steps: ")


def test_ranks_stand_side_by_side_by_job_the_slowest_if_there_are_many() -> None:
    ranks = [
        made(job=job, rank=rank, file=f"{job}x-rank{rank}", exposed=20 + rank) for job in (0, 1) for rank in (0, 1)
    ]
    (drawn,) = charts.ranks_chart(ranks)
    bars = {bar["name"]: bar for bar in drawn.figure["data"]}
    assert bars["exposed communication"]["x"] == [20, 21, 20, 21]
    assert bars["exposed communication"]["y"] == [1, 2, 4, 5]
    rows = [row["text"] for row in drawn.figure["layout"]["meta"]["rows"]]
    assert rows == ["<b>0x</b>", "rank 0", "rank 1", "<b>1x</b>", "rank 0", "rank 1"]
    assert charts.ranks_chart(ranks[:1]) == []
    (many,) = charts.ranks_chart([made(rank=rank, span=100 + (37 * rank) % 60) for rank in range(60)])
    assert len(many.figure["data"][0]["x"]) == charts.MOST_RANKS
    assert many.alternative.endswith("to 159 ms on rank 47. The 40 of 60 ranks with the longest step.")


def test_a_long_memory_timeline_is_thinned_but_keeps_its_peak() -> None:
    points = [MemoryPoint(device="cuda:0", ns=n, bytes=1000 + n % 7) for n in range(100_000)]
    points[61_803] = MemoryPoint(device="cuda:0", ns=61_803, bytes=5000)
    kept = charts.thinned(points)
    assert len(kept) <= charts.MOST_POINTS
    assert max(point.bytes for point in kept) == 5000
    assert [point.ns for point in kept] == sorted(point.ns for point in kept)
    assert "peak of 4.88 KiB" in charts.memory_sentence(points)


def blocks_of(parts: Sequence[tuple[int, int]], style: str = "compute") -> Blocks:
    """Blocks of (pause, length) pairs, one after another."""
    flat = np.array(parts, np.int64).reshape(-1, 2)
    ends = NOW + np.cumsum(flat.sum(1))
    notes = [(f"{style} {n}", "") for n in range(len(flat))]
    return Blocks(style=style, starts=ends - flat[:, 1], ends=ends, notes=notes)


def drawn(*rows: LaneRow, close: int = 10_000_000, most: int = 10**6) -> dict[str, Any]:
    figure, _ = charts.spans_figure(rows, (NOW, NOW + close), NOW, "from the start", most)
    return chart("c", "t", figure, "a").figure


def pointed(figure: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Text and ends, in ms, of every block that can be pointed at."""
    texts, found = figure["layout"]["meta"]["texts"], []
    for trace in figure["data"]:
        if trace["mode"] == "none":
            x = numbers(trace["x"])
            found += [(texts[code], *ends) for code, *ends in zip(trace["meta"]["codes"], x[::2], x[1::2])]
    return found


def test_each_block_is_a_step_up_and_a_step_down() -> None:
    figure = drawn(LaneRow(label="stream 7", blocks=(blocks_of([(1000, 2000), (500, 1500)]),)))
    fill = figure["data"][0]
    assert (fill["line"]["shape"], fill["fill"], fill["fillcolor"]) == ("hv", "tozeroy", SPANS["compute"].colour)
    assert numbers(fill["x"]) == pytest.approx([0.001, 0.003, 0.0035, 0.005])
    assert numbers(fill["y"])[1::2] == [0, 0]
    assert figure["layout"]["xaxis"]["ticksuffix"] == " ms"
    assert numbers(figure["layout"]["xaxis"]["range"]) == [0, 10]
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["stream 7"]


def test_pointing_shows_name_and_duration_of_the_block_under_the_pointer() -> None:
    """The nearest point decides, so that touching blocks have their points within themselves."""
    blocks, gap = blocks_of([(0, 2000), (0, 1000)]), blocks_of([(3000, 400)], "gap")
    figure = drawn(LaneRow(label="s", blocks=(blocks, gap)))
    (texts, begins, ends) = zip(*pointed(figure))
    assert texts == ("compute 0", "compute 1", "gap 0")
    assert all(end < begin for end, begin in zip(ends, begins[1:]))
    (trace,) = [trace for trace in figure["data"] if trace["mode"] == "none"]
    assert numbers(trace["customdata"]) == pytest.approx([2e-6, 2e-6, 1e-6, 1e-6, 4e-7, 4e-7])


def test_a_style_is_in_the_legend_once_and_rows_share_the_height() -> None:
    figure = drawn(*(LaneRow(label=label, blocks=(blocks_of([(0, 10)]),)) for label in ("a", "", "b")))
    assert [trace["showlegend"] for trace in figure["data"] if trace["mode"] == "lines"] == [True, False, False]
    domains = [figure["layout"][axis]["domain"] for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert domains[0][0] == pytest.approx(domains[1][1]), "rows of one lane touch"
    assert domains[1][0] > domains[2][1]
    assert domains[2][0] == pytest.approx(0)


def test_names_stand_on_wide_blocks_and_overlaps_are_drawn_once() -> None:
    names = [("all_gather model.layers.0", "416 MiB"), ("all_gather model.layers.1", "416 MiB")]
    starts, ends = NOW + np.array([0, 5_000_000]), NOW + np.array([4_000_000, 6_500_000])
    figure = drawn(LaneRow(label="s", blocks=(Blocks(style="comm", starts=starts, ends=ends, notes=names),)))
    (labels,) = [trace for trace in figure["data"] if trace["mode"] == "text"]
    assert labels["text"] == ["all_gather model.layers.0", "all_gather"]
    assert numbers(labels["x"]) == [2, 5.75]
    starts, ends = NOW + np.array([0, 500, 600]), NOW + np.array([1000, 2000, 700])
    blocks = Blocks(style="compute", starts=starts, ends=ends, notes=[("a", ""), ("b", ""), ("c", "")])
    x = np.array(numbers(drawn(LaneRow(label="s", blocks=(blocks,)))["data"][0]["x"]))
    assert x.tolist() == sorted(x.tolist())
    assert (x[1::2] - x[::2]).sum() == pytest.approx(0.002)


def test_hostile_names_stay_text() -> None:
    blocks = Blocks(style="unit", starts=np.array([NOW]), ends=np.array([NOW + 9_000_000]), notes=[(HOSTILE, HOSTILE)])
    figure = drawn(LaneRow(label=HOSTILE, blocks=(blocks,)))
    shown = [note["text"] for note in figure["layout"]["annotations"]]
    shown += [text.replace("<br>", "") for text, *_ in pointed(figure)]
    assert not any("<" in text for text in shown)
    assert any("&lt;img" in text for text in shown)


@given(pieces, st.sampled_from([256, 1024, 10**6]))
@settings(max_examples=150, deadline=None)
def test_merging_keeps_longer_blocks_and_leaves_at_most_two_that_begin_in_a_cell(
    parts: list[tuple[int, int]], cell: int
) -> None:
    blocks = blocks_of(parts)
    found, long = charts.merged(blocks, cell), blocks.ends - blocks.starts >= cell
    kept = set(zip(found.starts.tolist(), found.ends.tolist()))
    assert set(zip(blocks.starts[long].tolist(), blocks.ends[long].tolist())) <= kept
    assert (found.starts[0], found.ends[-1]) == (blocks.starts[0], blocks.ends[-1])
    assert np.all(found.starts[1:] >= found.ends[:-1])
    short = found.ends - found.starts < cell
    assert np.unique(found.starts[short] // cell, return_counts=True)[1].max(initial=0) <= 2
    counts = [int(name.split()[0]) if name.endswith("spans") else 1 for name, _ in found.notes]
    assert sum(counts) == len(parts)


def test_as_little_is_merged_as_can_be() -> None:
    row = LaneRow(label="s", blocks=(blocks_of([(10, 100)] * 5000), blocks_of([(10**6, 10)], "gap")))
    (found,), cell = charts.fitting([row], 1000)
    assert 500 < sum(map(len, found.blocks)) <= 1000
    assert cell > 110
    assert charts.fitting([row], 5001) == ([row], 0)
    assert len(pointed(drawn(row, most=1000))) <= 1000


def view_of(timeline: Timeline, unit: str | None = None) -> View:
    view = find_layer(timeline, timeline.windows[0].start, timeline.windows[0].end, unit)
    assert view is not None
    return view


def layer_of(timeline: Timeline) -> Chart:
    return charts.layer_chart(view_of(timeline), traces.figures(timeline), "layer")


def own(layer: Chart, kind: Kind) -> list[tuple[float, float]]:
    """Ends of its own blocks of a kind, which are not dimmed, in the axis's unit."""
    colour = SPANS[kind.value].colour
    ends = [numbers(trace["x"]) for trace in layer.figure["data"] if trace.get("fillcolor") == colour]
    return [pair for xs in ends for pair in zip(xs[::2], xs[1::2])]


def test_a_layer_has_its_kernels_and_collectives_and_dims_others() -> None:
    layer = layer_of(traces.gpu())
    assert layer.title == "The backward of model.layers.12"
    names = [note["text"] for note in layer.figure["layout"]["annotations"]]
    assert names == ["stream 7: compute", "stream 20: communication"]
    labels = [text for trace in layer.figure["data"] if trace["mode"] == "text" for text in trace["text"]]
    assert {"all_gather", "reduce_scatter"} <= set(labels)
    assert any(text.startswith("all_gather model.layers.12<br>416 MiB; algo") for text, *_ in pointed(layer.figure))
    assert numbers(layer.figure["layout"]["xaxis"]["range"])[0] < 0, "it begins before the first kernel"
    assert [len(own(layer, kind)) for kind in (Kind.COMPUTE, Kind.COMM, Kind.PREP)] == [24, 2, 1]
    faint = [one for one in layer.figure["data"] if one.get("fillcolor") == dimmed(SPANS["compute"].colour)]
    assert faint
    assert not any(trace["showlegend"] for trace in faint)


def test_its_sentence_says_when_the_collectives_run() -> None:
    assert layer_of(traces.gpu(layers=5)).alternative == (
        "model.layers.2: backward takes 1.30 ms. Its all-gather takes 700 us and ends 180 us before its first kernel "
        "starts. Its reduction takes 1.10 ms, starts 344 us after its last kernel ends and ends 1.44 ms after that. "
        "Dimmed: other units."
    )
    assert "No all-gather precedes it. Its reduction takes " in layer_of(traces.cpu()).alternative


@pytest.mark.parametrize(
    ("gather", "reduce", "sentence", "count"),
    [
        ((850, 900), (1150, 1350), "starts 50.0 us after its last kernel ends and ends 250 us after that.", 2),
        ((850, 900), (1150, 1500), "ends 400 us after that; 77.1 us not drawn.", 2),
        ((650, 680), (1150, 1350), "ends 320 us before its first kernel starts, too far away to be drawn.", 1),
        ((300, 950), (1150, 1350), "before its first kernel starts; 373 us not drawn.", 2),
        ((300, 310), (5000, 5010), "ends 3.91 ms after that, too far away to be drawn.", 0),
    ],
)
def test_a_collective_that_is_far_away_is_not_drawn(
    gather: tuple[int, int], reduce: tuple[int, int], sentence: str, count: int
) -> None:
    """A backward from 1000 to 1100 us, with collectives of a unit whose forward ran from 0 to 10 us."""
    maker = traces.Maker()
    for start, end, under in ((0, 10, Meaning.FORWARD), (1000, 1100, Meaning.BACKWARD)):
        maker.add(Kind.COMPUTE, "stream 7", "gemm", start * US, end * US, unit="layers.0", step=0, under=under)
    for op, (start, end) in (("all_gather", gather), ("reduce_scatter", reduce)):
        maker.collective(op, "stream 20", op, start * US, end * US, unit="layers.0", step=0)
    layer = layer_of(maker.timeline((Window(step=0, start=0, end=9000 * US),), 0, on_device=True))
    assert sentence in layer.alternative
    assert len(own(layer, Kind.COMM)) == count
    (begin, close), ((first, last),) = numbers(layer.figure["layout"]["xaxis"]["range"]), own(layer, Kind.COMPUTE)
    assert count or last - first > 0.8 * (close - begin)  # a collective that is too far away takes no room


def test_a_layer_of_any_size_can_be_drawn_if_units_are_known() -> None:
    texts = [text for text, *_ in pointed(layer_of(traces.gpu(layers=6, kernels=2000, steps=1)).figure)]
    assert len(texts) <= charts.MOST_BLOCKS
    assert any(text.endswith(" spans") for text in texts)
    assert own(layer_of(traces.gpu(layers=1)), Kind.COMPUTE)
    timeline = traces.SMALL
    bare = replace(timeline, spans=replace(timeline.spans, units=timeline.spans.units * 0 - 1))
    assert find_layer(bare, timeline.windows[0].start, timeline.windows[0].end) is None


def test_views_can_share_a_unit_a_scale_and_a_zero() -> None:
    views = view_of(traces.gpu(layers=6), "model.layers.4"), view_of(traces.gpu(layers=6), "model.layers.40")
    assert [view.unit for view in views] == ["model.layers.4", view_of(traces.gpu(layers=6)).unit]
    before, after = 2 * max(view.before for view in views), 3 * max(view.length for view in views)
    for view in views:
        layer = charts.layer_chart(view.spanning(before, after), traces.figures(view.timeline), "layer")
        begin, close = numbers(layer.figure["layout"]["xaxis"]["range"])
        assert [begin * 1e6, close * 1e6] == pytest.approx([-before, after])
