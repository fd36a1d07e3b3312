"""Every strategy on two ranks: units found on the model, collectives as announced, parameters whole.

In training and in inference, with accumulation and with recomputation, tied and not.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import refshard.strategies
from refshard.errors import SpecError
from refshard.harness.measure import Trainer
from refshard.models.llama import Llama, initialise
from refshard.records import PARITY_TOLERANCE, CollectiveCount
from refshard.report.efficiency import link_bytes
from refshard.specs.case import CaseSpec
from refshard.strategies import check_name, make_strategy, names
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

C10D = {
    "allreduce_": ("all_reduce", lambda args: sum(t.nbytes for t in args[0])),
    "_allgather_base_": ("all_gather", lambda args: args[0].nbytes),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: args[1].nbytes),
    "alltoall_base_": ("all_to_all", lambda args: args[1].nbytes),
    "broadcast_": ("broadcast", lambda args: sum(t.nbytes for t in args[0])),
}


class CountingMode(TorchDispatchMode):
    """Counts collectives at the dispatcher, independently of traces and of what strategies say.

    ``sent`` are the bytes that leave this rank: of an exchange all but its own part; of a gather or a scatter, to its
    W - 1 peers, (W - 1) / W of the whole, and of an all-reduce by a ring twice that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.sizes = Counter[str](), Counter[str]()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            op, size = C10D[name.removeprefix("c10d::")]
            self.counts[op] += 1
            self.sizes[op] += size(args)
            self.sent += self._sent(op, size(args), args)
        return func(*args, **(kwargs or {}))

    def _sent(self, op: str, size: int, args: Any) -> float:
        ranks = dist.get_world_size()
        if op == "all_to_all" and (split := args[4]):
            return size * (1 - float(split[dist.get_rank()] / sum(split)))
        return size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)

    def found(self) -> tuple[CollectiveCount, ...]:
        return tuple(CollectiveCount(op=o, count=self.counts[o], bytes=self.sizes[o]) for o in sorted(self.counts))


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"checkpointing": "full"},
    "accumulated": {"microbatches": 2},
    "both": {"microbatches": 4, "checkpointing": (0, 2)},
    "inference": {"workload": "inference"},
}
STEPS = 4
SHARDED = [n for n in names() if n not in ("single", "ddp")]
Results = dict[tuple[bool, str, str], dict[str, Any]]


def case_of(name: str, scenario: str) -> CaseSpec:
    """Eight sequences a step, whatever the number of ranks."""
    return CaseSpec(
        strategy=name,
        world_size=1 if name == "single" else 2,
        model="small",
        global_batch=8,
        seq_len=8,
        learning_rate=1e-2,
        **SCENARIOS[scenario],
    )


def train(case: CaseSpec, tied: bool) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    strategy = make_strategy(case.strategy)
    spec = small_spec(n_layers=3, tied=tied)
    trainer = Trainer(case, spec, strategy, group, torch.device("cpu"))
    for _ in range(STEPS):
        with CountingMode() as counted:
            trainer.timed_step(aligned=False)
    return {
        "units": strategy.wrapped_units(),
        "announced": strategy.announced(case.workload, case.microbatches),
        "counted": counted.found(),
        "sent": counted.sent,
        "losses": trainer.losses,
        "parameters": dict(strategy.full_parameters()),
    }


def train_all(strategies: list[str]) -> Results:
    every = itertools.product((False, True), SCENARIOS, strategies)
    return {(tied, scenario, name): train(case_of(name, scenario), tied) for tied, scenario, name in every}


@pytest.fixture(scope="module")
def trained() -> Results:
    """All strategies in all scenarios, each with the mean loss over its ranks."""
    found: Results = {}
    for world_size, strategies in ((1, ["single"]), (2, [n for n in names() if n != "single"])):
        ranks = run_ranks(world_size, train_all, strategies)
        for key, result in ranks[0].items():
            losses = [sum(step) / world_size for step in zip(*(rank[key]["losses"] for rank in ranks))]
            found[key] = {**result, "losses": losses}
    return found


tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
in_each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)


@tied_or_not
@in_each_scenario
@pytest.mark.parametrize("name", [n for n in names() if n != "single"])
def test_announced_collectives_are_those_at_the_dispatcher(
    trained: Results, tied: bool, scenario: str, name: str
) -> None:
    result = trained[tied, scenario, name]
    assert result["announced"] == result["counted"]
    keeps_parameters = name in ("ddp", "refshard-replicate", "refshard-zero1")
    assert bool(result["counted"]) == (scenario != "inference" or not keeps_parameters)


@tied_or_not
@in_each_scenario
@pytest.mark.parametrize("name", [n for n in names() if n != "single"])
def test_bytes_that_a_report_takes_from_the_announced_are_those_sent(
    trained: Results, tied: bool, scenario: str, name: str
) -> None:
    result = trained[tied, scenario, name]
    assert link_bytes(result["announced"], world_size=2, hosts=2) == result["sent"]


@pytest.mark.parametrize("scenario", ["plain", "inference"])
@tied_or_not
@pytest.mark.parametrize("name", SHARDED)
def test_every_block_is_a_unit_and_others_hold_the_rest(trained: Results, tied: bool, scenario: str, name: str) -> None:
    blocks = {f"model.layers.{i}" for i in range(3)}
    units = set(trained[tied, scenario, name]["units"])
    assert blocks < units
    assert units == set(trained[tied, "plain", name]["units"])


@tied_or_not
@in_each_scenario
@pytest.mark.parametrize("name", names())
def test_losses_equal_those_of_one_unsharded_rank(trained: Results, tied: bool, scenario: str, name: str) -> None:
    reference = trained[tied, "inference" if scenario == "inference" else "plain", "single"]
    assert trained[tied, scenario, name]["losses"] == pytest.approx(reference["losses"], rel=PARITY_TOLERANCE)


@tied_or_not
@pytest.mark.parametrize("scenario", ["plain", "full", "inference"])
@pytest.mark.parametrize("name", SHARDED)
def test_losses_and_parameters_equal_ddp_to_the_bit(trained: Results, tied: bool, scenario: str, name: str) -> None:
    ours, ddp = trained[tied, scenario, name], trained[tied, scenario, "ddp"]
    assert ours["losses"] == ddp["losses"]
    assert ours["parameters"].keys() == ddp["parameters"].keys()
    assert all(torch.equal(ours["parameters"][n], p) for n, p in ddp["parameters"].items())


@tied_or_not
@pytest.mark.parametrize("name", names())
def test_recomputation_changes_no_bit_and_inference_no_weight(trained: Results, tied: bool, name: str) -> None:
    plain, full, inference = (trained[tied, s, name]["parameters"] for s in ("plain", "full", "inference"))
    model = Llama(small_spec(n_layers=3, tied=tied))
    initialise(model, 0)
    assert all(torch.equal(plain[n], full[n]) for n in plain)
    assert all(torch.equal(inference[n], p) for n, p in model.named_parameters())


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(SpecError, match=r"strategy: no strategy 'fsdp3'; did you mean 'fsdp2'\?"):
        check_name("fsdp3")


def test_a_strategy_is_under_120_lines() -> None:
    folder = Path(refshard.strategies.__file__).parent
    assert max(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 120
