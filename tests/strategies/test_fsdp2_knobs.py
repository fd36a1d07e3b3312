"""FSDP2's knobs: what each sets on the wrapped model, and what cannot be had."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from refshard.errors import UnsupportedError
from refshard.measure.trainer import Trainer
from refshard.models.llama import Llama
from refshard.specs.case import Case
from refshard.strategies import make_strategy
from refshard.strategies.base import Strategy
from refshard.strategies.fully_sharded import check_method
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_each, run_ranks
from tests.models import small_spec

KNOBS = ("fsdp2", "fsdp2-prefetch2", "fsdp2-reduce-group", "fsdp2-reduce-buffers2", "fsdp2-tuned", "fsdp2-tuned-deep")
IN_ORDER = ["", "model.layers.0", "model.layers.1", "model.layers.2"]
"""Units of the tutorial's recipe, the root first, in the order of forward."""


def wrap(strategy: Strategy, case: Case, *, tied: bool = False) -> Trainer:
    group = dist.group.WORLD
    assert group is not None
    return Trainer(case, small_spec(n_layers=3, tied=tied), strategy, group, torch.device("cpu"))


def case_of(name: str, **fields: Any) -> Case:
    return Case.of(strategy=name, model="small", gpus=2, global_batch=2, seq_len=8, **fields)


def settings(name: str, tied: bool) -> dict[str, Any]:
    """What FSDP2 itself holds of the knobs, by unit, on a model that the strategy has wrapped."""
    strategy = make_strategy(name)
    wrap(strategy, case_of(name), tied=tied)
    model: Llama = vars(strategy)["_model"]
    names: dict[int, str] = {}
    states: dict[str, Any] = {}
    for at, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states.setdefault(names.setdefault(id(state), at), state)
    groups = [group for state in states.values() for group in state._fsdp_param_groups]
    return {
        "forward": {at: [names[id(s)] for s in state._states_to_forward_prefetch] for at, state in states.items()},
        "backward": {at: [names[id(s)] for s in state._states_to_backward_prefetch] for at, state in states.items()},
        "own groups": len({id(g._reduce_scatter_process_group) for g in groups} - {id(dist.group.WORLD)}),
        "buffers": {g.reduce_scatter_max_input_buffers for g in groups},
    }


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, bool], dict[str, Any]]:
    """By strategy, and whether the model is tied."""
    wanted = [(name, tied) for name in KNOBS for tied in (False, True)]
    return dict(zip(wanted, run_each(2, settings, wanted)[0]))


@pytest.mark.processes
def test_each_row_turns_its_own_knob_and_no_other(found: dict[tuple[str, bool], dict[str, Any]]) -> None:
    for name in KNOBS:
        result = found[name, False]
        ahead = name in ("fsdp2-prefetch2", "fsdp2-tuned-deep")
        assert any(result["forward"].values()) == any(result["backward"].values()) == ahead
        assert result["own groups"] == (name == "fsdp2-reduce-group")  # over gloo the tuned rows have no use for it
        assert result["buffers"] == ({2} if name in ("fsdp2-reduce-buffers2", "fsdp2-tuned-deep") else {1})


@pytest.mark.processes
def test_gathers_go_two_units_ahead_in_the_order_of_each_pass(found: dict[tuple[str, bool], dict[str, Any]]) -> None:
    root, first, second, third = IN_ORDER
    for result in (found["fsdp2-prefetch2", False], found["fsdp2-prefetch2", True], found["fsdp2-tuned-deep", True]):
        assert result["forward"] == {root: [first, second], first: [second, third], second: [third], third: []}
        assert result["backward"] == {root: [third, second], third: [second, first], second: [first], first: []}
    deep, embedding, head = found["fsdp2-tuned-deep", False], "model.embed_tokens", "model.norm"
    assert deep["forward"] == {
        root: [], embedding: [first, second], first: [second, third], second: [third, head], third: [head], head: [],
    }  # fmt: skip
    assert deep["backward"] == {
        root: [], embedding: [], head: [third, second], third: [second, first], second: [first], first: [],
    }  # fmt: skip


def refused(name: str, memory: str) -> str:
    try:
        wrap(make_strategy(name), case_of(name, comm_memory=memory)).timed_step(aligned=False)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_memory_that_gloo_does_not_have_is_unsupported_and_torchs_own_is_had() -> None:
    names = [n for n in (*KNOBS, "refshard-zero2", "refshard-yafsdp") if "comm_memory" in ROWS[n].axes]
    assert len(names) == len(KNOBS) + 2
    wanted = [(name, memory) for name in names for memory in ("allocator", "group", "symmetric")]
    for ranks in run_each(2, refused, wanted):
        for (_, memory), said in zip(wanted, ranks):
            needs = f"comm_memory: '{memory}' needs NCCL on GPUs, got gloo on cpu; use 'default'"
            assert said == ("" if memory == "allocator" else needs)


@pytest.mark.processes
def test_one_rank_has_nobody_to_share_memory_with() -> None:
    for name in ("fsdp2", "refshard-yafsdp"):
        (said,) = run_ranks(1, refused_alone, name)
        assert said == "comm_memory: must be 'default' for a single rank, got 'group'"


def refused_alone(name: str) -> str:
    case = Case.of(strategy=name, model="small", gpus=1, global_batch=1, seq_len=8, comm_memory="group")
    with pytest.raises(UnsupportedError) as error:
        wrap(make_strategy(name), case)
    return str(error.value)


def test_a_knob_that_this_torch_lacks_is_named_with_the_torch_that_has_it() -> None:
    check_method("set_separate_reduce_scatter_group")
    with pytest.raises(UnsupportedError, match=r"FSDP2's set_no_such_knob needs torch >= 2\.13, got torch "):
        check_method("set_no_such_knob")
