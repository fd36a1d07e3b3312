"""Change points: found where a level changes, and seldom where none does."""

import numpy as np
import pytest

from refshard.stats.history import change_points


def noisy(seed: int, *levels: tuple[int, float]) -> list[float]:
    """As many values of each level as it says, with 3 % of noise."""
    drawn = np.random.default_rng(seed)
    return [level * float(np.exp(drawn.normal(0, 0.03))) for count, level in levels for _ in range(count)]


def test_a_change_of_level_is_found_where_it_is() -> None:
    (found,) = change_points(noisy(1, (12, 1.0), (12, 1.2)))
    assert found.index == 12
    assert found.ratio == pytest.approx(1.2, rel=0.03)
    assert found.p <= 0.01


def test_several_changes_come_in_order() -> None:
    found = change_points(noisy(2, (15, 1.0), (15, 1.3), (15, 0.9)))
    assert [point.index for point in found] == [15, 30]
    assert [point.ratio for point in found] == pytest.approx([1.3, 0.9 / 1.3], rel=0.04)


def test_single_slow_runs_are_no_change() -> None:
    values = noisy(3, (30, 1.0))
    values[7] = values[21] = 3.0
    assert change_points(values) == ()


def test_a_steady_series_seldom_changes() -> None:
    """About one in a hundred at the level of 0.01; drawn for good, so the count stays."""
    assert sum(bool(change_points(noisy(seed, (20, 1.0)))) for seed in range(200)) <= 4


def test_what_is_significant_and_small_is_not_told() -> None:
    assert change_points([1.0] * 20 + [1.02] * 20) == ()
    assert len(change_points([1.0] * 20 + [1.03] * 20)) == 1


def test_few_values_tell_nothing() -> None:
    assert change_points([]) == ()
    assert change_points([1.0] * 3 + [2.0] * 2) == ()
    with pytest.raises(ValueError, match="values must be positive and finite"):
        change_points([1.0, 0.0])
