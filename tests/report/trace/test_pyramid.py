"""Levels of detail lose no time, and are as coarse as they say."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refshard.report.trace.pyramid import KEPT, Level, levels

LENGTH = 10**7  # so long that in the coarsest levels all spans of a group are one
pieces = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=60)
grouped = st.lists(pieces, min_size=1, max_size=3)


def columns(groups: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pause, length) pairs laid one after another, group by group."""
    rows = []
    for group, parts in enumerate(groups):
        now = 1_700_000_000_000_000_000  # nanoseconds since 1970, as traces have them
        for pause, length in parts:
            now += pause
            rows.append((group, now, now + length))
            now += length
    flat = np.array(rows, np.int64).reshape(-1, 3)
    return flat[:, 0].astype(np.int32), flat[:, 1], flat[:, 2]


def made(groups: list[list[tuple[int, int]]], most: int = 10**9) -> tuple[Level, ...]:
    group, starts, ends = columns(groups)
    return levels(group, starts, ends, length=LENGTH, most=most)


@given(grouped)
@settings(max_examples=150, deadline=None)
def test_every_level_has_each_groups_time_and_spans(groups: list[list[tuple[int, int]]]) -> None:
    for level in made(groups):
        for group, parts in enumerate(groups):
            mine = level.groups == group
            assert level.busy[mine].sum() == sum(length for _, length in parts)
            assert level.counts[mine].sum() == len(parts)


@given(grouped)
@settings(max_examples=150, deadline=None)
def test_blocks_are_sorted_disjoint_and_at_most_two_begin_in_a_cell(groups: list[list[tuple[int, int]]]) -> None:
    for level in made(groups):
        for group in range(len(groups)):
            mine = level.groups == group
            starts, ends = level.starts[mine], level.ends[mine]
            assert np.all(starts[1:] >= ends[:-1])
            assert np.all(level.busy[mine] <= ends - starts)
            if level.resolution:
                _, per_cell = np.unique(starts // level.resolution, return_counts=True)
                assert per_cell.max(initial=0) <= 2


@given(grouped)
@settings(max_examples=100, deadline=None)
def test_a_blocks_first_span_is_where_it_starts(groups: list[list[tuple[int, int]]]) -> None:
    _, starts, _ = columns(groups)
    for level in made(groups):
        assert np.array_equal(starts[level.firsts], level.starts)


def test_spans_wider_than_a_cell_stay_alone() -> None:
    by_resolution = {level.resolution: level for level in made([[(5, 100_000), (5, 10), (5, 10), (5, 100_000)] * 9])}
    coarse = by_resolution[max(r for r in by_resolution if r < 100_000)]
    assert coarse.resolution > 0
    assert coarse.counts[:3].tolist() == [1, 2, 1]


def test_each_level_is_worth_its_room() -> None:
    sizes = [len(level) for level in made([[(10, 100)] * 5000])]
    assert len(sizes) > 3
    assert all(coarse <= KEPT * fine for fine, coarse in pairwise(sizes))


def test_the_finest_level_keeps_to_its_limit() -> None:
    finest, *_ = made([[(10, 100)] * 5000], most=1000)
    assert 500 < len(finest) <= 1000
    assert finest.busy.sum() == 500_000


def test_spans_that_overlap_in_a_group_count_once() -> None:
    (finest, *_) = levels(
        np.array([0, 0, 1], np.int32), np.array([0, 5, 0]), np.array([10, 20, 7]), length=20, most=100
    )
    assert finest.starts.tolist() == [0, 0]
    assert finest.ends.tolist() == [20, 7]
    assert finest.busy.tolist() == [20, 7]
    assert finest.counts.tolist() == [2, 1]


@pytest.mark.parametrize("length", [0, 1, 10**12])
def test_nothing_has_one_empty_level(length: int) -> None:
    nothing = np.empty(0, np.int64)
    (level,) = levels(nothing.astype(np.int32), nothing, nothing, length=length, most=10)
    assert len(level) == 0
