"""Interval algebra against a brute-force one that looks at every nanosecond."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.events.timeline import Intervals, Kind, Timeline
from tests.events.spans import Span, listed, spans_of

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def points(given_pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in given_pairs for t in range(start, end)}


def is_canonical(intervals: Intervals) -> bool:
    """Sorted, disjoint, not even touching, none empty."""
    flat = [t for pair in intervals.pairs for t in pair]
    return all(a < b for a, b in pairwise(flat))


@given(pairs)
def test_union_covers_exactly_the_given_points(a: list[tuple[int, int]]) -> None:
    union = Intervals.of(a)
    assert points(union.pairs) == points(a)
    assert union.length == len(points(a))


@given(pairs, pairs)
def test_algebra_equals_set_algebra(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = Intervals.of(a), Intervals.of(b)
    assert points((x | y).pairs) == points(a) | points(b)
    assert points((x & y).pairs) == points(a) & points(b)
    assert points((x - y).pairs) == points(a) - points(b)


@given(pairs, pairs)
def test_results_are_canonical(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = Intervals.of(a), Intervals.of(b)
    assert all(is_canonical(result) for result in (x, x | y, x & y, x - y))


@given(pairs, pairs)
def test_within_counts_the_points_of_every_window(a: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    """Windows in any order, overlapping each other, some empty."""
    bounds = np.array(windows, np.int64).reshape(-1, 2)
    found = Intervals.of(a).within(bounds[:, 0], bounds[:, 1])
    assert found.tolist() == [len(points(a) & points([window])) for window in windows]


def test_nanoseconds_since_1970_are_exact() -> None:
    epoch = 1_790_857_026_000_000_001
    assert Intervals.of([(epoch, epoch + 1), (epoch + 1, epoch + 3)]).pairs == [(epoch, epoch + 3)]


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must not end before it starts, got \[5, 3\)"):
        Intervals.of([(1, 2), (5, 3)])


def test_busy_is_the_union_over_lanes() -> None:
    rows = (Kind.COMPUTE, "stream 9", 5, 12), (Kind.COMM, "stream 20", 8, 20), (Kind.COMPUTE, "stream 7", 0, 10)
    spans = [Span(kind=kind, lane=lane, name="x", start=start, end=end) for kind, lane, start, end in rows]
    timeline = Timeline(rank=0, windows=(), spans=spans_of(spans))
    assert timeline.busy(Kind.COMPUTE).pairs == [(0, 12)]
    assert (timeline.busy(Kind.COMM) - timeline.busy(Kind.COMPUTE)).length == 8


def test_columns_hold_the_spans_in_order_of_start_and_end() -> None:
    late = Span(kind=Kind.COPY, lane="b", name="y", start=5, end=6)
    long = Span(kind=Kind.COMM, lane="a", name="x", start=1, end=9)
    short = Span(kind=Kind.COMPUTE, lane="b", name="x", start=1, end=2)
    spans = spans_of([late, long, short])
    assert listed(spans) == [short, long, late]
    assert [spans.signature_names[code] for code in spans.signatures] == ["x", "x", "y"]
