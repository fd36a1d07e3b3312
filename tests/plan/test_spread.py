"""Error bars by kind of configuration."""

from typing import Any

import pytest

from refshard.plan.plan import KindSpread, Spread, kind_of, load_spread
from refshard.specs.hardware import load_hardware
from refshard.specs.model import load_model
from tests.plan.made import job


def spread(**kinds: tuple[float, float]) -> Spread:
    return Spread(
        kinds={
            name: KindSpread(count=9, sources=2, median=0.03, within=0.03, low=low, high=high)
            for name, (low, high) in kinds.items()
        }
    )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"dp_shard": 64}, "data parallel, bf16"),
        ({"dp_shard": 8, "dp_replicate": 8, "precision": "fp8"}, "data parallel, fp8"),
        ({"tp": 2}, "tensor or context parallel, bf16"),
        ({"cp": 2, "precision": "fp32"}, "tensor or context parallel, fp32"),
        ({"tp": 8, "cp": 2, "pp": 2}, "pipeline parallel, bf16"),
    ],
)
def test_a_kind_is_what_is_divided_and_the_precision(fields: dict[str, Any], kind: str) -> None:
    assert kind_of(job(**fields), load_model("llama3-8b"), load_hardware("h100-sxm-80gb")) == f"dense, {kind}, Hopper"


@pytest.mark.parametrize(
    ("hardware", "family"),
    [
        ("h100-sxm-80gb", "Hopper"), ("h200-sxm", "Hopper"), ("gb300", "Blackwell"), ("a100-40gb", "A100"),
        ("mi300x", "MI300"), ("rtx-4090", "Ada"),
    ],
)  # fmt: skip
def test_a_kind_tells_mixtures_and_families_of_gpus(hardware: str, family: str) -> None:
    kind = kind_of(job(dp_shard=8), load_model("qwen3-30b-a3b"), load_hardware(hardware))
    assert kind == f"experts, data parallel, bf16, {family}"


def test_kinds_with_too_few_runs_of_their_own_have_no_figures() -> None:
    made = spread(mine=(0.8, 1.2))
    made.kinds["rare"] = KindSpread(count=3, sources=2, median=0.03, within=0.03, low=0.9, high=1.1)
    assert made.bounds("mine") == (0.8, 1.2)
    assert (made.bounds("rare"), made.why_unknown("rare")) == (None, "only 3 published runs of this kind")
    assert (made.bounds("none"), made.why_unknown("none")) == (None, "no published run of this kind")


def test_bounds_enclose_the_prediction() -> None:
    assert spread(x=(1.05, 1.2)).bounds("x") == (1.0, 1.2)
    assert spread(x=(0.8, 0.95)).bounds("x") == (0.8, 1.0)


def test_what_ships_has_figures_that_can_be() -> None:
    found = load_spread()
    for kind, figures in found.kinds.items():
        assert 0 < figures.median < (0.2 if kind.startswith("dense") else 0.5)
        assert 0.5 < figures.low <= figures.high < 2.5
    for kind in ("dense, data parallel, bf16, MI300", "dense, data parallel, bf16, Ada"):
        assert found.why_unknown(kind) == "no published run of this kind"
