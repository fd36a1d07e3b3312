"""Predicted memory of a step, held against real strategies in a pretended world, to the byte."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import RECIPES
from refshard.simulate.kernels import Batch
from refshard.simulate.memory import RankJob, predict_memory
from refshard.specs.model import ModelSpec
from tests.simulate.pretended import levels_of_a_step
from tests.simulate.test_activations import LAYERS, spec

WORLD_SIZE = 4


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
    return 4 * (model.n_layers + 1 if strategy == "fsdp1" else parameters)


def check(model: ModelSpec, strategy: str, **features: Any) -> None:
    predicted = predict_memory(job(model, **features), None if strategy == "single" else RECIPES[strategy])
    measured = levels_of_a_step(model, strategy, sequences=2, seq_len=24, **features)
    counts = numbers(model, strategy)
    assert sum(predicted.between_steps.values()) - counts == measured[0], "between steps"
    assert predicted.peak - counts == max(measured), "at the peak"


TWICE = {"microbatches": 2, "policy": "full"}
BF16 = {"bf16": True, "microbatches": 2}
HYBRID = {"replicas": 2, "microbatches": 2, "policy": "every-2"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {}) for strategy in ("single", *RECIPES)),
    *((strategy, TWICE) for strategy in ("single", "ddp", "fsdp1", "fsdp2", "replicate")),
    *((strategy, BF16) for strategy in ("fsdp1", "fsdp2-tuned", "zero1", "yafsdp")),
    *((strategy, HYBRID) for strategy in ("fsdp", "yafsdp", "zero2")),
    *((strategy, {"tied": True, "bf16": True}) for strategy in ("fsdp2-tuned", "fsdp", "yafsdp")),
    *((strategy, {"vocab": 97}) for strategy in ("fsdp1", "fsdp2", "yafsdp")),
    ("fsdp2", {"replicas": 2, "bf16": True}),
    ("replicate", {"bf16": True, "policy": "full"}),
]
"""Every strategy plainly, and each feature with the strategies that meet it in ways of their own."""


@pytest.mark.parametrize(("strategy", "features"), CASES)
def test_a_strategys_memory_is_predicted_to_the_byte(strategy: str, features: dict[str, Any]) -> None:
    rest = dict(features)
    model = spec(tied=rest.pop("tied", False), vocab=rest.pop("vocab", 96))
    check(model, strategy, **rest)
