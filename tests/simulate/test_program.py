"""A strategy's program: what it issues, against the closed forms and the records of real runs."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from refshard import resources
from refshard.plan.checkpointing import Checkpointing
from refshard.plan.recipe import RECIPES
from refshard.records import LaunchRecord, Record
from refshard.simulate.account import account
from refshard.simulate.clock import NS, Rates, schedule
from refshard.simulate.program import Item
from refshard.simulate.trace import as_kineto, as_timeline
from refshard.specs.model import load_model
from refshard.timeline import Kind
from refshard.tracing.kineto import read_timeline
from refshard.tracing.overlap import collectives_per_step, step_breakdowns
from tests.simulate.made import cluster, hardware, program

FREE = {"bytes_per_s": 1e30, "latency_s": 0.0}


def issued(items: tuple[Item, ...]) -> dict[str, tuple[int, int]]:
    counts, sizes = Counter[str](), Counter[str]()
    for item in items:
        if item.call is not None:
            counts[item.call.op] += 1
            sizes[item.call.op] += item.call.bytes
    return {op: (counts[op], sizes[op]) for op in counts}


def recorded() -> dict[str, LaunchRecord]:
    """What real ranks announced and their traces showed: llama-mini, 2 ranks, fp32, by strategy."""
    path = resources.root() / "profiles/recorded/epyc-2-cores/engine/records.jsonl"
    lines = [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines()]
    found = [r for r in lines if isinstance(r, LaunchRecord) and r.case.model == "llama-mini" and r.round == 0]
    return {r.case.strategy: r for r in found if r.case.workload == "training" and r.case.world_size == 2}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_peer_issues_the_collectives_that_its_trace_showed(strategy: str) -> None:
    proof = recorded()[strategy].proof
    assert proof is not None
    on = cluster().of_world_size(2)
    assert issued(program(strategy, on, dtype="fp32")) == {c.op: (c.count, c.bytes) for c in proof.traced}


@pytest.mark.parametrize("strategy", ["refshard-fsdp", "refshard-yafsdp"])
def test_the_engine_moves_the_bytes_that_its_trace_showed(strategy: str) -> None:
    """Over gloo two ranks exchange halves, in pieces: half the bytes of what is gathered and reduced."""
    proof = recorded()[strategy].proof
    assert proof is not None
    planned = issued(program(strategy, cluster().of_world_size(2), dtype="fp32"))
    assert sum(size for _, size in planned.values()) / 2 == sum(c.bytes for c in proof.traced)


@pytest.mark.parametrize("strategy", RECIPES)
def test_where_communication_is_free_a_step_is_its_compute(strategy: str) -> None:
    from refshard.specs.cluster import LinkSpec

    on = cluster(within=LinkSpec(**FREE), between=LinkSpec(**FREE)).of_world_size(16)
    items = program(strategy, on)
    times = schedule(items)
    on_compute = sum(item.seconds for item in items if item.lane == "compute")
    beside = sum(item.seconds for item in items if item.lane != "compute")
    assert times.length / NS == pytest.approx(on_compute, abs=beside + 1e-9)
    compute = {i.name: 0.0 for i in items if i.kind is Kind.COMPUTE}
    assert {"forward block", "backward block", "forward head", "backward embedding", "optimizer"} <= compute.keys()


def test_every_strategy_computes_the_same() -> None:
    on = cluster().of_world_size(8)

    def computed(strategy: str) -> float:
        items = program(strategy, on, microbatches=2, checkpointing=Checkpointing(frozenset({1})))
        return sum(i.seconds for i in items if i.kind is Kind.COMPUTE and i.stage != "optimizer")

    assert {round(computed(s), 12) for s in RECIPES} == {round(computed("refshard-fsdp"), 12)}


@pytest.mark.parametrize("model", ["llama-mini", "llama3.2-1b"])
@pytest.mark.parametrize("strategy", RECIPES)
def test_the_parts_of_a_step_add_up_and_its_trace_says_the_same(strategy: str, model: str, tmp_path: Path) -> None:
    items = program(strategy, cluster(compute_beside_communication=0.8).of_world_size(16), model=model, microbatches=2)
    times = schedule(items, Rates(compute=0.8, preparation=0.3))
    spent = account(items, times)
    parts = spent.compute_s + spent.optimizer_s + spent.copies_s + spent.contention_s + spent.waits_s
    assert parts == pytest.approx(times.length / NS, rel=1e-9)
    path = tmp_path / "trace.json"
    path.write_text(as_kineto(items, times, cluster().of_world_size(16)))
    ours, read = as_timeline(items, times), read_timeline(path)
    assert step_breakdowns(read) == step_breakdowns(ours)
    assert step_breakdowns(read)[0].span_ns == times.length
    assert collectives_per_step(read) == collectives_per_step(ours)
    assert read.collectives == ours.collectives
    assert read.windows == ours.windows
    assert (read.spans.under == ours.spans.under).all()


def test_gathers_wait_for_what_was_released_last() -> None:
    items = program("refshard-yafsdp", cluster().of_world_size(16))
    gathers = [i for i in items if i.call is not None and i.call.op == "all_gather" and i.stage == "forward"]
    names = [items[i.after[-1]].name if i.after else None for i in gathers]
    # Each gather follows the cast of this rank's own part, which is what waits.
    assert set(names) == {"copy own part"}
    waits = [items[i.after[-1]].after for i in gathers]
    assert waits[:2] == [(), ()], "the embedding and the first block find their storage free"
    # The second block's slot is free too, but what was released last is waited for, whosever it was.
    released = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3))]
    assert [items[w[0]].unit for w in waits[2:6]] == released


def test_one_communicator_queues_reductions_behind_gathers() -> None:
    on = cluster().of_world_size(16)
    assert {i.lane for i in program("fsdp2", on) if i.call} == {"gather"}
    assert {i.lane for i in program("refshard-yafsdp", on) if i.call} == {"gather", "reduce"}
    assert {i.lane for i in program("refshard-yafsdp", on, replicas=2) if i.call} == {"gather", "reduce", "combine"}


def test_over_gloo_fsdp2_awaits_every_collective_and_overlaps_nothing() -> None:
    on = cluster(library="gloo", hardware=hardware(device="cpu")).of_world_size(2)
    items = program("fsdp2", on, dtype="fp32")
    breakdown = step_breakdowns(as_timeline(items, schedule(items)))[0]
    assert breakdown.overlap_ratio == 0
    tuned = program("fsdp2-tuned", on, dtype="fp32")
    ratio = step_breakdowns(as_timeline(tuned, schedule(tuned)))[0].overlap_ratio
    assert ratio is not None
    assert ratio > 0.1


@pytest.mark.parametrize(("replicas", "shards"), [(1, 16), (2, 8), (16, 1)])
def test_hybrid_meshes_reduce_shards_over_replicas(replicas: int, shards: int) -> None:
    found = issued(program("refshard-fsdp", cluster().of_world_size(16), replicas=replicas))
    parameters = load_model("llama-mini").params
    if shards > 1:
        assert found["reduce_scatter"][1] == pytest.approx(4 * parameters, rel=0.01)
    if replicas > 1:
        assert found["all_reduce"][1] == pytest.approx(4 * parameters / shards, rel=0.01)
    assert ("all_reduce" in found) == (replicas > 1)


def test_ddp_reduces_once_a_step_in_buckets_that_hold_every_gradient() -> None:
    on = cluster().of_world_size(8)
    once, thrice = (issued(program("ddp", on, microbatches=n)) for n in (1, 3))
    assert once == thrice
    assert once["all_reduce"][1] == 4 * load_model("llama-mini").params


def test_zero2_reduces_each_microbatch_and_zero1_once() -> None:
    on = cluster().of_world_size(8)
    zero1, zero2 = (issued(program(s, on, microbatches=3)) for s in ("refshard-zero1", "refshard-zero2"))
    assert zero2["reduce_scatter"][0] == 3 * zero1["reduce_scatter"][0]
    assert zero2["all_gather"][0] == 3 * zero1["all_gather"][0]


def test_a_checkpointed_layer_computes_again_up_to_its_last_product() -> None:
    on = cluster().of_world_size(8)
    first = frozenset({0})
    kinds = (Checkpointing(), Checkpointing(first), Checkpointing(first, by_op=True))
    plain, again, by_op = (program("refshard-fsdp", on, checkpointing=kind) for kind in kinds)

    def spent(items: tuple[Item, ...], name: str) -> float:
        return sum(i.seconds for i in items if i.name == name)

    more = spent(again, "backward block") - spent(plain, "backward block")
    forward = spent(plain, "forward block") / load_model("llama-mini").n_layers
    assert 0.7 * forward < more < forward
    assert spent(plain, "backward block") < spent(by_op, "backward block") < spent(again, "backward block")


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"])
def test_over_gloo_a_hybrid_mesh_reduces_in_two_legs_too(strategy: str) -> None:
    on = cluster(library="gloo", hardware=hardware(device="cpu")).of_world_size(16)
    items = program(strategy, on, dtype="fp32", replicas=2, microbatches=2)
    found = issued(items)
    assert found["all_reduce"][0] == found["reduce_scatter"][0]
    assert account(items, schedule(items)).waits_s > 0
    times = schedule(items)
    for index, item in enumerate(items):
        if item.name == "all_reduce":
            first_leg = ("reduce_scatter", "local sum")
            last = max(i for i in range(index) if items[i].unit == item.unit and items[i].name in first_leg)
            assert times.starts[index] >= times.ends[last], "the second leg needs what the first one brought"


def test_torchs_fsdp_issues_a_units_reduction_before_the_gather_after_it() -> None:
    """What both logged over a fake process group: reduce 4, gather 2, reduce 3, gather 1 of blocks in backward."""
    on = cluster().of_world_size(16)

    def backward(strategy: str) -> list[str]:
        calls = [i for i in program(strategy, on) if i.call is not None and i.stage == "backward"]
        return [f"{i.name[0]}{i.unit[-1]}" for i in calls if ".layers." in i.unit][2:6]

    assert backward("fsdp1") == ["r7", "a5", "r6", "a4"]
    assert backward("fsdp2") == ["r7", "a5", "r6", "a4"]
    assert backward("refshard-yafsdp")[:1] != ["r7"]


def test_fsdp1_gathers_the_embedding_for_backward_which_does_not_read_it() -> None:
    on = cluster().of_world_size(16)

    def gathers(strategy: str) -> int:
        return sum(i.call is not None and i.name == "all_gather" and "embed" in i.unit for i in program(strategy, on))

    assert (gathers("fsdp1"), gathers("refshard-fsdp")) == (2, 1)


@pytest.mark.parametrize("strategy", ["ddp", "refshard-replicate"])
def test_what_replicates_casts_its_parameters_in_bf16_and_not_in_fp32(strategy: str) -> None:
    on = cluster().of_world_size(8)

    def cast(dtype: str) -> float:
        return sum(i.seconds for i in program(strategy, on, dtype=dtype) if i.name == "copy own part")

    assert cast("fp32") == 0
    assert cast("bf16") == pytest.approx(6 * load_model("llama-mini").params / 1e12, rel=0.01)


def test_one_rank_prepares_and_waits_for_nothing() -> None:
    for strategy in RECIPES:
        items = program(strategy, cluster().of_world_size(1), dtype="fp32")
        spent = account(items, schedule(items))
        assert (spent.waits_s, spent.contention_s) == pytest.approx((0, 0), abs=1e-6), strategy
        assert not [i for i in items if i.lane != "compute" and i.seconds], strategy


def test_groups_that_straddle_nodes_are_priced_as_such() -> None:
    """Ranks 6 to 8 of nodes of 8 span two, so that groups of 3 are as slow as what joins the nodes."""
    whole = program("refshard-fsdp", cluster().of_world_size(24), replicas=8)
    gathers = [i.call for i in whole if i.call is not None and i.call.op == "all_gather"]
    assert {(call.cost.link, call.ranks) for call in gathers} == {("between", 3)}
