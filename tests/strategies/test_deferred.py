"""Models from the meta device, sharded before they are filled: each strategy starts from the very same parameters."""

import json
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from refshard.measure.trainer import Trainer, build_model, is_deferred
from refshard.models.llama import Llama, initialise
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.strategies import make_strategy
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_each

pytestmark = pytest.mark.processes

RANKS = 4
TINY: dict[str, Any] = {"gpus": RANKS, "model": "llama-tiny", "global_batch": 4, "seq_len": 16}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp in a pipeline": {"pp": 2},
    "fsdp2 in a pipeline": {"pp": 2, "interleave": 2, "schedule": "interleaved"},
    "fsdp2 over sequence parallel": {"tp": 2, "sequence_parallel": True},
    "fsdp1": {},
    "fsdp1-no-shard": {},
    "fsdp2": {},
    "fsdp2 over tensor parallel": {"tp": 2},
    "fsdp2 tied": {},
    "fsdp1 tied": {},
    "refshard-fsdp tied": {},
    "fsdp2-tuned hybrid": {"dp_replicate": 2},
    "fsdp2-compiled": {},
    "refshard-yafsdp-compiled": {},
    "tensor-parallel": {},
    "pipeline": {"microbatches": 4},
    "refshard-replicate": {},
    "refshard-yafsdp": {},
    "refshard-fsdp over tensor parallel": {"tp": 2},
}
"""The strategy, and what tells cases of one apart."""


def case_of(name: str, tied: str = "") -> Case:
    """``tied`` is the file of a tied model."""
    model = {"model": tied} if name.endswith("tied") and tied else {}
    return Case.of(strategy=name.split()[0], **{**TINY, **CASES[name], **model})


def differing(case: Case) -> list[str]:
    """Names of parameters that are not those of the bare model to the bit."""
    cpu, spec, group = torch.device("cpu"), load_model(case.job.model), dist.group.WORLD
    assert group is not None
    with torch.device("meta"):
        bare = Llama(spec)
    bare.to_empty(device=cpu)
    initialise(bare, case.protocol.seed)
    whole = dict(bare.named_parameters())
    assert next(build_model(case, spec, cpu).parameters()).is_meta
    strategy = make_strategy(case.job.strategy)
    Trainer(case, spec, strategy, group, cpu)
    filled = dict(strategy.full_parameters())
    assert whole.keys() == filled.keys()
    return [key for key, value in whole.items() if not torch.equal(value, filled[key])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By case, what differs on each rank."""
    spec = load_model("llama-tiny")
    tied = msgspec.structs.replace(spec, tied=True, params=spec.params - spec.vocab * spec.dim)
    path = tmp_path_factory.mktemp("tied") / "tied.toml"
    given = {key: value for key, value in msgspec.structs.asdict(tied).items() if value is not None}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()))
    ranks = run_each(RANKS, differing, [(case_of(name, str(path)),) for name in CASES])
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_sharding_first_changes_no_parameter(found: dict[str, list[list[str]]], name: str) -> None:
    assert found[name] == [[]] * RANKS


def test_every_deferred_strategy_is_here() -> None:
    modules = {ROWS[case_of(name).job.strategy].code for name in CASES}
    assert modules == {row.code for row in ROWS.values() if row.deferred}


def test_whole_models_are_deferred_where_the_strategy_can() -> None:
    case = case_of("fsdp2")
    assert is_deferred(case)
    assert not is_deferred(case.changed(tuning="lora"))
    assert not is_deferred(case.changed(strategy="yafsdp"))
