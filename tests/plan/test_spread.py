"""Error bars by kind of configuration."""

from typing import Any

import pytest

from refshard.plan.plan import KindSpread, Spread, kind_of, load_spread
from tests.plan.made import job


def spread(**kinds: tuple[float, float]) -> Spread:
    return Spread(
        kinds={name: KindSpread(count=9, median=0.03, low=low, high=high) for name, (low, high) in kinds.items()}
    )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"dp_shard": 64}, "data, bf16"),
        ({"dp_shard": 8, "dp_replicate": 8, "precision": "fp8"}, "data, fp8"),
        ({"tp": 2}, "tensor or context, bf16"),
        ({"cp": 2, "precision": "fp32"}, "tensor or context, fp32"),
        ({"tp": 8, "cp": 2, "pp": 2}, "pipeline, bf16"),
    ],
)
def test_a_kind_is_what_is_divided_and_the_precision(fields: dict[str, Any], kind: str) -> None:
    assert kind_of(job(**fields)) == kind


def test_kinds_without_runs_of_their_own_have_the_figures_of_all() -> None:
    made = spread(all=(0.9, 1.1), mine=(0.8, 1.2))
    assert made.bounds("mine") == (0.8, 1.2)
    assert made.bounds("another") == (0.9, 1.1)
    assert made.of("another") is made.kinds["all"]


def test_bounds_enclose_the_prediction() -> None:
    assert spread(all=(1.05, 1.2)).bounds("x") == (1.0, 1.2)
    assert spread(all=(0.8, 0.95)).bounds("x") == (0.8, 1.0)


def test_what_ships_has_figures_that_can_be() -> None:
    found = load_spread().kinds
    assert "all" in found
    for figures in found.values():
        assert 0 < figures.median < 0.2
        assert 0.5 < figures.low <= figures.high < 2
        assert figures.count >= 5
