"""Whether B differs from A, by how much, and whether it could be chance.

The answer is a ratio, B over A, with a 95 % interval from three launches of each side on. *Significant* means that
the interval excludes 1; it does not mean that the difference is large enough to care.

Method. Rounds are interleaved (A1 B1 A2 B2 ...), so the machine's drift affects both sides of a round and cancels in
their ratio: the estimate is *paired by round*, the median over common rounds of log(median of B's steps / median of A's
steps), and rounds are resampled. Sides without a common round (two runs) are compared by the medians of their launches,
and launches are resampled on each side. In both cases the interval is Student's t times the bootstrap standard error
(:func:`refshard.analysis.sample.half_width`).

Under three launches of either side there is a ratio and no interval: steps of one launch are not independent, so an
interval over steps is too narrow by an unknown factor. The same code launched three times in a quarter of an hour on
a shared machine gave ratios of 1.82, 1.13 and 1.09, each with an interval over steps that excluded 1.

Limits. One comparison in twenty is wrong, and more if the best of many strategies is picked first. An effect that is
the same in every round (a cached kernel that was a bad choice, a busy neighbour) is invisible to any interval.
"""

import math
from dataclasses import dataclass

import numpy as np

from refshard.analysis.sample import Launches, exponential, half_width, launch_medians, pool, too_few

RELEVANT = 0.01
"""Relative difference under which two measured step times count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B over A: 1.1 means that B's are 10 % larger.

    ``low`` and ``high`` bound the 95 % interval; 0 and infinity if there is none. ``launches`` is the count of the side
    with fewer launches, or of the common rounds if the comparison is ``paired`` by round.
    """

    ratio: float
    low: float
    high: float
    launches: int
    paired: bool
    warnings: tuple[str, ...] = ()

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.high)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1 or self.high < 1


def compare(a: Launches, b: Launches, *, interleaved: bool = True) -> Comparison:
    """Compare the samples of B with those of A; the module's text gives the method.

    Swapping A and B inverts the ratio and its interval. ``interleaved`` says whether equal keys are a round of both.

    Raises:
        ValueError: a side has a launch without samples, or a sample that is not positive and finite.
    """
    for side in (a, b):
        pool(side)  # raises if there is an invalid time
    common = sorted(a.keys() & b.keys()) if interleaved else []
    warnings: tuple[str, ...] = ()
    if common:
        in_a, in_b = (np.log(launch_medians({key: side[key] for key in common})) for side in (a, b))
        log_ratio, half, launches = float(np.median(in_b - in_a)), half_width(in_b - in_a), len(common)
        if left_out := len(a) + len(b) - 2 * launches:
            noun = "launch" if left_out == 1 else "launches"
            warnings = (f"{left_out} {noun} left out: no partner in the same round",)
    else:
        medians_a, medians_b = launch_medians(a), launch_medians(b)
        log_ratio = math.log(np.median(medians_b)) - math.log(np.median(medians_a))
        half, launches = half_width(np.log(medians_a), np.log(medians_b)), min(len(a), len(b))
    return Comparison(
        ratio=math.exp(log_ratio),
        low=exponential(log_ratio - half),
        high=exponential(log_ratio + half),
        launches=launches,
        paired=bool(common),
        warnings=(*too_few(launches), *warnings),
    )
