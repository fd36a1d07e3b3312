"""Comparisons against ratios known by hand, their symmetry, and the coverage of their intervals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.compare import Comparison, compare
from refshard.analysis.sample import MIN_LAUNCHES, Launches, Samples

times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12).map(lambda values: np.array(values))
launches = st.lists(times, min_size=1, max_size=5).map(lambda found: dict(enumerate(found)))
few = st.lists(times, min_size=1, max_size=MIN_LAUNCHES - 1).map(lambda found: dict(enumerate(found)))
pairs = st.integers(1, 5).flatmap(
    lambda n: st.tuples(*[st.lists(times, min_size=n, max_size=n).map(lambda x: dict(enumerate(x)))] * 2)
)


def constant(*medians: float) -> dict[int, Samples]:
    """One launch per median, of three equal steps each."""
    return {key: np.full(3, median) for key, median in enumerate(medians)}


def test_the_ratio_is_taken_within_each_round() -> None:
    """The machine slows down fourfold; B stays 10 % slower in every round, so the interval has no width."""
    found = compare(constant(1.0, 2.0, 4.0), constant(1.1, 2.2, 4.4))
    assert (found.ratio, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert (found.launches, found.paired, found.warnings) == (3, True, ())
    assert found.significant


def test_the_median_round_decides() -> None:
    assert compare(constant(1.0, 1.0, 1.0), constant(1.5, 1.2, 9.0)).ratio == pytest.approx(1.5)


def test_rounds_that_disagree_are_not_significant() -> None:
    found = compare(constant(1.0, 1.0, 1.0, 1.0), constant(1.3, 0.8, 1.2, 0.9))
    assert found.low < 1 < found.high
    assert not found.significant


@given(few, launches, st.booleans(), st.booleans())
def test_under_three_launches_of_a_side_nothing_is_significant(
    a: Launches, b: Launches, swapped: bool, interleaved: bool
) -> None:
    """However many steps, however far apart: the rule of section 4 of the design."""
    found = compare(*((b, a) if swapped else (a, b)), interleaved=interleaved)
    assert (found.low, found.high) == (0.0, math.inf)
    assert not found.bounded
    assert not found.significant
    assert found.launches == min(len(a), len(b))
    assert found.warnings[0] == f"n = {found.launches}: no interval"


def test_three_launches_of_the_same_code_that_once_were_called_significant() -> None:
    """One launch of each side with steps that hardly scatter, and medians 82 % apart."""
    found = compare({0: np.linspace(0.99, 1.01, 20)}, {0: np.linspace(1.80, 1.84, 20)})
    assert found.ratio == pytest.approx(1.82)
    assert not found.significant


def test_two_rounds_are_paired_too() -> None:
    found = compare(constant(1.0, 4.0), constant(1.1, 4.4))
    assert found.ratio == pytest.approx(1.1)
    assert found.paired


def test_launches_without_a_partner_are_left_out_and_counted() -> None:
    found = compare(constant(1.0, 1.0, 1.0, 7.0, 7.0), constant(2.0, 2.0, 2.0))
    assert found.ratio == pytest.approx(2.0)
    assert found.warnings == ("2 launches left out: no partner in the same round",)
    assert found.launches == 3


def test_rounds_that_hardly_meet_have_no_interval() -> None:
    early, late = constant(1.0, 1.0, 1.0), {key + 2: steps for key, steps in constant(2.0, 2.0, 2.0).items()}
    found = compare(early, late)
    assert found.warnings == ("n = 1: no interval", "4 launches left out: no partner in the same round")
    assert not found.bounded


@pytest.mark.parametrize(("low", "high", "expected"), [(1.01, 1.2, True), (0.9, 1.1, False), (0.8, 0.99, True)])
def test_significant_means_that_the_interval_excludes_one(low: float, high: float, expected: bool) -> None:
    found = Comparison(ratio=1.0, low=low, high=high, launches=3, paired=True)
    assert found.significant is expected


@given(launches, launches)
def test_the_interval_contains_the_ratio(a: Launches, b: Launches) -> None:
    found = compare(a, b)
    assert found.low <= found.ratio <= found.high


@given(pairs)
def test_swapping_the_sides_inverts_the_ratio_and_its_interval(both: tuple[Launches, Launches]) -> None:
    a, b = both
    forth, back = compare(a, b), compare(b, a)
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert back.low * forth.high == pytest.approx(1) or (back.low, forth.high) == (0.0, math.inf)
    assert forth.significant == back.significant


@given(launches)
def test_nothing_differs_from_itself(a: Launches) -> None:
    found = compare(a, a)
    assert found.ratio == pytest.approx(1)
    assert not found.significant


def simulated(rng: np.random.Generator, rounds: int, steps: int, launch_noise: float) -> dict[int, Samples]:
    """Launches whose medians scatter by ``launch_noise``, of steps that scatter by 2 %, around 1 s."""
    return {
        key: np.exp(rng.normal(rng.normal(0, launch_noise), 0.02, steps)).astype(np.float64) for key in range(rounds)
    }


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 5])
def test_launch_noise_rarely_passes_for_a_difference(rounds: int) -> None:
    """The share of comparisons of the same with the same whose interval contains 1."""
    rng = np.random.default_rng(11)
    found = [compare(*(simulated(rng, rounds, 20, 0.03) for _ in range(2))).significant for _ in range(300)]
    assert 0.92 <= 1 - sum(found) / len(found) < 1


def test_two_runs_share_no_round() -> None:
    """What the machine did in the second round of one says nothing about that of the other: 2.0 over 2.0, 4 over 1."""
    found = compare(constant(1.0, 2.0, 4.0), constant(4.0, 1.0, 2.0), interleaved=False)
    assert found.ratio == pytest.approx(1.0)
    assert found.low < 0.5
    assert found.high > 2
    assert (found.paired, found.warnings) == (False, ())
    assert compare(constant(1.0, 2.0, 4.0), constant(1.0, 2.0, 4.0)).high == 1
