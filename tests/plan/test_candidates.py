"""Configurations as columns, and back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refshard.plan.cost_models import COST_MODELS
from refshard.plan.estimate import estimate
from refshard.plan.memory import PARTS
from refshard.plan.space import Candidates, by_distinct
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job
from refshard.specs.model import load_model
from tests.plan.made import SHARED, columns, job

SMALL = st.integers(1, 4)


@st.composite
def configurations(draw: st.DrawFn) -> Job:
    pipeline = draw(SMALL)
    interleave = draw(SMALL) if pipeline > 1 else 1
    schedules = ["interleaved" if interleave > 1 else "1f1b", *["zero-bubble"] * (pipeline > 1)]
    strategy = draw(st.sampled_from(SHARED))
    replicate = draw(SMALL) if COST_MODELS[strategy].by_unit else 1
    return job(
        strategy=strategy, dp_shard=draw(st.integers(1 + (replicate > 1), 4)), dp_replicate=replicate,
        tp=draw(SMALL), cp=draw(st.sampled_from([1, 2, 4])), pp=pipeline, interleave=interleave,
        schedule=draw(st.sampled_from(schedules)),
        microbatch=draw(SMALL), microbatches=draw(SMALL),
        checkpointing=draw(st.sampled_from(["none", "selective", "full", "every-2", "first-3"])),
        precision=draw(st.sampled_from(["bf16", "fp32", "fp8"])), reduction=draw(st.sampled_from(["fp32", "bf16"])),
        attention=draw(st.sampled_from(["flash", "cudnn"])), context_by=draw(st.sampled_from(["ring", "exchange"])),
        **{flag: draw(st.booleans()) for flag in ("reduce_each", "reshard", "compiled", "fused_norms", "offload",
                                                  "overlap_tensor", "overlap_reduction", "overlap_pipeline")},
    )  # fmt: skip


ROWS = st.lists(configurations(), min_size=1, max_size=6)


@given(rows=ROWS)
def test_columns_give_back_the_configurations_that_they_were_made_of(rows: list[Job]) -> None:
    made = Candidates.of(rows)
    assert len(made) == len(rows)
    assert [made.job(place) for place in range(len(rows))] == rows
    assert made["gpus"].tolist() == [row.gpus for row in rows]
    assert made.data_ranks.tolist() == [row.data_ranks for row in rows]
    assert (made.shards * made.replicas).tolist() == [row.data_ranks * row.cp for row in rows]
    shards = [row.dp_shard * row.cp if COST_MODELS[row.strategy].shards_optimizer else row.cp for row in rows]
    assert made.shards.tolist() == shards


@given(rows=ROWS, data=st.data())
def test_some_rows_are_those_configurations(rows: list[Job], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    taken = Candidates.of(rows).take(np.array(places, np.int64))
    assert [taken.job(place) for place in range(len(taken))] == [rows[place] for place in places]


def test_words_are_found_and_mapped() -> None:
    made = columns(*(job(strategy=name) for name in ("ddp", "fsdp2", "ddp", "megatron")))
    assert made.where("strategy", "ddp").tolist() == [True, False, True, False]
    assert made.where("strategy", "fsdp2", "megatron").tolist() == [False, True, False, True]
    assert not made.where("strategy", "fsdp1").any()
    assert made.mapped("strategy", len).tolist() == [3, 5, 3, 8]
    assert made.flag("reshard").tolist() == [True] * 4


@given(numbers=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_each_distinct_row_is_computed_once(numbers: list[tuple[int, int]]) -> None:
    asked: list[tuple[int, int]] = []

    def value(a: int, b: int) -> tuple[float, float]:
        asked.append((a, b))
        return a + b, a * b

    pairs = np.array(numbers, np.int64).reshape(-1, 2)
    found = by_distinct([pairs[:, 0], pairs[:, 1]], value)
    assert sorted(asked) == sorted(set(numbers))
    assert found.T.tolist() == [[a + b, a * b] for a, b in numbers]


@given(rows=st.lists(configurations(), min_size=2, max_size=4))
def test_a_rows_estimate_does_not_depend_on_the_others(rows: list[Job]) -> None:
    model, on = load_model("llama3.2-1b"), load_cluster("dgx-h100x128")
    together = estimate(model, on, 4096, Candidates.of(rows))
    for place, row in enumerate(rows):
        alone = estimate(model, on, 4096, Candidates.of([row]))
        assert alone.step_s[0] == together.step_s[place]
        for part in PARTS:
            assert getattr(alone.memory, part)[0] == getattr(together.memory, part)[place]
