"""Whether B differs from A, by how much, and whether it could be chance.

The answer is a ratio of medians, B over A, with a 95 % interval. *Significant* means that the interval
excludes 1; it does not mean that the difference is large enough to care.

Method. Rounds are interleaved (A1 B1 A2 B2 ...), so what the machine does during a round it does to both
sides, and the ratio within a round cancels it. From three common rounds on, the estimate is the median over
rounds of log(median of B's steps / median of A's steps), and rounds are resampled. Sides of two runs share
no round: from three launches of each on, the medians of their launches are compared, and launches are
resampled on each side. With fewer of either, the medians of all steps are compared and steps are resampled
on each side, with a warning. In each case the interval is Student's t times the bootstrap standard error
(:func:`refshard.stats.sample.half_width`).

Limits. Steps of one launch are not independent, so an interval over steps is too narrow by an unknown
factor: that is what the warning is about. One comparison in twenty errs; whoever picks the best of many
strategies and then compares it with the others errs more often. An effect that is the same in every round
(an unlucky choice of kernel that is cached, a busy neighbour) is invisible to any interval.
"""

import math
from dataclasses import dataclass

import numpy as np

from refshard.stats.sample import (
    MIN_LAUNCHES,
    Launches,
    Samples,
    doubts,
    exponential,
    half_width,
    launch_medians,
    pool,
    standard_error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ratio of medians of B over A: 1.1 means that B's are 10 % larger.

    ``low`` and ``high`` bound the 95 % interval; 0 and infinity say that nothing is known. ``n_a`` and
    ``n_b`` count the samples used on each side.
    """

    ratio: float
    low: float
    high: float
    n_a: int
    n_b: int
    warnings: tuple[str, ...] = ()

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
    common = sorted(a.keys() & b.keys())
    if interleaved and len(common) >= MIN_LAUNCHES:
        return _over_rounds(a, b, common)
    if not interleaved and min(len(a), len(b)) >= MIN_LAUNCHES:
        return _apart(launch_medians(a), launch_medians(b), len(pool(a)), len(pool(b)), ())
    a_steps, b_steps = pool(a), pool(b)
    warnings = doubts(min(len(a), len(b)), min(len(a_steps), len(b_steps))) or _unmatched(len(common))
    return _apart(a_steps, b_steps, len(a_steps), len(b_steps), warnings)


def _over_rounds(a: Launches, b: Launches, common: list[int]) -> Comparison:
    a_used, b_used = ({key: side[key] for key in common} for side in (a, b))
    n_a, n_b = len(pool(a_used)), len(pool(b_used))
    log_ratios = np.log(launch_medians(b_used)) - np.log(launch_medians(a_used))
    return _comparison(
        float(np.median(log_ratios)),
        half_width(standard_error(log_ratios), len(common) - 1),
        n_a,
        n_b,
        _unpaired(len(a) + len(b) - 2 * len(common)),
    )


def _apart(a: Samples, b: Samples, n_a: int, n_b: int, warnings: tuple[str, ...]) -> Comparison:
    """Steps, or medians of launches, of two sides that share no round."""
    # Errors of independent sides add as squares; the smaller side is the lower bound of Welch's freedom.
    error = math.hypot(standard_error(np.log(a)), standard_error(np.log(b)))
    log_ratio = math.log(np.median(b)) - math.log(np.median(a))
    return _comparison(log_ratio, half_width(error, min(len(a), len(b)) - 1), n_a, n_b, warnings)


def _comparison(log_ratio: float, half: float, n_a: int, n_b: int, warnings: tuple[str, ...]) -> Comparison:
    return Comparison(
        ratio=math.exp(log_ratio),
        low=exponential(log_ratio - half),
        high=exponential(log_ratio + half),
        n_a=n_a,
        n_b=n_b,
        warnings=warnings,
    )


def _unpaired(launches: int) -> tuple[str, ...]:
    if not launches:
        return ()
    return (f"{launches} {'launch' if launches == 1 else 'launches'} left out, without a partner in its round",)


def _unmatched(common: int) -> tuple[str, ...]:
    hold = "1 round holds" if common == 1 else f"{common} rounds hold"
    return (
        f"only {hold} both sides ({MIN_LAUNCHES} needed): the interval comes from steps alone, "
        "so launch-to-launch variation is under-sampled",
    )
