"""Rows of columns grouped by what they have in common, and summed by group."""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def grouped(*columns: npt.NDArray[np.generic]) -> tuple[Rows, Rows]:
    """Rows alike in all columns: the first row of each group, and the group of each row; groups are in order."""
    codes, firsts = np.zeros(len(columns[0]), np.int64), np.zeros(0, np.int64)
    for column in columns if len(codes) else ():
        _, place = np.unique(column, return_inverse=True)
        # Numbered anew after each column: the product of all their ranges may not fit an int64.
        _, firsts, codes = np.unique(codes * (int(place.max()) + 1) + place, return_index=True, return_inverse=True)
    return firsts, codes


def sums(group: Rows, values: npt.NDArray[np.generic], count: int) -> Rows:
    """The sum of the values of each of ``count`` groups, exactly."""
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found


def ranges(first: Rows, until: Rows) -> tuple[Rows, Rows]:
    """Every place ``i`` with each number in ``range(first[i], until[i])``."""
    count = np.maximum(0, until - first)
    place = np.repeat(np.arange(len(count)), count)
    return place, np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count) + first[place]
