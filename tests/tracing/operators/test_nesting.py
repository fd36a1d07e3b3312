"""Innermost of nested intervals, by bisection, against a walk over all of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refshard.events.timeline import UNKNOWN
from refshard.tracing.owners import Nesting, innermost_on, nested_order


@st.composite
def nested(draw: st.DrawFn, first: int = 0, last: int = 40, depth: int = 4) -> list[tuple[int, int]]:
    """Intervals of which any two are disjoint or one encloses the other, some of length 0, some equal."""
    if depth == 0 or last <= first:
        return []
    cuts = sorted(draw(st.lists(st.integers(first, last), max_size=6)))
    found = []
    for start, end in zip(cuts[::2], cuts[1::2]):
        found += [(start, end), *draw(nested(start, end, depth - 1))]
    return found


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)


@given(nested())
def test_innermost_is_the_shortest_that_holds(pairs: list[tuple[int, int]]) -> None:
    starts, ends = columns(pairs)
    points = np.arange(-1, 42)
    found = innermost_on(np.zeros(len(pairs), np.int32), starts, ends, np.zeros(43, np.int32), points)
    for point, place in zip(points.tolist(), found.tolist()):
        lengths = [end - start for start, end in pairs if start <= point < end]
        if not lengths:
            assert place == UNKNOWN
        else:
            start, end = pairs[place]
            assert start <= point < end
            assert end - start == min(lengths)


@given(nested())
def test_own_times_add_up_to_the_union(pairs: list[tuple[int, int]]) -> None:
    starts, ends = columns([(start, end) for start, end in pairs if end > start])
    order = nested_order(starts, ends)
    own = Nesting.of(starts[order], ends[order]).own()
    assert own.sum() == len({point for start, end in pairs for point in range(start, end)})


def test_threads_are_apart() -> None:
    threads = np.array([1, 2], np.int32)
    starts, ends = np.array([0, 5]), np.array([20, 8])
    found = innermost_on(threads, starts, ends, np.array([1, 2, 2, 3], np.int32), np.array([6, 6, 9, 6]))
    assert found.tolist() == [0, 1, UNKNOWN, UNKNOWN]
