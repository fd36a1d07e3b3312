"""Which configurations a search looks at: each can run, and none that can is missing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.plan.space import ALL, LEAST_TOKENS, Candidates, Space, candidates
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Implementation, Job
from refshard.specs.model import load_model
from tests.plan.made import SHARED

EVERY_AXIS: dict[str, Any] = dict.fromkeys(("tp", "pp", "interleave", "cp", "ep", "dp_replicate", "microbatch"), ALL)
CLUSTER = load_cluster("dgx-h100")


def space(*strategies: str, ranks: int = 8, batch: int = 16, seq_len: int = 8192, **fields: Any) -> Space:
    fields = {
        "strategies": strategies or ("fsdp2",),
        "gpus": ranks,
        "global_batch": batch,
        "seq_len": seq_len,
        **fields,
    }
    return Space(**fields)


def enumerated(asked: Space, model: str = "llama3-8b") -> Candidates:
    return candidates(asked, load_model(model), CLUSTER)


def listed(rows: Candidates) -> list[Job]:
    """As values, which check themselves."""
    return [rows.job(place) for place in range(len(rows))]


@given(
    model=st.sampled_from(["llama3-8b", "llama3.2-1b", "llama3.1-405b", "mixtral-8x7b", "gemma3-1b", "deepseek-v3"]),
    ranks=st.sampled_from([1, 2, 6, 8, 12, 16, 24, 48, 64, 128, 72]), batch=st.integers(1, 96),
    seq_len=st.sampled_from([2048, 8192, 6144, 32768]),
    strategies=st.lists(st.sampled_from(SHARED), min_size=1, max_size=3, unique=True),
)  # fmt: skip
def test_every_configuration_divides_the_ranks_the_batch_and_the_model(
    model: str, ranks: int, batch: int, seq_len: int, strategies: list[str]
) -> None:
    spec = load_model(model)
    every = ("1f1b", "interleaved", "zero-bubble")
    asked = space(
        *strategies,
        ranks=ranks,
        batch=batch,
        seq_len=seq_len,
        schedules=every,
        checkpointing=("none", "full"),
        **EVERY_AXIS,
    )
    rows = enumerated(asked, model)
    assert (rows["gpus"] == ranks).all()
    assert (rows.data_ranks * rows["microbatch"] * rows["microbatches"] == batch).all()
    heads = [spec.n_heads, spec.n_kv_heads, spec.ffn_dim, *([spec.experts.ffn_dim] if spec.experts else [])]
    assert not any((number % rows["tp"]).any() for number in heads)
    assert (rows["tp"] <= CLUSTER.ranks_per_node).all()
    assert not (seq_len % rows["cp"]).any()
    assert ((rows["cp"] == 1) | (seq_len // rows["cp"] >= LEAST_TOKENS)).all()
    piped = rows["pp"] > 1
    assert (rows["pp"] * rows["interleave"] <= spec.n_layers + 2).all()
    assert (rows["microbatches"][piped] >= rows["pp"][piped]).all()
    assert not (rows["microbatches"] % np.where(rows["interleave"] > 1, rows["pp"], 1)).any()
    assert (rows["interleave"][~piped] == 1).all()
    assert not ((rows.data_ranks * rows["cp"] * rows["tp"]) % rows["ep"]).any()
    assert not ((spec.experts.count if spec.experts else 1) % rows["ep"]).any()
    few = rows.take(np.arange(0, len(rows), max(1, len(rows) // 50)))
    assert len({*listed(few)}) == len(few), "one is there twice"


def able(ranks: int, batch: int, seq_len: int) -> set[tuple[int, ...]]:
    """Tensor, context, pipeline, data and microbatch of Llama 3 8B, by trying every number."""
    found: set[tuple[int, ...]] = set()
    sizes = range(1, ranks + 1)
    for tensor, context, pipeline in product(sizes, repeat=3):
        if ranks % (tensor * context * pipeline) or tensor > 8 or 8 % tensor or pipeline > 32:
            continue
        data = ranks // (tensor * context * pipeline)
        if batch % data or seq_len % context or (context > 1 and seq_len < 1024 * context):
            continue
        for microbatch in range(1, 33):
            local = batch // data
            if local % microbatch == 0 and (pipeline == 1 or local // microbatch >= pipeline):
                found.add((tensor, context, pipeline, data, microbatch))
    return found


@pytest.mark.parametrize(("ranks", "batch", "seq_len"), [(8, 16, 8192), (12, 24, 6144), (16, 7, 2048), (6, 6, 1000)])
def test_no_mesh_that_can_run_is_missing(ranks: int, batch: int, seq_len: int) -> None:
    rows = enumerated(space(ranks=ranks, batch=batch, seq_len=seq_len, schedules=("1f1b",), **EVERY_AXIS))
    names = ("tp", "cp", "pp", "microbatch")
    found = {(t, c, p, d, m) for t, c, p, m, d in zip(*(rows[n].tolist() for n in names), rows.data_ranks.tolist())}
    assert found == able(ranks, batch, seq_len)


def only(rows: Candidates, *fields: str) -> set[tuple[Any, ...]]:
    return {tuple(getattr(one if hasattr(one, f) else one.implementation, f) for f in fields) for one in listed(rows)}


def test_axes_that_are_given_are_these() -> None:
    rows = enumerated(space(ranks=16, batch=64, tp=(2, 4), pp=(1, 2), microbatch=(1,)))
    assert only(rows, "tp", "pp") == {(2, 1), (2, 2), (4, 1), (4, 2)}
    assert not len(enumerated(space(tp=(3,))))


def test_strategies_without_code_for_an_axis_are_left_out() -> None:
    every = space(*SHARED, ranks=16, batch=64, **{**EVERY_AXIS, "microbatch": (1,)})
    found = listed(enumerated(every))
    piped = {one.strategy for one in found if one.pp > 1 or one.cp > 1}
    assert piped == {"ddp", "fsdp2", "megatron"}
    tensor = {one.strategy for one in found if one.tp > 1}
    assert tensor == {"fsdp2", "megatron"} | {name for name in SHARED if name.startswith("refshard-")}
    assert {one.strategy for one in found} == {*SHARED}


def test_replicas_are_for_what_shards_parameters() -> None:
    rows = enumerated(space("ddp", "megatron", "fsdp2", ranks=32, batch=64, dp_replicate=ALL))
    axes = only(rows, "strategy", "dp_replicate", "dp_shard")
    assert {(r, s) for name, r, s in axes if name == "ddp"} == {(1, 32)}
    assert {(r, s) for name, r, s in axes if name == "megatron"} == {(1, 32)}
    assert {(r, s) for name, r, s in axes if name == "fsdp2"} == {(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)}


def test_gradients_may_be_reduced_once_where_units_are_reduced_in_each_microbatch() -> None:
    for strategy, flags in (("fsdp2", {True, False}), ("megatron", {True}), ("ddp", {True})):
        assert {flag for (flag,) in only(enumerated(space(strategy)), "reduce_each")} == flags
    assert only(enumerated(space(batch=8)), "reduce_each") == {(True,)}


def test_schedules_have_the_stretches_that_they_can() -> None:
    every = ("1f1b", "interleaved", "zero-bubble")
    rows = enumerated(space("fsdp2", ranks=4, batch=64, pp=(4,), interleave=ALL, schedules=every))
    stretches = {name: {v for s, v in only(rows, "schedule", "interleave") if s == name} for name in every}
    assert stretches == {"1f1b": {1}, "interleaved": {2, 4, 8}, "zero-bubble": {1, 2}}
    uneven = enumerated(space("fsdp2", ranks=3, batch=9, pp=(3,), interleave=ALL, schedules=every))
    assert only(uneven, "schedule") == {("1f1b",)}
    for strategy in ("megatron", "ddp"):
        rows = enumerated(space(strategy, ranks=4, batch=64, pp=(4,), interleave=ALL, schedules=every))
        assert only(rows, "schedule") == {("1f1b",), ("interleaved",)}


def test_megatron_has_its_own_kernels_and_others_have_what_is_asked() -> None:
    rows = enumerated(space("fsdp2", "megatron", compiled=(False,)))
    assert only(rows, "strategy", "compiled", "attention", "overlap_tensor") == {
        ("fsdp2", False, "flash", False),
        ("megatron", True, "cudnn", True),
    }


def test_what_holds_for_all_is_in_every_row() -> None:
    same: dict[str, Any] = {"implementation": Implementation(reduction="bf16"), "offload": True}
    rows = enumerated(space(precisions=("fp8",), compiled=(True,), checkpointing=("first-3", "full"), **same))
    assert only(rows, "precision", "reduction", "compiled", "offload") == {("fp8", "bf16", True, True)}
    assert only(rows, "checkpointing") == {("first-3",), ("full",)}


def test_precisions_and_compilation_are_axes_except_where_there_is_nothing_to_compile() -> None:
    rows = enumerated(
        space("fsdp2", "megatron", "simplefsdp", precisions=("bf16", "fp8"), compiled=(False, True), batch=8)
    )
    of = {name: {v[1:] for v in only(rows, "strategy", "precision", "compiled") if v[0] == name} for name in SHARED}
    assert of["fsdp2"] == {("bf16", False), ("bf16", True), ("fp8", False), ("fp8", True)}
    assert of["megatron"] == of["simplefsdp"] == {("bf16", True), ("fp8", True)}
    assert len(rows) == 8, "none is there twice"


def test_less_splitting_comes_first() -> None:
    """So that it wins between equals."""
    rows = listed(enumerated(space(ranks=8, batch=64, **{**EVERY_AXIS, "microbatch": (1,)})))
    splits: Sequence[tuple[int, ...]] = [(one.tp, one.cp, one.pp) for one in rows]
    assert list(splits) == sorted(splits)
