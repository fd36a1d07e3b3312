"""The difference of two means, and how far the scatter of single values leaves it open."""

import numpy as np
from scipy import stats

from refshard.analysis.sample import CONFIDENCE, MIN_LAUNCHES, Samples


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
