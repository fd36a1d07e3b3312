"""Forecasts of jobs, and how they are ranked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.errors import SpecError
from refshard.flops import flops_per_token
from refshard.plan.checkpointing import NO_CHECKPOINTING, Checkpointing
from refshard.plan.recipe import RECIPES, find_recipe
from refshard.simulate.forecast import Job, forecast_step
from refshard.simulate.ranking import HOUR, TRILLION, fewest, rank_strategies
from refshard.specs.hardware import Rate
from refshard.specs.model import load_model
from tests.simulate.made import cluster, hardware

GIB = 2**30


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": load_model("llama3.2-1b"),
        "cluster": cluster().of_world_size(16),
        "seq_len": 2048,
    }
    return Job(**{**fields, **changes})


@given(st.integers(0, 200), st.integers(0, 200))
def test_fewest_is_the_first_that_is_enough_and_asks_seldom(most: int, first: int) -> None:
    asked: list[int] = []

    def enough(n: int) -> bool:
        asked.append(n)
        return n >= first

    assert fewest(most, enough) == min(first, most)
    assert len(asked) <= 9


def test_what_fits_goes_first_and_then_what_is_faster() -> None:
    small = job(cluster=cluster(hardware=hardware(memory_bytes=16 * GIB)).of_world_size(16))
    plan = rank_strategies(small, list(RECIPES.values()), NO_CHECKPOINTING, 2.0)
    fits = [row.fits for row in plan.rows]
    assert fits == sorted(fits, reverse=True)
    assert {row.strategy for row in plan.rows if not row.fits} >= {"ddp", "refshard-replicate"}
    times = [row.step.step_time_s for row in plan.rows if row.fits]
    assert times == sorted(times)
    peaks = [row.memory.peak for row in plan.rows if not row.fits]
    assert peaks == sorted(peaks)


def test_auto_checkpoints_as_few_layers_as_fit() -> None:
    tight = job(cluster=cluster(hardware=hardware(memory_bytes=20 * GIB)).of_world_size(16), sequences=4)
    (row,) = rank_strategies(tight, [find_recipe("refshard-fsdp")], "auto", 2.0).rows
    assert row.fits
    assert 0 < row.checkpointed < tight.model.n_layers
    fewer = Checkpointing(frozenset(range(row.checkpointed - 1)))
    (over,) = rank_strategies(tight, [find_recipe("refshard-fsdp")], fewer, 2.0).rows
    assert not over.fits
    assert over.step.step_time_s < row.step.step_time_s


def test_cost_follows_from_throughput_and_price() -> None:
    (row,) = rank_strategies(job(), [find_recipe("refshard-yafsdp")], NO_CHECKPOINTING, 3.0).rows
    tokens = 2048 / row.step.step_time_s
    assert row.step.tokens_per_s_gpu == pytest.approx(tokens)
    assert row.gpu_hours == pytest.approx(TRILLION / tokens / HOUR)
    assert row.cost_usd == pytest.approx(3 * row.gpu_hours)
    assert row.step.mfu == pytest.approx(tokens * flops_per_token(job().model, 2048) / 1e15)


def test_more_microbatches_take_as_much_longer_where_every_one_is_reduced() -> None:
    once, twice = (forecast_step(job(microbatches=n), find_recipe("refshard-fsdp")).step_time_s for n in (1, 2))
    assert 1.9 * once < twice < 2.01 * once


def test_time_lost_to_preparation_is_what_the_step_would_save_without_it() -> None:
    fsdp1, fsdp2, ours = (
        forecast_step(job(seq_len=8192), find_recipe(strategy)).preparation_s
        for strategy in ("fsdp1", "fsdp2", "refshard-yafsdp")
    )
    assert fsdp1 > 0
    assert fsdp2 == ours == 0


def test_a_job_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="replicas must divide the 16 ranks of the cluster, got 3"):
        job(replicas=3)
    rate = {"fp32": Rate(peak=1e15, efficiency=1.0)}
    only_fp32 = cluster(hardware=hardware(matmul=rate, attention=rate))
    with pytest.raises(SpecError, match="dtype: the hardware's profile knows fp32, got bf16"):
        job(cluster=only_fp32)
