"""Boxes: each element of the range exactly once, in order, and never more boxes than needed."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refshard.engine.layout import Box, boxes


@st.composite
def ranges(draw: st.DrawFn, largest: int = 5, dims: int = 4) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, largest), max_size=dims)))
    total = math.prod(shape)
    first = draw(st.integers(0, total))
    return shape, first, draw(st.integers(0, total - first))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Flat indices of a box's elements, by numpy's own indexing."""
    flat = np.arange(math.prod(shape)).reshape(shape)
    picked = flat[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
    assert picked.shape == box.sizes, "the box leaves the tensor"
    return [int(e) for e in picked.reshape(-1)]


@settings(deadline=None)
@given(ranges())
def test_boxes_cover_the_range_once_and_in_order(given_range: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, numel = given_range
    found = boxes(shape, first, numel)
    covered = list(itertools.chain.from_iterable(elements(shape, box) for box in found))
    assert covered == list(range(first, first + numel))
    assert all(box.numel for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)
@given(ranges(largest=3, dims=3))
def test_no_fewer_boxes_would_do(given_range: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, numel = given_range
    assert len(boxes(shape, first, numel)) == fewest(shape, first, first + numel)


def fewest(shape: tuple[int, ...], first: int, stop: int) -> int:
    """The least number of contiguous boxes, found by trying every split."""

    @cache
    def rectangular(start: int, end: int) -> bool:
        at = np.array(np.unravel_index(np.arange(start, end), shape)) if shape else np.zeros((0, 1))
        extent = math.prod(int(axis.max() - axis.min()) + 1 for axis in at)
        return extent == end - start

    @cache
    def count(start: int) -> int:
        if start == stop:
            return 0
        return 1 + min(count(end) for end in range(start + 1, stop + 1) if rectangular(start, end))

    return count(first)


def test_a_range_that_is_ragged_everywhere_takes_the_most_boxes() -> None:
    assert boxes((3, 4, 5), 7, 44) == (
        Box((0, 1, 2), (1, 1, 3)),
        Box((0, 2, 0), (1, 2, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 2, 5)),
        Box((2, 2, 0), (1, 1, 1)),
    )


def test_a_scalar_is_one_box() -> None:
    assert boxes((), 0, 1) == (Box((), ()),)
    assert boxes((), 0, 0) == boxes((), 1, 0) == ()


@pytest.mark.parametrize(("first", "numel"), [(-1, 2), (5, 2), (0, 7), (3, -1)])
def test_a_range_outside_the_tensor_is_refused(first: int, numel: int) -> None:
    with pytest.raises(ValueError, match=r"within the 6 elements of \(2, 3\)"):
        boxes((2, 3), first, numel)
