"""Strategies that compile, on two ranks: a compiler may merge and move collectives, but no byte of them may differ.

Inductor's graph passes run as always, but it fuses nothing (``fallback_by_default``, which its lite mode sets too): the
C++ that it would write compiles for a minute a model, and changes no collective, as `make full` shows of the few cells
that run by default.
"""

from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError
from refshard.measure.trainer import Trainer
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.strategies import make_strategy
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_ranks
from tests.models import small_spec
from tests.strategies.test_strategies import CountingMode

pytestmark = pytest.mark.processes

LAYERS, STEPS, LEARNING_RATE = 2, 4, 1e-3
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, accumulated": {"microbatches": 2},
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "tied, both": {"microbatches": 2, "checkpointing": (1,)},
    "inference": {"workload": "inference"},
    "tied, inference": {"workload": "inference"},
    "bf16": {"precision": "bf16"},
    "bf16, both": {"precision": "bf16", "microbatches": 2, "checkpointing": "full"},
    "bf16, inference": {"precision": "bf16", "workload": "inference"},
}
NAMES = tuple(name for name, row in ROWS.items() if row.compiles)
Cell = tuple[str, str]
FEW: list[Cell] = [
    ("plain", "simplefsdp"),
    ("plain", "simplefsdp-bucket"),
    ("tied, accumulated", "simplefsdp-by-block"),
    ("plain", "fsdp2-compiled"),
    ("plain", "refshard-yafsdp-compiled"),
]
ALL: list[Cell] = list(
    dict.fromkeys(
        (
            *FEW,
            *zip(SCENARIOS, cycle(NAMES)),
            *((scenario, "simplefsdp") for scenario in SCENARIOS),
            *((scenario, "simplefsdp-by-block") for scenario in ("full", "inference")),
        )
    )
)
"""Of what takes a minute each to compile: every scenario under one strategy, and under another in turn."""


def case_of(scenario: str, name: str) -> Case:
    """Eight sequences a step; an odd vocabulary, whose rows two ranks cannot share evenly."""
    ranks = 1 if name == "single" else 2
    return Case.of(
        strategy=name, model="small", gpus=ranks, global_batch=8, seq_len=8, learning_rate=LEARNING_RATE,
        **SCENARIOS[scenario],
    )  # fmt: skip


def train(case: Case, tied: bool, fused: bool = False) -> dict[str, Any]:
    from torch._inductor import config  # here: it takes seconds to import

    with config.patch(fallback_by_default=not fused):
        return _train(case, tied)


def _train(case: Case, tied: bool) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    strategy = make_strategy(case.job.strategy)
    trainer = Trainer(case, small_spec(n_layers=LAYERS, tied=tied, vocab=257), strategy, group, torch.device("cpu"))
    for _ in range(STEPS - 1):
        trainer.timed_step(aligned=False)
    with CountingMode() as counted:
        trainer.timed_step(aligned=False)
    return {
        "units": strategy.wrapped_units(),
        "announced": strategy.announced(),
        "counted": counted.found(),
        "losses": trainer.losses,
        "parameters": dict(strategy.full_parameters()),
    }


def train_all(cells: list[Cell]) -> dict[Cell, dict[str, Any]]:
    return {(scenario, name): train(case_of(scenario, name), "tied" in scenario) for scenario, name in cells}


def eager_of(name: str) -> str:
    """The strategy that it compiles, by block or as one model; empty for SimpleFSDP, which has no eager form."""
    eager, compiled, _ = name.partition("-compiled")
    return eager if compiled else ""


@cache
def trained(few: bool) -> dict[Cell, dict[str, Any]]:
    """The few cells or the others, and beside them one unsharded rank and what is not compiled; each with the mean
    loss.
    """
    wanted = FEW if few else [cell for cell in ALL if cell not in FEW]
    scenarios = list(dict.fromkeys(scenario for scenario, _ in wanted))
    found: dict[Cell, dict[str, Any]] = run_ranks(1, train_all, [(scenario, "single") for scenario in scenarios])[0]
    eager = [(scenario, "fsdp2") for scenario in scenarios]
    eager += [(scenario, eager_of(name)) for scenario, name in wanted if eager_of(name)]
    ranks = run_ranks(2, train_all, [*dict.fromkeys(eager), *wanted])
    for cell, result in ranks[0].items():
        found[cell] = {**result, "losses": [sum(s) / 2 for s in zip(*(rank[cell]["losses"] for rank in ranks))]}
    return found


def of(cell: Cell, name: str = "") -> dict[str, Any]:
    """What a cell came to, or another strategy where it did."""
    return trained(cell in FEW)[(cell[0], name) if name else cell]


cells = pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=f"{c[1]}, {c[0]}", marks=() if c in FEW else pytest.mark.full) for c in ALL],
)


@cells
def test_announced_collectives_are_those_at_the_dispatcher(cell: Cell) -> None:
    assert of(cell)["announced"] == of(cell)["counted"]
    assert of(cell)["counted"]


@cells
def test_losses_equal_those_of_one_unsharded_rank(cell: Cell) -> None:
    tolerance = parity_tolerance(case_of(*cell))
    assert of(cell)["losses"] == pytest.approx(of(cell, "single")["losses"], rel=tolerance)


@cells
def test_full_parameters_are_fsdp2s(cell: Cell) -> None:
    """Under the same names, and close. Adam moves by its gradient's sign: one near zero may go the other way."""
    ours, theirs = of(cell)["parameters"], of(cell, "fsdp2")["parameters"]
    assert ours.keys() == theirs.keys()
    for name, whole in theirs.items():
        assert ours[name].shape == whole.shape
        assert (ours[name] - whole).abs().mean() < LEARNING_RATE / 100
        assert (ours[name] - whole).abs().max() <= 2.1 * STEPS * LEARNING_RATE


@cells
def test_units_are_parameters_or_blocks(cell: Cell) -> None:
    eager = eager_of(cell[1])
    expected = of(cell, eager)["units"] if eager else tuple(of(cell, "fsdp2")["parameters"])
    assert sorted(of(cell)["units"]) == sorted(expected)


def test_merged_collectives_are_fewer_of_as_many_bytes() -> None:
    """Each parameter's, against one for all: of P, all are gathered, and all but the embedding again for backward."""
    parameters = 3 + 9 * LAYERS
    none, merged = (of(("plain", name))["counted"] for name in ("simplefsdp", "simplefsdp-bucket"))
    assert [(c.op, c.count) for c in none] == [("all_gather", 2 * parameters - 1), ("reduce_scatter", parameters)]
    assert [(c.op, c.count) for c in merged] == [("all_gather", 2), ("reduce_scatter", 1)]
    assert [c.bytes for c in none] == [c.bytes for c in merged]


@pytest.mark.full
def test_merged_by_blocks_there_is_one_for_each_and_each_end() -> None:
    """Backward needs no embedding. A tied head's weight is gathered with the embedding, so none is saved there."""
    full, inference = (of((scenario, "simplefsdp-by-block"))["counted"] for scenario in ("full", "inference"))
    assert [(c.op, c.count) for c in full] == [("all_gather", 2 * LAYERS + 3), ("reduce_scatter", LAYERS + 2)]
    assert [(c.op, c.count) for c in inference] == [("all_gather", LAYERS + 2)]


@pytest.mark.full
def test_what_is_fused_issues_the_same_collectives() -> None:
    for scenario, name in FEW:
        fused = run_ranks(2, train, case_of(scenario, name), "tied" in scenario, True)[0]
        assert fused["announced"] == fused["counted"] == of((scenario, name))["counted"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["simplefsdp-by-block", "fsdp2-compiled", "refshard-yafsdp-compiled"])
def test_muon_steps_what_compiled_models_are_made_of(name: str) -> None:
    case = case_of("plain", name).changed(optimizer="muon", microbatches=2)
    (single,) = run_ranks(1, train, case.reference(), False)
    ranks = run_ranks(2, train, case, False)
    losses = [sum(step) / 2 for step in zip(*(rank["losses"] for rank in ranks))]
    assert losses == pytest.approx(single["losses"], rel=parity_tolerance(case))
    assert ranks[0]["announced"] == ranks[0]["counted"]
    if name == "simplefsdp-by-block":
        odd = case.changed(gpus=3, global_batch=12)
        assert all("rows divisible by 3 ranks for Muon" in said for said in run_ranks(3, refusal, odd))


def refusal(case: Case) -> str:
    try:
        train(case, False)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_without_a_compiler_it_is_refused() -> None:
    from torch._inductor import config

    from refshard.strategies.simplefsdp import check_compiler

    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(UnsupportedError, match="No working C\\+\\+"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
