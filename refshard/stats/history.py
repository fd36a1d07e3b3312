"""Where a series of runs changes its level: advice on when to look, for no build fails by it.

The series is split where ranks before and after differ most (the largest standardised rank sum over all splits), if
fewer than one in a hundred permutations of it has a split as large; then each part in the same way. Ranks do not mind
single slow runs, and a permutation knows no distribution. After Pettitt, "A non-parametric approach to the change-point
problem", 1979, with binary segmentation (Scott and Knott, 1974).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy import stats

FEWEST = 3
"""Values on either side of a change."""
LEVEL = 0.01
RELEVANT = 0.025
"""Smaller changes are not told: significant is not relevant."""
_PERMUTATIONS = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """``index`` is that of the first value of the new level, ``ratio`` the new median over the old one."""

    index: int
    ratio: float
    p: float


def change_points(values: Sequence[float]) -> tuple[ChangePoint, ...]:
    """Changes of level, in order. Fewer than ten values have too few permutations to show one.

    Raises:
        ValueError: a value is not positive and finite.
    """
    series = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(series).all() and (series > 0).all()):
        raise ValueError("values must be positive and finite; leave out runs that have none")
    if not (splits := sorted(_splits(series, 0))):
        return ()
    bounds = [0, *(split for split, _ in splits), len(series)]
    levels = [float(np.median(series[start:end])) for start, end in pairwise(bounds)]
    return tuple(
        ChangePoint(index=split, ratio=after / before, p=p)
        for (split, p), before, after in zip(splits, levels, levels[1:])
        if abs(math.log(after / before)) > math.log1p(RELEVANT)
    )


def _splits(series: npt.NDArray[np.float64], offset: int) -> list[tuple[int, float]]:
    """Index and p of each split of the series, which begins at ``offset``."""
    if len(series) < 2 * FEWEST:
        return []
    ranks = stats.rankdata(series)
    found = _contrasts(ranks[np.newaxis])[0]
    best = int(found.argmax())
    drawn = np.random.default_rng(len(series))
    permuted = drawn.permuted(np.tile(ranks, (_PERMUTATIONS, 1)), axis=1)
    as_large = int((_contrasts(permuted).max(axis=1) >= found[best] - 1e-9).sum())
    p = (as_large + 1) / (_PERMUTATIONS + 1)
    if p >= LEVEL:
        return []
    split = FEWEST + best
    return [*_splits(series[:split], offset), (offset + split, p), *_splits(series[split:], offset + split)]


def _contrasts(ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Standardised rank sum of what comes before each split, [series, splits]; of [series, values]."""
    n = ranks.shape[1]
    before = np.arange(FEWEST, n - FEWEST + 1)
    sums = ranks.cumsum(axis=1)[:, before - 1]
    contrasts: npt.NDArray[np.float64] = np.abs(sums - before * (n + 1) / 2) / np.sqrt(
        before * (n - before) * (n + 1) / 12
    )
    return contrasts
