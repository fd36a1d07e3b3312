"""What data parallelism adds to a step, against costs of its collectives, and by its laws."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.costs import collective_cost
from refshard.plan.collectives import group_of
from refshard.plan.cost_models import COST_MODELS
from refshard.plan.kernels import sizes_of
from refshard.specs.cluster import ClusterSpec, LinkSpec, MeasuredCollective
from refshard.specs.hardware import Rate
from refshard.specs.model import load_model
from tests.plan.made import SHARED, cluster, estimated, hardware, job

MODEL = load_model("llama3-8b")
SIZES = sizes_of(MODEL, 1, 1)
ENDLESS = 1e30


def linked() -> ClusterSpec:
    """A cluster on which only links take time."""
    rate = Rate(peak=ENDLESS, efficiency=1.0)
    rates = {"bf16": rate, "fp32": rate}
    on = hardware(matmul=rates, attention=rates, memory_bytes_per_s=ENDLESS)
    return cluster(hardware=on, nodes=16, between=LinkSpec(bytes_per_s=40e9, latency_s=0.0))


def exchanged(*rows: Any, on: ClusterSpec | None = None) -> list[float]:
    return [float(s) for s in estimated(*rows, cluster=on or "dgx-h100x16").exchange_s]


def over(op: Any, nbytes: float, ranks: int = 64) -> float:
    return collective_cost(linked(), op, round(nbytes), group_of(linked(), ranks, 1)).seconds


def test_where_nothing_hides_it_a_step_communicates_what_the_strategy_says() -> None:
    """FSDP gathers each unit twice in bf16 and reduces it once in fp32; the first and both ends' gathers are alone."""
    unit, ends = SIZES.dense, SIZES.embedding + SIZES.head
    gathers = over("all_gather", 2 * unit)
    fsdp = MODEL.n_layers * (2 * gathers + over("reduce_scatter", 4 * unit))
    fsdp += over("all_gather", 2 * ends) + over("reduce_scatter", 4 * ends) + gathers
    ddp = over("all_reduce", 4 * MODEL.params)
    megatron = over("reduce_scatter", 4 * MODEL.params) + over("all_gather", 2 * MODEL.params)
    found = exchanged(
        job(dp_shard=64), job(strategy="ddp", dp_shard=64),
        job(strategy="megatron", dp_shard=64), on=linked(),
    )  # fmt: skip
    assert found == pytest.approx([fsdp, ddp, megatron])


def test_hybrid_sharding_reduces_over_replicas_what_each_has() -> None:
    """Shards within a node gather there; the reduced shards pass between nodes."""
    unit, ends = SIZES.dense, SIZES.embedding + SIZES.head
    between = group_of(linked(), 8, 8)

    def reduced(numel: float) -> float:
        summed = collective_cost(linked(), "all_reduce", round(4 * numel / 8), between).seconds
        return over("reduce_scatter", 4 * numel, 8) + summed

    gathers = over("all_gather", 2 * unit, 8)
    expected = MODEL.n_layers * (2 * gathers + reduced(unit))
    expected += over("all_gather", 2 * ends, 8) + reduced(ends) + gathers
    (found,) = exchanged(job(dp_shard=8, dp_replicate=8), on=linked())
    assert found == pytest.approx(expected)


def test_reduced_once_a_step_each_microbatch_only_gathers() -> None:
    unit, ends = SIZES.dense, SIZES.embedding + SIZES.head
    gathers = over("all_gather", 2 * unit)
    each, once = exchanged(*(job(dp_shard=64, microbatches=4, reduce_each=flag) for flag in (True, False)), on=linked())
    a_microbatch = MODEL.n_layers * (2 * gathers + over("reduce_scatter", 4 * unit))
    alone = over("all_gather", 2 * ends) + over("reduce_scatter", 4 * ends) + gathers
    assert each == pytest.approx(4 * (a_microbatch + alone))
    assert once < each - 3 * MODEL.n_layers * over("reduce_scatter", 4 * unit)
    assert once >= 4 * MODEL.n_layers * 2 * gathers + over("reduce_scatter", 4 * unit)


def test_parameters_that_stay_are_gathered_once() -> None:
    again, stays = exchanged(*(job(dp_shard=64, reshard=flag) for flag in (True, False)), on=linked())
    assert again - stays == pytest.approx(MODEL.n_layers * over("all_gather", 2 * SIZES.dense))
    zero2, fsdp = exchanged(*(job(strategy=f"refshard-{s}", dp_shard=64) for s in ("zero2", "fsdp")), on=linked())
    assert fsdp - zero2 == pytest.approx(again - stays)


def test_half_as_wide_reductions_take_half_as_long() -> None:
    wide, half = exchanged(*(job(dp_shard=64, reduction=dtype) for dtype in ("fp32", "bf16")), on=linked())
    reduced = over("reduce_scatter", 4 * (MODEL.n_layers * SIZES.dense + SIZES.embedding + SIZES.head))
    assert wide - half == pytest.approx(reduced / 2, rel=1e-3)


@pytest.mark.parametrize("strategy", SHARED)
def test_one_rank_exchanges_nothing(strategy: str) -> None:
    """Copies around what would be exchanged are left where the strategy makes them."""
    (found,) = exchanged(job(strategy=strategy), on=linked())
    assert found == pytest.approx(0, abs=1e-9)


@given(
    strategy=st.sampled_from(SHARED), dp_shard=st.sampled_from([8, 64]),
    dp_replicate=st.sampled_from([1, 2]), microbatch=st.sampled_from([1, 4]), microbatches=st.sampled_from([1, 4]),
    flags=st.tuples(*[st.booleans()] * 3),
)  # fmt: skip
def test_it_is_never_negative_and_beside_compute_never_longer_than_alone(
    strategy: str, dp_shard: int, dp_replicate: int, microbatch: int, microbatches: int, flags: tuple[bool, bool, bool]
) -> None:
    each, reshard, overlaps = flags
    row = job(
        strategy=strategy, dp_shard=dp_shard, dp_replicate=dp_replicate, microbatch=microbatch,
        microbatches=microbatches, reduce_each=each, reshard=reshard, overlap_reduction=overlaps,
    )  # fmt: skip
    on = linked()
    computing = cluster(nodes=16, between=on.between, hardware=hardware(memory_bytes_per_s=ENDLESS))
    (hidden,), (alone,) = exchanged(row, on=computing), exchanged(row, on=on)
    assert -1e-9 <= hidden <= alone + 1e-9


def test_enough_compute_hides_all_but_the_first_gather_and_the_last_reduction() -> None:
    ends = SIZES.embedding + SIZES.head
    slow = hardware(memory_bytes_per_s=ENDLESS, matmul=dict.fromkeys(("bf16", "fp32"), Rate(peak=1e12, efficiency=1.0)))
    on = cluster(nodes=16, between=linked().between, hardware=slow)
    fsdp, ddp = exchanged(job(dp_shard=64), job(strategy="ddp", dp_shard=64), on=on)
    first = over("all_gather", 2 * SIZES.dense) + over("all_gather", 2 * ends)
    assert fsdp == pytest.approx(first + over("reduce_scatter", 4 * ends))
    assert ddp == pytest.approx(over("all_reduce", 4 * SIZES.dense))


def test_copies_around_collectives_are_kernels() -> None:
    """FSDP2 copies what it gathered out of one buffer, and gradients into another; the engine gathers in place."""
    rate = Rate(peak=ENDLESS, efficiency=1.0)
    rates = {"bf16": rate, "fp32": rate}
    moving = hardware(matmul=rates, attention=rates, memory_bytes_per_s=1e12)
    link = LinkSpec(bytes_per_s=ENDLESS, latency_s=0.0)
    on = cluster(nodes=16, within=link, between=link, hardware=moving)
    names = ("fsdp2", "refshard-fsdp")
    fsdp2, engine = exchanged(*(job(strategy=name, dp_shard=64) for name in names), on=on)
    unit, cast = SIZES.dense, 6 * SIZES.dense / 64
    costs = {name: COST_MODELS[name] for name in names}
    copied = {name: (one.copies_out, one.copies_in, one.divides) for name, one in costs.items()}
    for name, found in zip(names, (fsdp2, engine)):
        out, into, divides = copied[name]
        nbytes = 2 * (cast + 4 * unit * out) + 6 * unit * into + 14 * unit * divides
        assert found == pytest.approx(MODEL.n_layers * nbytes / 1e12, rel=1e-6), name
    assert fsdp2 > engine


def test_an_estimates_parts_add_up_to_its_step() -> None:
    rows = [
        job(strategy="megatron", dp_shard=4, tp=8, pp=4, microbatches=8),
        job(dp_shard=128, microbatches=2), job(strategy="ddp", dp_shard=128),
        job(strategy="megatron", dp_shard=8, pp=16, microbatches=16, overlap_pipeline=False),
    ]  # fmt: skip
    found = estimated(*rows)
    parts = found.compute_s + found.exchange_s + found.waiting_s + found.optimizer_s + found.straggling_s
    assert parts == pytest.approx(found.step_s)
    assert np.min([found.compute_s, found.exchange_s, found.waiting_s, found.optimizer_s, found.straggling_s]) >= 0


def test_over_gloo_some_strategies_exchange_parts_instead_of_what_gloo_would_do() -> None:
    """FSDP2 does neither, tuned it reduces so, and the engine gathers so too."""
    slow = {"all_gather": 8.0, "reduce_scatter": 32.0, "exchange": 2.0}
    measured = tuple(
        MeasuredCollective(op=op, ranks=8, nodes=1, bytes=nbytes, seconds=seconds * nbytes / 2**30)  # type: ignore[arg-type]
        for op, seconds in slow.items()
        for nbytes in (1, 2**20, 2**30)
    )
    on = msgspec.structs.replace(linked(), library="gloo", nodes=1, between=None, measured=measured)
    unit, ends = SIZES.dense, SIZES.embedding + SIZES.head
    gathered = (2 * MODEL.n_layers * unit + ends + unit) * 2 / 2**30
    reduced = (MODEL.n_layers * unit + ends) * 4 / 2**30
    found = exchanged(*(job(strategy=name, dp_shard=8) for name in ("fsdp2", "fsdp2-tuned", "refshard-fsdp")), on=on)
    assert found == pytest.approx([8 * gathered + 32 * reduced, 8 * gathered + 2 * reduced, 2 * gathered + 2 * reduced])
