"""Step samples and their summary, against medians and intervals known by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from refshard.analysis.sample import MIN_LAUNCHES, Samples, change_of_means, standard_error, step_samples, summarize

times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12).map(lambda values: np.array(values))
launches = st.lists(times, min_size=1, max_size=6).map(lambda found: dict(enumerate(found)))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert step_samples(((1.0, 5.0, 3.0), (2.0, 4.0, 3.5))).tolist() == [2.0, 5.0, 3.5]


def test_a_case_without_samples_gives_none() -> None:
    assert step_samples(()).shape == (0,)


def test_ranks_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"every rank must hold as many steps, got \[1, 2\]"):
        step_samples(((1.0, 5.0), (2.0,)))


def test_the_launch_is_the_sample() -> None:
    """A launch with many slow steps counts once: its median is one of three."""
    found = summarize({0: np.full(3, 1.0), 1: np.full(3, 2.0), 2: np.full(100, 9.0)})
    assert (found.median, found.n, found.launches, found.warnings) == (2.0, 106, 3, ())


def test_two_launches_have_a_median_and_no_interval() -> None:
    found = summarize({0: np.array([1.0, 2.0, 3.0]), 1: np.array([4.0, 5.0])})
    assert (found.median, found.n, found.launches) == (3.25, 5, 2)
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.warnings == ("n = 2: no interval",)


@given(st.lists(times, min_size=1, max_size=MIN_LAUNCHES - 1))
def test_steps_alone_never_make_an_interval(found: list[Samples]) -> None:
    summary = summarize(dict(enumerate(found)))
    assert (summary.low, summary.high) == (0.0, math.inf)
    assert summary.warnings == (f"n = {len(found)}: no interval",)


def test_equal_launches_leave_an_interval_without_width() -> None:
    found = summarize(dict.fromkeys(range(3), np.full(20, 0.25)))
    assert (found.low, found.median, found.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        summarize({0: np.array([1.0, wrong])})


def test_a_launch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out launches without samples"):
        summarize({0: np.array([1.0]), 1: np.array([])})


@pytest.mark.slow
def test_standard_error_of_the_median_agrees_with_theory() -> None:
    """For n normal samples it tends to sqrt(pi / 2n); n = 4,000 puts the bootstrap within a tenth of it."""
    normal: Samples = np.random.default_rng(3).normal(size=4000)
    assert standard_error(normal) == pytest.approx(math.sqrt(math.pi / 2 / 4000), rel=0.1)


@given(launches)
def test_the_interval_contains_the_median(found: dict[int, Samples]) -> None:
    summary = summarize(found)
    assert summary.low <= summary.median <= summary.high


@given(launches, st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(found: dict[int, Samples], scale: float) -> None:
    plain = summarize(found)
    scaled = summarize({key: samples * scale for key, samples in found.items()})
    assert scaled.median == pytest.approx(plain.median * scale)
    assert scaled.high == pytest.approx(plain.high * scale, rel=1e-6)


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
