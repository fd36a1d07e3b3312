"""The interval of a difference of two means, against its closed form."""

import math

import numpy as np
import pytest
from scipy import stats

from refshard.analysis.means import change_of_means


def test_the_interval_is_welchs() -> None:
    a, b = np.array([10.0, 12.0, 11.0, 15.0]), np.array([20.0, 26.0, 23.0])
    errors = [x.var(ddof=1) / len(x) for x in (a, b)]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (a, b)))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert change_of_means(a, b) == pytest.approx((11 - half, 11 + half))
    low, high = change_of_means(a, b) or (0, 0)
    assert change_of_means(b, a) == pytest.approx((-high, -low))


def test_values_that_do_not_vary_leave_nothing_open() -> None:
    assert change_of_means(np.array([2.0] * 3), np.array([5.0] * 4)) == (3, 3)


def test_fewer_than_three_values_tell_nothing() -> None:
    assert change_of_means(np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0])) is None
