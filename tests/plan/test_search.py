"""The search, against estimates of every configuration one by one."""

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.plan.memory import FRAGMENTATION
from refshard.plan.search import AUTO, MODEL_PARALLEL_PART, Found, search
from refshard.plan.space import ALL, Candidates, Space, candidates
from refshard.quantities import GIB
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job
from refshard.specs.model import load_model
from tests.plan.made import columns, estimated, job

SEQ_LEN = 8192
SPACE = Space(
    strategies=("fsdp2", "megatron", "ddp"), tp=ALL, pp=ALL,
    cp=(1, 2), interleave=ALL, dp_replicate=ALL, microbatch=(1, 2), checkpointing=(AUTO, "selective"),
    gpus=16, global_batch=64, seq_len=8192,
)  # fmt: skip
ON = load_cluster("dgx-h100x2")


def automatic(*rows: Job) -> Candidates:
    """These rows, with as few layers checkpointed as fit."""
    made = columns(*(msgspec.structs.replace(row, checkpointing="none") for row in rows))
    return Candidates(made.columns, {**made.labels, "checkpointing": (AUTO,)})


def found(rows: Candidates, usable: float, model: str = "llama3-8b") -> Found:
    return search(load_model(model), load_cluster("dgx-h100x16"), SEQ_LEN, rows, int(usable) / (1 - FRAGMENTATION))


@cache
def needs(row: Job, model: str) -> dict[str, float]:
    """Peaks by the number of layers that are checkpointed, none first."""
    layers = -(-load_model(model).n_layers // row.pp)
    words = ["none", *(f"first-{count}" for count in range(1, layers + 1))]
    rows = [msgspec.structs.replace(row, checkpointing=word) for word in words]
    return dict(zip(words, estimated(*rows, model=model, seq_len=SEQ_LEN).memory.peak.tolist()))


ROWS: list[dict[str, Any]] = [
    {"dp_shard": 8}, {"dp_shard": 128}, {"dp_shard": 8, "microbatch": 2},
    {"dp_shard": 8, "microbatches": 4, "reduce_each": False},
    {"strategy": "refshard-yafsdp", "dp_shard": 16}, {"strategy": "refshard-zero1", "dp_shard": 8}, {"strategy": "ddp"},
    {"strategy": "megatron", "dp_shard": 4, "tp": 2, "pp": 4, "microbatches": 8, "compiled": True},
    {"strategy": "megatron", "pp": 16, "microbatches": 16, "microbatch": 2},
]  # fmt: skip


@pytest.mark.processes
@given(usable_gib=st.floats(1, 200), chosen=st.lists(st.sampled_from(ROWS), min_size=1, max_size=4))
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_as_few_layers_are_checkpointed_as_fit(model: str, usable_gib: float, chosen: list[dict[str, Any]]) -> None:
    rows, usable = [job(**fields) for fields in chosen], usable_gib * GIB
    resolved = found(automatic(*rows), usable, model).estimates.candidates
    for place, row in enumerate(rows):
        peaks, word = needs(row, model), str(resolved.job(place).checkpointing)
        divided = row.tp * row.cp * row.pp > 1
        limit = int(usable) * (MODEL_PARALLEL_PART if divided else 1.0)
        fitting = [count for count, peak in peaks.items() if peak <= limit]
        assert word == fitting[0] if fitting else peaks[word] == min(peaks.values())


def test_policies_that_are_named_stay() -> None:
    rows = [job(dp_shard=8, checkpointing=word) for word in ("full", "none", "first-7")]
    made = columns(*rows)
    mixed = Candidates(made.columns, {**made.labels, "checkpointing": ("full", AUTO, "first-7")})
    resolved = found(mixed, 1000 * GIB).estimates.candidates
    assert [resolved.job(place).checkpointing for place in range(3)] == ["full", "none", "first-7"]


def all_of(usable: int) -> tuple[Candidates, Found]:
    rows = candidates(SPACE, load_model("llama3-8b"), ON)
    return rows, search(load_model("llama3-8b"), ON, SEQ_LEN, rows, usable / (1 - FRAGMENTATION))


def test_every_configuration_is_estimated_once_and_those_that_fit_are_ranked() -> None:
    usable = 30 * GIB
    rows, result = all_of(usable)
    assert len(result.estimates.step_s) == len(result.fits) == len(rows) > 100
    kept = result.estimates.candidates
    for field in ("strategy", "tp", "cp", "pp", "dp_replicate", "microbatch", "microbatches"):
        assert (kept[field] == rows[field]).all(), "rows keep their order"
    divided = kept["tp"] * kept["cp"] * kept["pp"] > 1
    limits = np.where(divided, MODEL_PARALLEL_PART, 1.0) * usable
    assert (result.fits == (result.estimates.memory.peak <= limits)).all()
    assert 0 < result.fits.sum() < len(rows)
    assert sorted(result.order.tolist()) == np.flatnonzero(result.fits).tolist()


def test_the_order_is_by_tokens_a_second_and_of_equals_the_first_comes_first() -> None:
    _, result = all_of(60 * GIB)
    steps = result.estimates.step_s
    assert result.tokens_per_s_gpu == pytest.approx(64 * SEQ_LEN / steps / 16)
    ranked = [(-result.tokens_per_s_gpu[place], place) for place in result.order]
    assert ranked == sorted(ranked)


def test_the_first_is_the_fastest_of_all_that_fit_one_by_one() -> None:
    usable = 40 * GIB
    rows, result = all_of(usable)
    best = np.inf
    for place in range(0, len(rows), 31):
        row = result.estimates.candidates.job(place)
        alone = estimated(row, cluster=ON, seq_len=SEQ_LEN)
        if alone.memory.peak[0] <= usable:
            best = min(best, float(alone.step_s[0]))
    assert result.estimates.step_s[result.order[0]] <= best


def test_nothing_that_fits_is_no_order() -> None:
    _, result = all_of(GIB // 8)
    assert not len(result.order)
    assert not result.fits.any()
