"""Strategies over meshes of several axes: pipelines, context, tensor and sequence parallelism, on 2 and 4 ranks."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError
from refshard.measure.trainer import Trainer
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.specs.layers import layers_of_stages
from refshard.strategies import check_case, strategy_for
from tests.distributed.ranks import run_ranks
from tests.models import small_spec
from tests.strategies.test_strategies import observe

pytestmark = pytest.mark.processes

LAYERS = 4
PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 4}
INTERLEAVED: dict[str, Any] = {**PIPELINE, "interleave": 2, "schedule": "interleaved"}
ZERO_BUBBLE: dict[str, Any] = {**PIPELINE, "schedule": "zero-bubble"}
CONTEXT: dict[str, Any] = {"cp": 2}
SEQUENCE: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2, pipeline": PIPELINE,
    "fsdp2, pipeline alone": {**PIPELINE, "gpus": 2},
    "fsdp2, pipeline of one microbatch": {**PIPELINE, "microbatches": 1},
    "fsdp2, pipeline, recomputed": {**PIPELINE, "checkpointing": "selective"},
    "fsdp2, pipeline, bf16": {**PIPELINE, "precision": "bf16"},
    "fsdp2, pipeline, muon": {**PIPELINE, "optimizer": "muon"},
    "fsdp2, pipeline, inference": {"pp": 2, "workload": "inference"},
    "fsdp2, pipeline, tensor": {**PIPELINE, "tp": 2, "checkpointing": "full"},
    "fsdp2, pipeline, sequence": {**PIPELINE, **SEQUENCE, "checkpointing": "full", "precision": "bf16"},
    "fsdp2, pipeline, context": {**PIPELINE, **CONTEXT},
    "fsdp2, interleaved": INTERLEAVED,
    "fsdp2, interleaved, tensor": {**INTERLEAVED, "tp": 2},
    "fsdp2, interleaved, inference": {**INTERLEAVED, "microbatches": 1, "workload": "inference"},
    "fsdp2, zero bubble": ZERO_BUBBLE,
    "fsdp2, zero bubble of two stages": {**ZERO_BUBBLE, "interleave": 2, "precision": "bf16"},
    "fsdp2, zero bubble, sequence": {**ZERO_BUBBLE, **SEQUENCE},
    "fsdp2, zero bubble, context": {**ZERO_BUBBLE, **CONTEXT},
    "fsdp2, sequence": SEQUENCE,
    "fsdp2, sequence, recomputed": {**SEQUENCE, "microbatches": 2, "checkpointing": "full", "precision": "bf16"},
    "fsdp2, sequence, inference": {**SEQUENCE, "workload": "inference"},
    "fsdp2, context": CONTEXT,
    "fsdp2, context alone": {**CONTEXT, "gpus": 2},
    "fsdp2, context of four": {"cp": 4, "microbatches": 2},
    "fsdp2, context, replicas": {**CONTEXT, "dp_replicate": 2, "checkpointing": "full"},
    "fsdp2, context, recomputed": {**CONTEXT, "checkpointing": "selective", "precision": "bf16"},
    "fsdp2, context, tensor": {**CONTEXT, "tp": 2},
    "fsdp2, context, sequence": {**CONTEXT, **SEQUENCE},
    "fsdp2, context, inference": {**CONTEXT, "workload": "inference"},
    "ddp, pipeline": PIPELINE,
    "ddp, pipeline, bf16": {**PIPELINE, "precision": "bf16"},
    "ddp, interleaved": INTERLEAVED,
    "ddp, context": {**CONTEXT, "microbatches": 2},
    "ddp, context, bf16": {**CONTEXT, "precision": "bf16"},
    "ddp, pipeline, context": {**PIPELINE, **CONTEXT},
    "pipeline, interleaved": {"interleave": 2, "schedule": "interleaved", "microbatches": 4, "gpus": 2},
    "pipeline, zero bubble": {"schedule": "zero-bubble", "microbatches": 4},
    "tensor-parallel, sequence": {
        "gpus": 2, "sequence_parallel": True, "precision": "bf16", "checkpointing": "full",
    },
}  # fmt: skip
"""The strategy, and the case's axes."""
REFERENCES: dict[str, dict[str, Any]] = {"": {}, "muon": {"optimizer": "muon"}, "inference": {"workload": "inference"}}


FEW = (
    "fsdp2, pipeline", "fsdp2, pipeline, sequence", "fsdp2, interleaved, tensor", "fsdp2, zero bubble, context",
    "fsdp2, sequence, recomputed", "fsdp2, context alone", "ddp, pipeline", "ddp, context",
)  # fmt: skip
"""What `make test` runs of them."""
cases = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in CASES]
)


def case_of(name: str) -> Case:
    fields = {"gpus": 4, **CASES[name]}
    return Case.of(strategy=name.split(",")[0], model="small", global_batch=8, seq_len=16, learning_rate=1e-2, **fields)


def observe_all(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        found.append(observe(strategy_for(case, cuda=False), case, small_spec(n_layers=LAYERS, n_kv_heads=2)))
        dist.barrier()
    return found


@cache
def ran(few: bool) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank observed: of the few, or of the others."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in (2, 4):
        names = [name for name in CASES if case_of(name).job.gpus == world_size and (name in FEW) is few]
        ranks = run_ranks(world_size, observe_all, [case_of(name) for name in names])
        found |= {name: [rank[index] for rank in ranks] for index, name in enumerate(names)}
    return found


@cache
def references() -> dict[str, dict[str, Any]]:
    cases = [case_of("fsdp2, context").reference().changed(**fields) for fields in REFERENCES.values()]
    (found,) = run_ranks(1, observe_all, cases)
    return dict(zip(REFERENCES, found))


def ranks_of(name: str) -> list[dict[str, Any]]:
    return ran(name in FEW)[name]


def reference_of(name: str) -> dict[str, Any]:
    return references()[next((kind for kind in REFERENCES if kind and name.endswith(kind)), "")]


@cases
def test_losses_equal_those_of_one_unsharded_rank(name: str) -> None:
    ranks = ranks_of(name)
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks))]
    assert losses == pytest.approx(reference_of(name)["losses"], rel=parity_tolerance(case_of(name)))


@cases
def test_every_rank_issues_what_it_announces(name: str) -> None:
    for rank in ranks_of(name):
        assert rank["announced"] == rank["counted"] != ()


@cases
def test_every_rank_has_all_parameters_in_the_end(name: str) -> None:
    whole, case = reference_of(name)["parameters"], case_of(name)
    for rank in ranks_of(name):
        assert rank["parameters"].keys() == whole.keys()
        assert all(torch.equal(rank["parameters"][key], ranks_of(name)[0]["parameters"][key]) for key in whole)
    if case.job.precision == "fp32" and case.job.optimizer == "adamw":
        assert all(torch.allclose(ranks_of(name)[0]["parameters"][key], whole[key], atol=1e-5) for key in whole)


@cases
def test_ranks_together_have_a_unit_of_each_block(name: str) -> None:
    if not name.startswith("fsdp2"):
        pytest.skip("its units are no blocks")
    units = {unit for rank in ranks_of(name) for unit in rank["units"]}
    assert units == {"root", *(f"model.layers.{index}" for index in range(LAYERS))}


def test_a_stage_is_gathered_and_reduced_once_a_step() -> None:
    first, _, last, _ = ranks_of("fsdp2, pipeline")
    for rank in (first, last):
        counts = {count.op: count.count for count in rank["announced"]}
        # Two blocks, and the root's embedding or head; four microbatches on, their gradients back.
        assert counts == {"all_gather": 3, "reduce_scatter": 3, "send": 4, "recv": 4, "broadcast": 1}


def test_more_stages_than_are_kept_gathered_are_gathered_again() -> None:
    changes = {**INTERLEAVED, "interleave": 4, "model": "small"}
    case = case_of("fsdp2, interleaved").changed(**changes)
    ranks = run_ranks(4, observe_deep, case)
    for rank in ranks:
        assert rank["announced"] == rank["counted"]
        (gathers,) = (count.count for count in rank["announced"] if count.op == "all_gather")
        assert gathers > 5, "one of each of four blocks and of one end, if nothing were gathered twice"


def observe_deep(case: Case) -> dict[str, Any]:
    return observe(strategy_for(case, cuda=False), case, small_spec(n_layers=8))


def refused(case: Case, changes: dict[str, Any]) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        Trainer(case, small_spec(**changes), strategy_for(case, cuda=False), group, torch.device("cpu"))
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({**PIPELINE}, {"tied": True}, "a pipeline needs an untied model"),
        ({**PIPELINE}, {"n_layers": 1}, "a pipeline of 2 stages needs a model of 2 or more layers, got 1; use fewer"),
        (
            {**INTERLEAVED, "microbatches": 5, "global_batch": 5},
            {"n_layers": 4},
            "schedule 'interleaved' runs microbatches in rounds of one size, .* got 5; use a multiple of 2",
        ),
        ({**ZERO_BUBBLE, "strategy": "ddp"}, {}, "schedule must be '1f1b' or 'interleaved' for ddp, got 'zero-bubble'"),
    ],
)
def test_what_cannot_be_composed_is_refused(changes: dict[str, Any], model: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"strategy": "fsdp2", "model": "small", "gpus": 2, "global_batch": 8, "seq_len": 16}
    case = Case.of(**given | changes)
    for said in run_ranks(2, refused, case, model):
        assert re.match(message, said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**PIPELINE, "tuning": "lora"}, "tuning must be 'full' under a pipeline, got 'lora'"),
        ({**PIPELINE, "offload": True}, "offload must be False under a pipeline, got True"),
        ({**ZERO_BUBBLE, "checkpointing": "full"}, "checkpointing must be 'none' for schedule 'zero-bubble'"),
        ({**PIPELINE, "strategy": "fsdp2-tuned"}, "refshard does not support fsdp2-tuned with pp"),
        ({**CONTEXT, "strategy": "refshard-fsdp"}, "refshard does not support refshard-fsdp with cp"),
        ({**CONTEXT, "tuning": "lora"}, "tuning must be 'full' under context parallelism"),
    ],
)
def test_axes_that_exclude_each_other_are_named(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"strategy": "fsdp2", "model": "small", "gpus": 4, "global_batch": 8}
    case = Case.of(**given | changes)
    with pytest.raises(UnsupportedError, match=message):
        check_case(case, cuda=False)


def test_layers_are_divided_so_that_the_ends_have_no_more_than_others() -> None:
    sizes = [len(layers) for layers in layers_of_stages(126, 16)]
    assert sizes == [7, *[8] * 14, 7]
    assert [len(layers) for layers in layers_of_stages(32, 4)] == [8] * 4
