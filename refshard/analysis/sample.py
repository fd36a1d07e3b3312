"""From raw step times to one number with an interval.

Steps of one launch share a process layout, a memory layout and a clock state; launches do not, and their medians often
differ by more than their steps do. So the launch is the unit of evidence. Three launches give an interval; fewer give a
point estimate and no interval, however many steps they hold.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

Samples: TypeAlias = npt.NDArray[np.float64]
"""Positive samples in the order of their steps, [n] s."""
Launches: TypeAlias = Mapping[int, Samples]
"""Samples by launch; the key is the round in which the launch took place."""

CONFIDENCE = 0.95
MIN_LAUNCHES = 3
"""Launches from which on there is an interval, and a ranking."""

_RESAMPLES = 2000  # the bootstrap's own error of a standard error is then 1 / sqrt(2 * 2000), under 2 %
_LARGEST_EXPONENT = math.log(sys.float_info.max)
_SEED = 20240917  # fixed, so that a report of one run reads the same every time


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A metric of one case over its launches.

    ``low`` and ``high`` bound the 95 % interval of ``median`` in the metric's unit; they are 0 and infinity
    under three launches. ``n`` counts samples and ``launches`` the launches that gave them.
    """

    median: float
    low: float
    high: float
    n: int
    launches: int
    warnings: tuple[str, ...] = ()


def step_samples(step_times_s: Sequence[Sequence[float]]) -> Samples:
    """The maximum over ranks of each step's time, [steps] s; ``step_times_s`` is ``[rank][step]``, perhaps empty.

    Raises:
        ValueError: the ranks hold different numbers of steps.
    """
    if not step_times_s:
        return np.empty(0, np.float64)
    counts = sorted({len(steps) for steps in step_times_s})
    if len(counts) > 1:
        raise ValueError(f"every rank must hold as many steps, got {counts}; the record is damaged")
    slowest: Samples = np.asarray(step_times_s, dtype=np.float64).max(axis=0)
    return slowest


def summarize(launches: Launches) -> Summary:
    """The median of the launches' medians, from three launches on with its 95 % interval.

    The interval is :func:`half_width` around it on a logarithmic scale, because times are positive and their
    noise multiplies.

    Raises:
        ValueError: there is no sample, or one that is not positive and finite.
    """
    pooled, medians = pool(launches), launch_medians(launches)
    median = float(np.median(medians))
    factor = exponential(half_width(np.log(medians)))
    return Summary(
        median=median,
        low=median / factor,
        high=median * factor,
        n=len(pooled),
        launches=len(launches),
        warnings=too_few(len(launches)),
    )


def pool(launches: Launches) -> Samples:
    """All samples in the order of their rounds, [n].

    Raises:
        ValueError: a launch holds no sample, or one that is not positive and finite.
    """
    if not launches or any(not len(samples) for samples in launches.values()):
        raise ValueError("every launch must hold samples, got none; leave out launches without samples")
    pooled = np.concatenate([launches[key] for key in sorted(launches)])
    wrong = pooled[~(np.isfinite(pooled) & (pooled > 0))]
    if len(wrong):
        raise ValueError(f"samples must be positive and finite, got {wrong[0]}; the record is damaged")
    return pooled


def launch_medians(launches: Launches) -> Samples:
    """The median step of each launch, [launches] in the order of their rounds."""
    return np.array([np.median(launches[key]) for key in sorted(launches)], dtype=np.float64)


def standard_error(values: Samples) -> float:
    """Bootstrap standard error of the median of ``values``, [n], two or more."""
    if np.ptp(values) == 0:  # the bootstrap would return its rounding errors
        return 0.0
    drawn = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=_RESAMPLES,
        method="percentile",  # the cheapest: its interval is not used, see half_width
        rng=np.random.default_rng(_SEED),
    )
    return float(drawn.standard_error)


def half_width(*sides: Samples) -> float:
    """Half of the 95 % interval of the median of one side, or of the difference of two; infinite under three launches.

    Student's t times the bootstrap standard error. Errors of independent sides add as squares; the smaller side's
    degrees of freedom are the lower bound of Welch's.

    A percentile interval over n launches reaches no further than the most extreme of them, and so covers a median with
    a probability of at most 1 - 2**(1 - n): 75 % with three launches. The t interval with a bootstrap standard error
    (T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69(4), 2015) covers 95 to
    97 % in simulation, for the median of 3 to 12 normal launches.
    """
    fewest = min(map(len, sides))
    if fewest < MIN_LAUNCHES:
        return float("inf")
    error = math.hypot(*map(standard_error, sides))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, fewest - 1)) * error


def exponential(x: float) -> float:
    """``exp(x)``, infinite where a float cannot hold it: an interval that wide says nothing either way."""
    return math.exp(x) if x < _LARGEST_EXPONENT else float("inf")


def too_few(launches: int) -> tuple[str, ...]:
    """Why this many launches give no interval; empty if they give one."""
    return () if launches >= MIN_LAUNCHES else (f"n = {launches}: no interval",)


def change_of_means(a: Samples, b: Samples) -> tuple[float, float] | None:
    """The 95 % interval of ``b.mean() - a.mean()`` of independent values (Welch's t); None under three on a side.

    >>> change_of_means(np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])) is None
    True
    """
    if min(len(a), len(b)) < MIN_LAUNCHES:
        return None
    if np.ptp(a) == np.ptp(b) == 0:  # no variance, no degrees of freedom
        return (float(b[0] - a[0]),) * 2
    interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high)
