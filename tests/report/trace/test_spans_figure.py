"""Rows of blocks become a figure: every block is in it, says what it is, and merging loses none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refshard.report.draw.charts import chart
from refshard.report.draw.palette import SPANS
from refshard.report.trace.lanes import Blocks, LaneRow
from refshard.report.trace.spans_figure import Extent, fitting, merged, spans_figure
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
@settings(max_examples=150, deadline=None)
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
