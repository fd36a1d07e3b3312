"""Accelerate and transformers' Trainer on two ranks: that they shard, what they issue, and that nothing else passes."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from refshard.errors import RefshardError, UnsupportedError
from refshard.measure.launchers.base import rank_environment
from refshard.measure.trainer import Trainer
from refshard.models.llama import Llama, initialise
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.strategies import make_strategy
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_ranks
from tests.models import small_spec
from tests.strategies.test_strategies import CountingMode

PEERS = ("accelerate", "hf-trainer")
MISSING = ROWS["accelerate"].missing() or ROWS["hf-trainer"].missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.full]

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"microbatches": 2},
    "full": {"checkpointing": "full"},
    "bf16": {"precision": "bf16", "microbatches": 2},
    "offload": {"offload": True, "microbatches": 2},
    "inference": {"workload": "inference"},
    "lora": {"tuning": "lora"},
    "lora full": {"tuning": "lora", "checkpointing": "full"},
    "bf16 qlora": {"tuning": "qlora", "precision": "bf16"},
}
TIED = ("plain", "lora")
"""Scenarios that are run with a tied model too."""
TRAPS = {
    "replicated": "the model was replicated: it is a DistributedDataParallel",
    "unwrapped": "the model was left as it was: LlamaForCausalLM is no FSDPModule",
    "half": "Accelerate must see FSDP2, got the distributed type DistributedType.MULTI_CPU",
    "root only": "no unit was made of model.layers.0",
    "others stepped": "the optimizer does not hold the sharded parameters that are trained",
}
"""Ways to use Accelerate that train without a word, and what is to be said of each."""
Refusal = tuple[str, dict[str, Any]]
REFUSALS: list[Refusal] = [
    ("accelerate", {"checkpointing": "selective"}),
    ("accelerate", {"checkpointing": "full", "tuning": "lora"}),
    ("hf-trainer", {}),
]
STEPS, DROPPING = 3, 2
Key = tuple[str, str, bool]
Results = dict[Key, dict[str, Any]]


class Counting(CountingMode):
    """Counts what tensors with a placement issue within their own dispatch too, and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        self.attentions += func == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def case_of(name: str, scenario: str) -> Case:
    fields = {"gpus": 1 if name == "single" else 2, **SCENARIOS[scenario]}
    return Case.of(strategy=name, model="small", global_batch=8, seq_len=8, learning_rate=1e-2, **fields)


def cells(*names: str) -> list[Key]:
    return [
        (name, scenario, tied)
        for name in names
        for scenario in SCENARIOS
        for tied in (False, True)
        if (not tied or scenario in TIED)
        and not ROWS[name].lacks(case_of(name, scenario))
        and (name, scenario) not in (("accelerate", "lora full"), ("single", "offload"))
    ]


CELLS = cells(*PEERS)
each = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}, {cell[1]}{', tied' if cell[2] else ''}")


def train(name: str, scenario: str, tied: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    case, strategy = case_of(name, scenario), make_strategy(name)
    trainer = Trainer(case, small_spec(n_layers=3, tied=tied), strategy, group, torch.device("cpu"))
    for _ in range(STEPS - 1):
        trainer.timed_step(aligned=False)
    with Counting() as counted:
        trainer.timed_step(aligned=False)
    result = {
        "units": strategy.wrapped_units(),
        "announced": strategy.announced(),
        "counted": counted.found(),
        "attentions": counted.attentions,
        "parameters": dict(strategy.full_parameters()),
    }
    trainer.begin_dropout()
    for _ in range(DROPPING if case.job.tuning == "lora" else 0):
        trainer.timed_step(aligned=False)
    return {**result, "losses": trainer.losses[:STEPS], "dropping": trainer.losses[STEPS:]}


def run_all(traps: list[str], refusals: list[Refusal]) -> tuple[Results, list[str], list[str]]:
    """All in one launch, since a process takes seconds to import transformers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, by which Accelerate finds out that there are several ranks.
    os.environ |= rank_environment(rank, rank, world_size=ranks, local_world_size=ranks, address="127.0.0.1", port=1)
    both = dist.group.WORLD
    alone, _ = dist.new_subgroups(1)
    assert both is not None
    results = {key: train(*key, alone if key[0] == "single" else both) for key in [*CELLS, *cells("fsdp2", "single")]}
    return results, [trap(kind) for kind in traps], [refusal(name, fields, alone) for name, fields in refusals]


@pytest.fixture(scope="module")
def on_ranks() -> list[Any]:
    return run_ranks(2, run_all, list(TRAPS), REFUSALS)


@pytest.fixture(scope="module")
def trained(on_ranks: list[Any]) -> Results:
    """All cells, those of torch's FSDP2 and one rank's, each with the mean loss over its ranks."""
    (ours, *_), (theirs, *_) = on_ranks
    return {
        key: {**result, "losses": [(a + b) / 2 for a, b in zip(result["losses"], theirs[key]["losses"])]}
        for key, result in ours.items()
    }


@each
def test_announced_collectives_are_those_at_the_dispatcher(trained: Results, cell: Key) -> None:
    assert trained[cell]["announced"] == trained[cell]["counted"] != ()


@each
def test_losses_equal_those_of_one_unsharded_rank(trained: Results, cell: Key) -> None:
    name, scenario, tied = cell
    reference = trained["single", "plain" if scenario == "offload" else scenario, tied]["losses"]
    assert trained[cell]["losses"] == pytest.approx(reference, rel=parity_tolerance(case_of(name, scenario)))
    assert scenario != "plain" or reference[1:] != trained["single", "inference", False]["losses"][1:]


@each
def test_full_parameters_are_those_of_fsdp2(trained: Results, cell: Key) -> None:
    """Up to the arithmetic of transformers' own Llama, which Adam enlarges; what is frozen, to the bit."""
    ours, fsdp2 = trained[cell]["parameters"], trained["fsdp2", *cell[1:]]["parameters"]
    case = case_of(*cell[:2])
    assert list(ours) == list(fsdp2)
    for name, value in fsdp2.items():
        if case.job.tuning != "full" and ".lora_" not in name:
            assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8))
        elif case.job.precision == "fp32":
            torch.testing.assert_close(ours[name], value, rtol=0, atol=5e-4)


@each
def test_units_are_blocks_embedding_and_tail(trained: Results, cell: Key) -> None:
    blocks = [f"model.layers.{i}" for i in range(3)]
    if not cell[2]:
        rest = ["model.embed_tokens", "model.norm+lm_head"]
    elif cell[0] == "accelerate":
        rest = ["model.embed_tokens+model.norm+lm_head"]
    else:
        rest = ["model.embed_tokens+model.norm", "root"]
    assert sorted(trained[cell]["units"]) == sorted([*blocks, *rest])


@each
def test_blocks_that_are_checkpointed_run_again_in_backward(trained: Results, cell: Key) -> None:
    case = case_of(*cell[:2])
    assert trained[cell]["attentions"] == 3 * case.job.microbatches * (2 if case.job.checkpointing == "full" else 1)


@pytest.mark.parametrize("name", PEERS)
def test_adapters_drop_only_once_they_are_told_to(trained: Results, name: str) -> None:
    """Until then losses equal one rank's, which the Trainer's ``model.train()`` at each step must not change."""
    ours, plain = trained[name, "lora", False], trained["fsdp2", "lora", False]
    tolerance = parity_tolerance(case_of(name, "lora"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    assert ours["dropping"] == pytest.approx(plain["dropping"], rel=tolerance)
    assert ours["dropping"] != pytest.approx(plain["losses"], rel=tolerance)


def test_the_trainer_recomputes_what_was_dropped(trained: Results) -> None:
    recomputed, plain = trained["hf-trainer", "lora full", False], trained["hf-trainer", "lora", False]
    assert recomputed["dropping"] == plain["dropping"]


def trap(kind: str) -> str:
    """Use Accelerate as one would on a GPU, or with half of what a CPU takes; return what is said of the outcome."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from refshard.models.transformers_llama import BLOCK, llama_for_causal_lm
    from refshard.strategies.accelerate_fsdp2 import check_accelerator, check_sharded, shard_on_cpu

    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap" if kind == "root only" else "transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCK],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=kind != "unwrapped", fsdp_plugin=plugin)
    if kind == "half":
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    elif kind in ("root only", "others stepped"):
        shard_on_cpu(accelerator, plugin)
    model = Llama(small_spec(n_layers=3))
    initialise(model, 0)
    theirs = llama_for_causal_lm(model)
    wrapped, optimizer = accelerator.prepare(theirs, torch.optim.AdamW(theirs.parameters()))
    if kind == "others stepped":
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    try:
        check_sharded(wrapped, optimizer)
        check_accelerator(accelerator)
    except RefshardError as error:
        return str(error)
    return "nothing"


def test_what_is_not_sharded_is_caught(on_ranks: list[Any]) -> None:
    for _, said, _ in on_ranks:
        for kind, answer in zip(TRAPS, said, strict=True):
            assert answer.startswith(TRAPS[kind]), kind


def refusal(name: str, fields: dict[str, Any], group: dist.ProcessGroup) -> str:
    case = Case.of(strategy=name, model="small", gpus=1, global_batch=8, seq_len=8, **fields)
    with pytest.raises(UnsupportedError) as error:
        Trainer(case, small_spec(n_layers=3), make_strategy(name), group, torch.device("cpu"))
    return str(error.value)


def test_what_they_cannot_do_is_refused(on_ranks: list[Any]) -> None:
    some, recomputing, alone = on_ranks[0][2]
    assert some == "Accelerate's checkpointing must be 'none' or 'full', got 'selective'"
    assert "would draw a different dropout mask" in recomputing
    assert alone == "transformers' DistributedConfig shards nothing over one rank"
