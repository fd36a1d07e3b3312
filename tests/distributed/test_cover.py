"""The pairwise cover: it covers, it is small, it is the same every time."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.cover import pairs_of, pairwise_cover

cells = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 5)), max_size=40)


@given(cells)
def test_every_pair_that_a_cell_holds_is_covered(given_cells: list[tuple[int, int, int]]) -> None:
    chosen = pairwise_cover(given_cells)
    assert set(chosen) <= set(given_cells)
    assert len(chosen) == len(set(chosen))
    wanted = {pair for cell in given_cells for pair in pairs_of(cell)}
    assert {pair for cell in chosen for pair in pairs_of(cell)} == wanted


def test_of_a_whole_matrix_it_takes_about_as_many_cells_as_the_two_longest_factors_have_pairs() -> None:
    matrix = list(product(range(5), range(4), range(20)))
    assert 100 <= len(pairwise_cover(matrix)) <= 110


def test_it_is_deterministic_and_prefers_what_comes_first() -> None:
    matrix = [(a, b) for a in "xy" for b in "pq"]
    assert pairwise_cover(matrix) == matrix
    assert pairwise_cover([("x", "p", 2), ("x", "p", 1)]) == [("x", "p", 2), ("x", "p", 1)]
    assert pairwise_cover([]) == []
