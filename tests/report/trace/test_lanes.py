"""A step becomes lanes: which there are, in which order, and that every nanosecond of every kind is in them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.figures import Cause
from refshard.events.timeline import KINDS, Kind, Meaning, Timeline, Window
from refshard.report.trace.lanes import MOST_LANES, MOST_ROWS, LaneRow, drawn_windows, hulls, idle_by_cause, rows_of
from tests.events.spans import Span, spans_of
from tests.report import traces

rows = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("ab"), st.integers(0, 500), st.integers(0, 500)), min_size=1,
    max_size=40,
)  # fmt: skip


def simple(spans: list[Span], start: int = 0, end: int | None = None) -> Timeline:
    last = max((span.end for span in spans), default=1)
    window = Window(step=0, start=start, end=last if end is None else end)
    return Timeline(rank=0, windows=(window,), spans=spans_of(spans))


def drawn(timeline: Timeline) -> list[LaneRow]:
    figures = traces.figures(timeline)
    window = drawn_windows(figures, timeline)[0]
    return rows_of(timeline, figures, window.begin, window.close)[0]


def span(kind: Kind, lane: str, start: int, end: int) -> Span:
    return Span(kind=kind, lane=lane, name=f"{kind} on {lane}", start=start, end=end)


def busy_by_lane_and_kind(rows: list[LaneRow]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    label = ""
    for row in rows:
        label = row.label or label
        for blocks in row.blocks:
            if blocks.style in KINDS:
                key = label.partition(":")[0], blocks.style
                found[key] = found.get(key, 0) + int((blocks.ends - blocks.starts).sum())
    return found


@given(rows)
def test_each_lane_and_kind_is_covered_for_as_long_as_its_spans(
    made: list[tuple[Kind, str, int, int]],
) -> None:
    now, spans = {"a": 0, "b": 0}, []
    for kind, lane, pause, length in made:
        start = now[lane] + pause
        spans.append(span(kind, lane, start, start + length))
        now[lane] = start + length
    expected: dict[tuple[str, str], int] = {}
    for one in spans:
        expected[one.lane, one.kind] = expected.get((one.lane, one.kind), 0) + one.end - one.start
    assert busy_by_lane_and_kind(drawn(simple(spans, end=10**6))) == expected


def test_of_many_lanes_the_busiest_are_drawn() -> None:
    timeline = simple([span(Kind.COMPUTE, f"stream {n}", 0, 100 + n) for n in range(MOST_LANES + 3)])
    figures = traces.figures(timeline)
    rows, undrawn = rows_of(timeline, figures, 0, 200)
    assert undrawn == 3
    assert [row.label for row in rows if row.label.startswith("stream")] == [
        f"stream {n}: compute" for n in range(MOST_LANES + 2, 2, -1)
    ]


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        (1, [(0, "step 0, the only one")]),
        (2, [(0, "step 0, the faster of two"), (1, "step 1, the slower of two")]),
        (3, [(1, "step 1, of median length"), (2, "step 2, the slowest")]),
    ],
)
def test_the_step_of_median_length_is_drawn_and_the_slowest(steps: int, drawn: list[tuple[int, str]]) -> None:
    timeline = traces.gpu(layers=4, steps=steps)
    lengths = [window.end - window.start for window in timeline.windows]
    assert lengths == sorted(set(lengths))
    found = drawn_windows(traces.figures(timeline), timeline)
    assert [(window.step, window.label) for window in found] == drawn
    assert [window.close - window.begin for window in found] == [lengths[step] for step, _ in drawn]


def test_of_equal_steps_one_is_drawn() -> None:
    timeline = simple([span(Kind.COMPUTE, "s", 10 * n, 10 * n + 5) for n in range(3)])
    windows = tuple(Window(step=n, start=10 * n, end=10 * n + 10) for n in range(3))
    timeline = replace(timeline, windows=windows)
    (window,) = drawn_windows(traces.figures(timeline), timeline)
    assert window.label == "step 1, median and slowest"


def test_without_steps_everything_is_drawn() -> None:
    timeline = traces.gpu(layers=3)
    spans = timeline.spans
    whole = Window(step=None, start=int(spans.starts.min()), end=int(spans.ends.max()))
    timeline = replace(timeline, windows=(whole,))
    (window,) = drawn_windows(traces.figures(timeline), timeline)
    assert (window.step, window.begin, window.close, window.label) == (None, whole.start, whole.end, "the whole trace")
    blocks = [one for row in drawn(timeline) for one in row.blocks if one.style in KINDS]
    assert sum(map(len, blocks)) == len(spans)


def test_operators_within_operators_stand_in_rows() -> None:
    nested = [span(Kind.COMPUTE, "main", n, 100 - n) for n in range(10)]
    found = [row.blocks[0] for row in drawn(simple(nested)) if row.blocks[0].style == "compute"]
    assert len(found) == MOST_ROWS
    lengths = [(blocks.ends - blocks.starts).tolist() for blocks in found]
    assert lengths[: MOST_ROWS - 1] == [[100 - 2 * depth] for depth in range(MOST_ROWS - 1)]
    assert len(lengths[-1]) == 10 - (MOST_ROWS - 1)


def test_a_gap_is_drawn_by_its_cause() -> None:
    """A launch takes 18 here: the third kernel was launched 25 before it starts, then 30, which is within its gap."""
    timeline = simple([span(Kind.COMPUTE, "s", n, n + 10) for n in (0, 30, 60)], end=100)
    for third, back_to_back in ((35, []), (30, [(40, 60)])):
        launches = np.array([-5, 12, third], np.int64)
        spans = replace(timeline.spans, launches=launches, queued=launches)
        gaps = idle_by_cause(replace(timeline, spans=spans), 0, 100)
        found = {cause: list(zip(gaps.starts, gaps.ends)) for cause, gaps in gaps}
        assert found.get(Cause.BACK_TO_BACK, []) == back_to_back
        assert sorted(found[Cause.LAUNCH] + back_to_back) == [(10, 30), (40, 60), (70, 100)]


def phased(*rows: tuple[str, int, int, int], reductions: tuple[tuple[str, int], ...] = ()) -> list[tuple[str, str]]:
    """Hulls of spans (unit, start, end, under), and of reductions that start then, as (unit, phase)."""
    maker = traces.Maker()
    for unit, start, end, under in rows:
        maker.add(Kind.COMPUTE, "main", "mm", start, end, unit=unit, step=0, under=under)
    for unit, start in reductions:
        maker.collective("reduce_scatter", "comm", "rs", start, start + 5, unit=unit, step=0)
    timeline = maker.timeline((Window(step=0, start=0, end=1000),), 0, on_device=True)
    return [(timeline.spans.unit_names[hull.unit], hull.phase) for hull in hulls(timeline, 0, 1000)]


def test_what_belongs_to_a_prefetch_or_a_reduction_cuts_no_hull() -> None:
    back = Meaning.BACKWARD
    rows = [("a", 0, 10, back), ("a", 40, 50, back)]
    for under in (Meaning.COPY_IN, Meaning.COPY_OUT, Meaning.ALL_GATHER, Meaning.REDUCE):
        assert phased(*rows, ("b", 20, 30, back | under)) == [("a", "backward")]
    assert phased(*rows, ("b", 20, 30, back)) == [("a", "backward"), ("b", "backward"), ("a", "backward")]


def test_spans_that_tell_no_phase_are_of_the_one_that_began_before() -> None:
    rows = [("a", 0, 9, Meaning.FORWARD), ("a", 10, 19, 0), ("a", 20, 29, Meaning.BACKWARD), ("a", 30, 39, 0)]
    assert phased(*rows) == [("a", "forward"), ("a", "backward")]
    assert phased(*rows, ("b", 40, 49, 0)) == [("a", "forward"), ("a", "backward"), ("b", "")]


def test_without_phases_the_last_run_before_a_reduction_is_the_backward() -> None:
    rows = [(unit, 10 * n, 10 * n + 5, 0) for n, unit in enumerate("abba")]
    assert phased(*rows, ("a", 90, 95, 0), reductions=(("b", 27), ("a", 50))) == [
        ("a", ""), ("b", "backward"), ("a", "backward"),
    ]  # fmt: skip
    assert phased(*rows) == [("a", ""), ("b", ""), ("a", "")]


def test_an_exposed_strip_names_up_to_three_collectives_the_longest_first() -> None:
    maker = traces.Maker()
    for n in range(4):
        maker.collective("all_gather", f"gloo {n}", "g", 0, 100 + n, unit=f"u{n}", step=0)
    maker.collective("all_gather", "gloo 4", "g", 0, 103, unit="u3", step=0)
    rows = drawn(maker.timeline((Window(step=0, start=0, end=200),), 0, on_device=True))
    (notes,) = [blocks.notes for row in rows for blocks in row.blocks if blocks.style == "exposed"]
    assert notes == [("exposed communication", "2 x all_gather u3, all_gather u2, all_gather u1 and 1 more")]
