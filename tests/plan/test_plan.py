"""Plans: families, the Pareto front, costs with failures, and what each row says, against all configurations."""

from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.flops import flops_per_token
from refshard.plan.memory import FRAGMENTATION
from refshard.plan.plan import (
    HOUR,
    LESS,
    SLOW,
    TIME_PARTS,
    TRILLION,
    Failures,
    KindSpread,
    Plan,
    Reader,
    Row,
    Size,
    Spread,
    cheapest,
    fastest,
    listed,
    load_spread,
    ranked,
)
from refshard.plan.search import AUTO, Found, search
from refshard.plan.space import ALL, Space, candidates
from refshard.quantities import GIB
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from tests.plan.made import columns, job

MODEL, CLUSTER, SEQ_LEN = load_model("llama3-8b"), load_cluster("dgx-h100x2"), 8192
READER = Reader(model=MODEL, cluster=CLUSTER, seq_len=SEQ_LEN, price_usd=2.0, failures=Failures(), spread=load_spread())


@cache
def found(usable: int = 40 * GIB) -> Found:
    space = Space(
        strategies=("fsdp2", "megatron", "ddp"), tp=ALL, pp=ALL,
        cp=(1, 2), interleave=ALL, dp_replicate=ALL, microbatch=(1, 2), checkpointing=(AUTO, "selective"),
    gpus=16, global_batch=64, seq_len=8192,
    )  # fmt: skip
    return search(MODEL, CLUSTER, SEQ_LEN, candidates(space, MODEL, CLUSTER), usable / (1 - FRAGMENTATION))


def family(row: Row) -> tuple[Any, ...]:
    one = row.job
    return one.strategy, one.tp, one.cp, one.pp, one.schedule


@cache
def every(*, fits: bool, usable: int = 40 * GIB) -> list[Row]:
    """All that fit, or do not."""
    result = found(usable)
    return [READER.row(result, int(place)) for place in np.flatnonzero(result.fits == fits)]


@pytest.mark.slow
def test_rows_are_the_best_of_each_family_best_first() -> None:
    result = found()
    size, rows = READER.size(result, most=1000), every(fits=True)
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[family(row)] = min(best.get(family(row), np.inf), row.step_s)
    assert {family(row): row.step_s for row in size.rows} == best
    assert len(size.rows) == len(best) > 10
    assert [row.step_s for row in size.rows] == sorted(best.values())
    assert (size.considered, size.fitting, size.gpus) == (len(result.fits), len(rows), 16)
    assert READER.size(result, most=3).rows == size.rows[:3]


@pytest.mark.slow
def test_strategies_of_which_nothing_fits_are_listed_with_the_least_that_they_need() -> None:
    little = 12 * GIB
    size = READER.size(found(little), most=1000)
    fitting = {row.job.strategy for row in every(fits=True, usable=little)}
    least: dict[str, int] = {}
    for row in every(fits=False, usable=little):
        strategy = row.job.strategy
        if strategy not in fitting:
            least[strategy] = min(least.get(strategy, 10**15), row.peak_bytes)
    assert {row.job.strategy: row.peak_bytes for row in size.unfit} == least != {}
    assert [row.peak_bytes for row in size.unfit] == sorted(least.values())
    assert not any(row.fits for row in size.unfit)
    assert all(row.fits for row in size.rows)


@pytest.mark.slow
def test_no_configuration_is_faster_and_relevantly_smaller_than_one_of_the_front() -> None:
    result = found()
    front, rows = READER.size(result, most=8).front, every(fits=True)
    assert front[0].step_s == min(row.step_s for row in rows)
    assert len(front) > 2
    for one, other in pairwise(front):
        assert other.step_s >= one.step_s
        assert other.peak_bytes < LESS * one.peak_bytes + 1
    for one in front:
        assert not [row for row in rows if row.step_s < one.step_s and row.peak_bytes < one.peak_bytes]
    for row in rows:
        if row.step_s <= SLOW * front[0].step_s:
            assert any(one.step_s <= row.step_s and LESS * one.peak_bytes <= row.peak_bytes + 1 for one in front)
    assert front[-1].step_s <= SLOW * front[0].step_s


def test_a_rows_figures_follow_from_its_step_time() -> None:
    result = found()
    for row in READER.size(result, most=8).rows:
        tokens = row.job.global_batch * SEQ_LEN
        assert row.tokens_per_s_gpu == pytest.approx(tokens / row.step_s / 16)
        assert row.flops_convention != "counted"
        flops = flops_per_token(MODEL, SEQ_LEN, row.flops_convention)
        assert row.tflops == pytest.approx(row.tokens_per_s_gpu * flops / 1e12)
        assert row.mfu == pytest.approx(row.tflops * 1e12 / CLUSTER.accelerator.matmul["bf16"].peak)
        assert row.parts.keys() == {*TIME_PARTS}
        assert sum(row.parts.values()) == pytest.approx(row.step_s)
        assert sum(row.memory.values()) == pytest.approx(row.peak_bytes, abs=10)
        assert row.low_s is not None
        assert row.high_s is not None
        assert row.low_s <= row.step_s <= row.high_s
        assert row.gpu_hours == pytest.approx(TRILLION / row.tokens_per_s_gpu / HOUR / row.goodput)
        assert row.cost_usd == 2 * row.gpu_hours
        assert 0 <= row.checkpointed <= row.layers == -(-32 // row.job.pp)


def test_fp8_is_held_against_the_peak_of_fp8_and_layers_are_counted() -> None:
    rows = columns(
        *(job(dp_shard=16, precision="fp8", checkpointing=word) for word in ("none", "first-5", "every-3", "full"))
    )
    result = search(MODEL, CLUSTER, SEQ_LEN, rows, 80 * GIB)
    made = [READER.row(result, place) for place in range(4)]
    assert [row.checkpointed for row in made] == [0, 5, 10, 32]
    for row in made:
        assert row.mfu == pytest.approx(row.tflops * 1e12 / CLUSTER.accelerator.matmul["fp8"].peak)
        assert row.kind == "dense, data parallel, fp8, Hopper"


def part_that_counts(failures: Failures, ranks: int, interval_s: float) -> float:
    """What is left where checkpoints are saved every so often: each failure loses half an interval, and a restart."""
    between_s = failures.mtbf_hours * HOUR / ranks
    return 1 - failures.save_s / interval_s - (interval_s / 2 + failures.restart_s) / between_s


@given(
    mtbf=st.floats(100, 1e6), save=st.floats(1, 600), restart=st.floats(0, 3600), ranks=st.integers(1, 100_000),
    interval=st.floats(1, 1e7),
)  # fmt: skip
def test_no_other_interval_between_checkpoints_loses_less(
    mtbf: float, save: float, restart: float, ranks: int, interval: float
) -> None:
    failures = Failures(mtbf_hours=mtbf, save_s=save, restart_s=restart)
    goodput = failures.goodput(ranks)
    assert 0 <= goodput < 1
    assert goodput >= part_that_counts(failures, ranks, interval) - 1e-9
    best = (2 * save * mtbf * HOUR / ranks) ** 0.5
    assert goodput == pytest.approx(max(0.0, part_that_counts(failures, ranks, best)), abs=1e-9)
    assert failures.goodput(ranks + 1) <= goodput


def test_failures_are_as_frequent_as_in_the_training_of_llama_3() -> None:
    """419 unexpected interruptions in 54 days of 16,384 GPUs."""
    assert Failures().mtbf_hours / 16384 == pytest.approx(54 * 24 / 419, rel=0.01)
    assert Failures().goodput(16384) == pytest.approx(0.84, abs=0.02)
    assert Failures(mtbf_hours=1.0).goodput(16384) == 0


def row(ranks: int, step_s: float, gpu_hours: float) -> Row:
    return Row(
        job=job(dp_shard=ranks), fits=True, kind="data, bf16", step_s=step_s, low_s=step_s,
        high_s=step_s, tokens_per_s_gpu=1.0, tflops=1.0, mfu=0.5, parts={}, peak_bytes=1, usable_bytes=1,
        memory={}, checkpointed=0, layers=1, goodput=1.0, gpu_hours=gpu_hours, cost_usd=gpu_hours,
    )  # fmt: skip


def plan(*sizes: tuple[Row, ...]) -> Plan:
    made = [Size(gpus=2**n, considered=9, fitting=9, rows=s, front=(), unfit=()) for n, s in enumerate(sizes)]
    return Plan(
        sizes=tuple(made), global_batch=1, seq_len=1, available_bytes=1, price_usd=1.0,
        failures=Failures(),
    )  # fmt: skip


def test_the_fastest_is_on_the_largest_size_that_has_any_and_the_cheapest_on_any() -> None:
    small, middle = row(8, 9.0, 100.0), row(16, 5.0, 110.0)
    made = plan((small, row(8, 9.5, 90.0)), (middle,), ())
    assert fastest(made) is middle
    assert cheapest(made) is small, "each size's first row is its best"
    assert made.largest.gpus == 4
    assert fastest(plan((), ())) is None
    assert cheapest(plan((), ())) is None


def test_the_first_row_that_does_not_tie_is_shown_though_more_tie_than_are_shown() -> None:
    spread = Spread(kinds={"data, bf16": KindSpread(count=9, sources=2, median=0.05, within=0.05, low=0.9, high=1.1)})
    rows = [row(8, seconds, 1.0) for seconds in (1.0, 1.01, 1.04, 1.05, 1.06, 1.2)]
    tied, after = ranked(rows, spread)
    assert ([one.step_s for one in tied], after) == ([1.01, 1.04, 1.05], rows[4])
    assert listed(rows, 2, (), spread) == [0, 1, 4]
    assert listed(rows[:3], 2, (), spread) == [0, 1]
    assert listed([], 2, (), spread) == []


def test_beside_a_dry_run_are_dry_runs_only() -> None:
    spread = Spread(kinds={"data, bf16": KindSpread(count=9, sources=2, median=0.05, within=0.05, low=0.9, high=1.1)})
    dry = [msgspec.structs.replace(row(8, 1.0, 1.0), dry_step_s=seconds) for seconds in (1.0, 1.02, 1.5)]
    tied, after = ranked([*dry[:2], row(8, 0.9, 1.0), row(8, 1.3, 1.0), dry[2]], spread)
    assert (tied, after) == ([dry[1]], dry[2])
