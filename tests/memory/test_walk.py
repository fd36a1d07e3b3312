"""Predicted memory of a step, held against real strategies in a pretended world, to the byte."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from refshard.errors import SpecError
from refshard.estimate.limits import usable
from refshard.estimate.recipe import RECIPES
from refshard.estimate.units import model_units
from refshard.memory.of_case import memory_of
from refshard.memory.tensors import Batch
from refshard.memory.walk import RankJob, predict_memory
from refshard.quantities import GIB
from refshard.specs.case import CaseSpec
from refshard.specs.layers import Checkpointing, checkpointing_of
from refshard.specs.model import ModelSpec, load_model, parameter_count
from tests.memory.made import hardware
from tests.memory.pretended import levels_of_a_step
from tests.memory.test_activations import LAYERS, spec

WORLD_SIZE = 4
STRATEGIES = RECIPES | {"fsdp1-root": msgspec.structs.replace(RECIPES["fsdp1"], grouping="root")}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def job(model: ModelSpec, *, policy: str = "none", bf16: bool = False, **changes: Any) -> RankJob:
    batch = Batch(sequences=2, seq_len=24, dtype="bf16" if bf16 else "fp32")
    fields: dict[str, Any] = {"world_size": WORLD_SIZE, "device": "cpu", **changes}
    return RankJob(model=model, batch=batch, checkpointing=checkpointing_of(policy, LAYERS), **fields)


def numbers(model: ModelSpec, strategy: str) -> int:
    """Bytes of the optimizer's counts of steps, which are too small for the watch to see."""
    parameters = 9 * model.n_layers + (2 if model.tied else 3)
    flat = {"fsdp1": model.n_layers + 2, "fsdp1-root": model.n_layers + 1}
    return 4 * flat.get(strategy, parameters)


def check(model: ModelSpec, strategy: str, **features: Any) -> None:
    # What NCCL alone holds, DDP's first bucket, is not there on a CPU.
    library = "gloo" if strategy == "ddp" else "nccl"
    asked = job(model, **{"library": library, **features})
    predicted = predict_memory(asked, None if strategy == "single" else STRATEGIES[strategy])
    measured = levels_of_a_step(model, strategy, sequences=2, seq_len=24, **features)
    counts = numbers(model, strategy)
    assert sum(predicted.between_steps.values()) - counts == measured[0], "between steps"
    assert predicted.peak - counts == max(measured), "at the peak"
    # So are the tops of the stretches in between; while the rotary tables are made, more is there for a moment, and
    # gloo's own buffers are not measured.
    elsewhere = ("forward embedding", *(["end of backward"] if library == "gloo" else []))
    climbs = [new for last, new in pairwise(predicted.events) if new.highest > last.after]
    missed = [e.name for e in climbs if e.name not in elsewhere and e.highest - counts not in measured]
    assert not missed


TWICE = {"microbatches": 2, "policy": "full"}
BF16 = {"bf16": True, "microbatches": 2}
HYBRID = {"replicas": 2, "microbatches": 2, "policy": "every-2"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {}) for strategy in ("single", *STRATEGIES)),
    *((strategy, TWICE) for strategy in ("single", "ddp", "fsdp1-root", "fsdp2", "refshard-replicate")),
    *((strategy, BF16) for strategy in ("single", "ddp", "fsdp1-root", "fsdp2-tuned")),
    *((strategy, BF16) for strategy in ("refshard-zero1", "refshard-yafsdp")),
    *((strategy, HYBRID) for strategy in ("refshard-fsdp", "refshard-yafsdp", "refshard-zero2")),
    *((strategy, {"tied": True, "bf16": True}) for strategy in ("fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp")),
    *((strategy, {"vocab": 97}) for strategy in ("fsdp1-root", "fsdp2", "refshard-yafsdp")),
    *((strategy, {"replicas": 2, **BF16}) for strategy in ("fsdp2", "fsdp2-tuned")),
    ("fsdp2", {"replicas": 2, "bf16": True}),
    *((strategy, {"bf16": True, "policy": "full"}) for strategy in ("single", "ddp", "refshard-replicate")),
]
"""Every strategy plainly, and each feature with the strategies that meet it in ways of their own."""


@pytest.mark.parametrize(("strategy", "features"), CASES)
def test_a_strategys_memory_is_predicted_to_the_byte(strategy: str, features: dict[str, Any]) -> None:
    rest = dict(features)
    model = spec(tied=rest.pop("tied", False), vocab=rest.pop("vocab", 96))
    check(model, strategy, **rest)


@given(
    strategy=st.sampled_from([None, *RECIPES]),
    shards=st.integers(1, 9),
    replicas=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    policy=st.sampled_from(["none", "full", "every-2", "selective"]),
    kinds=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    vocab=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_a_step_gives_back_what_it_takes(
    strategy: str | None,
    shards: int,
    replicas: int,
    microbatches: int,
    policy: str,
    kinds: tuple[bool, bool, bool],
    vocab: int,
) -> None:
    """Whatever is asked for; the walk itself refuses to let go of what is not there."""
    bf16, cuda, tied = kinds
    forecast = predict_memory(
        job(
            spec(tied=tied, vocab=vocab), policy=policy, bf16=bf16, world_size=shards * replicas, replicas=replicas,
            microbatches=microbatches, device="cuda" if cuda else "cpu", library="nccl" if cuda else "gloo",
            reduction="bf16" if bf16 and vocab % 2 else "fp32",
        ),
        None if strategy is None else RECIPES[strategy],
    )  # fmt: skip
    assert forecast.events[-1].after == sum(forecast.between_steps.values())
    assert forecast.peak == max(event.highest for event in forecast.events) == sum(forecast.at_peak.values())


def test_a_large_model_is_predicted_by_its_closed_forms() -> None:
    """405B over 16,384 ranks: masters and optimizer state are 12 bytes an element and padding; between steps nothing is
    unsharded.
    """
    model = load_model("llama3.1-405b")
    batch = Batch(sequences=1, seq_len=8192, dtype="bf16")
    full = checkpointing_of("full", model.n_layers)
    large = RankJob(model=model, world_size=16_384, batch=batch, checkpointing=full)
    ring, transient = (predict_memory(large, RECIPES[s]).between_steps for s in ("refshard-yafsdp", "refshard-fsdp"))
    shard = parameter_count(model) / 16_384
    assert ring["parameters"] == transient["parameters"] == pytest.approx(4 * shard, rel=1e-3)
    assert ring["optimizer"] == pytest.approx(8 * shard, rel=0.01)
    assert ring["unsharded"] == transient["unsharded"] == 0


def test_over_gloo_exchanges_have_buffers_and_gathers_copies() -> None:
    """The engine receives what other ranks send beside the gradients that it reduces, and keeps nothing."""
    model = spec()
    embedding = model_units(model, "ends")[0].gathered_numel(RECIPES["refshard-fsdp"], WORLD_SIZE) // WORLD_SIZE
    engine = {
        library: predict_memory(job(model, library=library), RECIPES["refshard-fsdp"]) for library in ("gloo", "nccl")
    }
    ends = [forecast.events[-2] for forecast in engine.values()]
    assert {event.name for event in ends} == {"end of backward"}
    assert ends[0].highest - ends[1].highest == 4 * (WORLD_SIZE - 1) * embedding
    assert engine["gloo"].between_steps == engine["nccl"].between_steps
    over = {library: predict_memory(job(model, library=library), RECIPES["fsdp2"]) for library in ("gloo", "nccl")}
    assert over["gloo"].peak > over["nccl"].peak
    assert over["gloo"].between_steps == over["nccl"].between_steps


def test_what_tensors_can_fill_leaves_room_for_what_is_none_on_a_gpu_alone() -> None:
    assert usable(hardware(memory_bytes=80 * GIB)) == int(78 * GIB * 0.96)
    assert usable(hardware(memory_bytes=80 * GIB, device="cpu")) == int(80 * GIB * 0.96)


def test_a_job_that_cannot_be_is_refused_with_its_remedy() -> None:
    with pytest.raises(SpecError, match="replicas must divide the 4 ranks, got 3"):
        job(spec(), replicas=3)
    with pytest.raises(SpecError, match=r"layers must lie in 0\.\.2, got 3; name layers that the model has"):
        RankJob(
            model=spec(), world_size=1, batch=Batch(sequences=1, seq_len=8, dtype="fp32"),
            checkpointing=Checkpointing(frozenset({3})),
        )  # fmt: skip


def test_what_the_model_is_not_made_for_is_said() -> None:
    batch = Batch(sequences=1, seq_len=8, dtype="fp32")
    of_heads = {
        kv_heads: predict_memory(RankJob(model=spec(kv_heads=kv_heads), world_size=4, batch=batch), None).warnings
        for kv_heads in (2, 4)
    }
    assert of_heads[2] == (), "torch has no fused kernel for grouped heads in fp32, and none is counted"
    (told,) = of_heads[4]
    assert told.startswith("attention in fp32 is counted as CUDA's flash kernel")


def test_a_case_of_upstreams_yafsdp_has_no_plan_and_the_engines_has() -> None:
    """Nor has one of any strategy without a recipe; the unsharded rank has one."""
    cases = {
        strategy: CaseSpec(strategy=strategy, model="llama-tiny", world_size=ranks, global_batch=2, seq_len=16)
        for strategy, ranks in (("yafsdp", 2), ("refshard-yafsdp", 2), ("megatron-fsdp", 2), ("single", 1))
    }
    planned = {strategy for strategy, case in cases.items() if memory_of(case, "cpu") is not None}
    assert planned == {"refshard-yafsdp", "single"}
