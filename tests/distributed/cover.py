"""A pairwise cover: few cells of a matrix of three factors in which every pair of values still meets."""

from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

Cell = TypeVar("Cell", bound=tuple[object, ...])
Pair = tuple[tuple[int, object], tuple[int, object]]


def pairs_of(cell: tuple[object, ...]) -> frozenset[Pair]:
    """Every pair of values in ``cell``, each value with its place."""
    return frozenset(combinations(enumerate(cell), 2))


def pairwise_cover(cells: Sequence[Cell]) -> list[Cell]:
    """Choose from ``cells`` so that every pair of values that some cell holds is in a chosen one.

    Greedy and deterministic: the cell with most pairs that are still missing comes next, of equals the earliest.
    """
    missing = set[Pair]().union(*map(pairs_of, cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
