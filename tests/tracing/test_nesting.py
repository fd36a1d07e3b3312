"""The innermost interval that holds a point, against a search through all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refshard.timeline import UNKNOWN
from refshard.tracing.nesting import innermost_at


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(thread, start, end) of intervals that nest on each thread, some of no length."""
    found: list[tuple[int, int, int]] = []
    for thread in range(draw(st.integers(0, 2))):
        for start, end in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12)):
            one = (thread, min(start, end), max(start, end))
            if all(_nest(one, other) for other in found) and one not in found:
                found.append(one)
    return draw(st.permutations(found))


def _nest(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    apart = a[0] != b[0] or a[2] <= b[1] or b[2] <= a[1]
    return apart or (a[1] <= b[1] and b[2] <= a[2]) or (b[1] <= a[1] and a[2] <= b[2])


@given(nested(), st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 21)), max_size=20))
def test_the_innermost_is_the_shortest_that_holds_the_point(
    intervals: list[tuple[int, int, int]], points: list[tuple[int, int]]
) -> None:
    threads, starts, ends = np.array(intervals, np.int64).reshape(-1, 3).T
    at_threads, at = np.array(points, np.int64).reshape(-1, 2).T
    found = innermost_at(starts, ends, threads.astype(np.int32), at, at_threads.astype(np.int32))
    for (thread, point), row in zip(points, found.tolist()):
        holding = [i for i, (t, start, end) in enumerate(intervals) if t == thread and start <= point < end]
        assert row == min(holding, key=lambda i: intervals[i][2] - intervals[i][1], default=UNKNOWN)
