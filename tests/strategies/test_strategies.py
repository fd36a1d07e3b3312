"""Every strategy on two ranks: units found on the model, collectives as announced, parameters whole.

On every axis that a strategy has, tied and not; some of them on four ranks.
"""

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard import strategies
from refshard.analysis.efficiency import link_bytes
from refshard.engine.placement import MODES
from refshard.errors import SpecError, UnsupportedError
from refshard.measure.trainer import Trainer
from refshard.models.llama import Llama, initialise
from refshard.records import CollectiveCount, parity_tolerance
from refshard.specs.case import Case
from refshard.specs.job import WHOLE_BATCH
from refshard.specs.model import ModelSpec
from refshard.strategies import check_name, make_strategy, strategy_for
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

pytestmark = pytest.mark.processes

C10D = {
    "allreduce_": ("all_reduce", lambda args: sum(t.nbytes for t in args[0])),
    "_allgather_base_": ("all_gather", lambda args: args[0].nbytes),
    "allgather_": ("all_gather", lambda args: sum(t.nbytes for tensors in args[0] for t in tensors)),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: args[1].nbytes),
    "alltoall_base_": ("all_to_all", lambda args: max(args[0].nbytes, args[1].nbytes)),
    "broadcast_": ("broadcast", lambda args: sum(t.nbytes for t in args[0])),
    "send": ("send", lambda args: sum(t.nbytes for t in args[0])),
    "recv_": ("recv", lambda args: sum(t.nbytes for t in args[0])),
    # Those that tensors with a placement issue.
    "all_reduce": ("all_reduce", lambda args: args[0].nbytes),
    "all_gather_into_tensor_out": ("all_gather", lambda args: args[0].nbytes * args[1]),
    "all_gather_into_tensor": ("all_gather", lambda args: args[0].nbytes * args[1]),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args: args[0].nbytes),
    "all_to_all_single": ("all_to_all", lambda args: args[0].nbytes),
}


class CountingMode(TorchDispatchMode):
    """Counts collectives at the dispatcher, independently of traces and of what strategies say.

    ``sent`` are the bytes that leave this rank: of an exchange all but its own part; of a gather or a scatter, to its
    W - 1 peers, (W - 1) / W of the whole, and of an all-reduce by a ring twice that.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.sizes = Counter[str](), Counter[str]()
        self.sent = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions refuse to run beneath a mode that does not say so."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what a DTensor makes of an operator comes here, its collectives too
        name = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
        if name[0] in ("c10d", "_c10d_functional") and not name[2].startswith(("wait", "_wrap")):
            op, size = C10D[name[2]]
            self.counts[op] += 1
            self.sizes[op] += size(args)
            self.sent += self._sent(op, size(args), args)
        return func(*args, **(kwargs or {}))

    def _sent(self, op: str, size: int, args: Any) -> float:
        ranks = dist.get_world_size()
        if op == "all_to_all" and len(args) > 4 and (split := args[4]):
            kept = split[dist.ProcessGroup.unbox(args[2]).rank()] / max(1, sum(split))
            return float(args[1].nbytes * (1 - kept))
        return size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)

    def found(self) -> tuple[CollectiveCount, ...]:
        return tuple(CollectiveCount(op=o, count=self.counts[o], bytes=self.sizes[o]) for o in sorted(self.counts))


CORE = tuple(n for n, row in ROWS.items() if not row.packages and not row.compiles)
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "accumulated": {"microbatches": 2},
    "both": {"microbatches": 4, "checkpointing": (0, 2)},
    "inference": {"workload": "inference"},
    "bf16": {"precision": "bf16"},
    "bf16 both": {"precision": "bf16", "microbatches": 2, "checkpointing": "full"},
    "bf16 inference": {"precision": "bf16", "workload": "inference"},
    "offload": {"offload": True, "microbatches": 2},
    "lora": {"tuning": "lora"},
    "qlora": {"tuning": "qlora", "checkpointing": "full"},
    "bf16 qlora": {"tuning": "qlora", "precision": "bf16"},
    "frozen": {"frozen": "first-2,head", "microbatches": 2},
    "8-bit": {"optimizer": "adamw-8bit"},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "muon both": {"optimizer": "muon", "precision": "bf16", "microbatches": 2, "checkpointing": "full"},
    "muon offload": {"optimizer": "muon", "offload": True},
    "muon replicas": {"optimizer": "muon", "gpus": 4, "dp_replicate": 2},
    "muon tensor parallel": {"optimizer": "muon", "gpus": 4, "tp": 2},
    "replicas": {"gpus": 4, "dp_replicate": 2, "microbatches": 2},
    "tensor parallel": {"gpus": 4, "tp": 2, "microbatches": 2},
    "tensor parallel alone": {"gpus": 2, "tp": 2, "checkpointing": "full", "precision": "bf16"},
}
TIED = ("plain", "frozen", "full", "accumulated", "inference", "tensor parallel")
"""Scenarios that are run with a tied model too."""
STEPS = 4
KEPT = ("ddp", "fsdp1-grad-op", "fsdp1-no-shard", "refshard-replicate", "refshard-zero1")
"""Strategies that gather nothing in inference: parameters are whole, or stay so after the first pass."""
VARIANTS = (
    "fsdp1-post", "fsdp1-no-prefetch", "fsdp2-prefetch2", "fsdp2-reduce-group", "fsdp2-reduce-buffers2",
    "fsdp2-tuned-deep",
)  # fmt: skip
"""Strategies that differ from the row above them in the order of calls alone."""
FEW = ("single", "ddp", "fsdp2", "refshard-yafsdp")
COMBINED = (
    "both", "bf16 both", "bf16 inference", "bf16 qlora", "muon both", "muon offload", "muon replicas",
    "muon tensor parallel", "tensor parallel alone",
)  # fmt: skip
"""Scenarios of which others hold each part."""
Key = tuple[bool, str, str]
Results = dict[Key, dict[str, Any]]


def case_of(name: str, scenario: str) -> Case:
    """Eight sequences a step, whatever the number of ranks."""
    fields = {"gpus": 1 if name == "single" else 2, **SCENARIOS[scenario]}
    return Case.of(strategy=name, model="small", global_batch=8, seq_len=8, learning_rate=1e-2, **fields)


def is_few(key: Key) -> bool:
    """Whether `make test` runs it: some strategies in most scenarios, and each strategy in one."""
    tied, scenario, name = key
    return not tied and (scenario == "plain" or (name in FEW and scenario not in COMBINED))


def cells() -> list[Key]:
    """Whether tied, scenario and strategy of all that these strategies claim to do."""
    found = []
    for tied, scenario, name in itertools.product((False, True), SCENARIOS, CORE):
        if (tied and scenario not in TIED) or (name == "single" and "gpus" in SCENARIOS[scenario]):
            continue
        if (name == "pipeline" and tied) or (name in VARIANTS and (tied or scenario not in ("plain", "inference"))):
            continue
        if name in WHOLE_BATCH and {"dp_replicate", "tp"} & SCENARIOS[scenario].keys():
            continue
        if name.startswith("refshard") and scenario == "muon tensor parallel":
            continue
        if not ROWS[name].lacks(case_of(name, scenario)) and not (name.startswith("fsdp1") and scenario == "offload"):
            found.append((tied, scenario, name))
    return found


CELLS = cells()


def observe(strategy: Strategy, case: Case, spec: ModelSpec | None) -> dict[str, Any]:
    """What a strategy says of some steps, and the last one's collectives as the dispatcher counts them."""
    group = dist.group.WORLD
    assert group is not None
    trainer = Trainer(case, spec, strategy, group, torch.device("cpu"))
    for _ in range(STEPS - 1):
        trainer.timed_step(aligned=False)
    with CountingMode() as counted:
        trainer.timed_step(aligned=False)
    return {
        "units": strategy.wrapped_units(),
        "announced": strategy.announced(),
        "counted": counted.found(),
        "sent": counted.sent,
        "losses": trainer.losses,
        "parameters": dict(strategy.full_parameters()),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of 4-bit weights, which are declared to be numbers and are none."""
    return tensor.contiguous().view(torch.uint8)


def train_all(wanted: list[Key]) -> Results:
    return {
        (tied, scenario, name): observe(make_strategy(name), case_of(name, scenario), small_spec(n_layers=3, tied=tied))
        for tied, scenario, name in wanted
    }


@cache
def trained(few: bool) -> Results:
    """The few cells, or the others; each with the mean loss over its ranks."""
    found: Results = {}
    for ranks_ in (1, 2, 4):
        wanted = [key for key in CELLS if is_few(key) is few and case_of(key[2], key[1]).job.gpus == ranks_]
        ranks = run_ranks(ranks_, train_all, wanted) if wanted else []
        for key in wanted:
            losses = [sum(step) / ranks_ for step in zip(*(rank[key]["losses"] for rank in ranks))]
            found[key] = {**ranks[0][key], "losses": losses}
    return found


def of(*key: Any) -> dict[str, Any]:
    """What the cell of this key came to."""
    return trained(is_few(key))[key]


def those(*scenarios: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """The cells of some scenarios, by default of all, without some strategies'."""
    return pytest.mark.parametrize(
        "cell",
        [
            pytest.param(cell, marks=() if is_few(cell) else pytest.mark.full)
            for cell in CELLS
            if (not scenarios or cell[1] in scenarios) and cell[2] not in but
        ],
        ids=lambda cell: f"{cell[2]}, {cell[1]}{', tied' if cell[0] else ''}",
    )


@those(but=("single",))
def test_announced_collectives_are_those_at_the_dispatcher(cell: Key) -> None:
    result = of(*cell)
    assert result["announced"] == result["counted"]
    assert bool(result["counted"]) == ("inference" not in cell[1] or cell[2] not in KEPT)


@those("plain", "full", "both", "inference", "bf16", "qlora", but=("single", *WHOLE_BATCH))
def test_bytes_that_a_report_takes_from_the_announced_are_those_sent(cell: Key) -> None:
    assert link_bytes(of(*cell)["announced"], world_size=2, hosts=2) == of(*cell)["sent"]


@those("plain", "inference", "lora", "replicas", "tensor parallel", but=("single", "ddp", *WHOLE_BATCH))
def test_every_block_is_a_unit_and_others_hold_the_rest(cell: Key) -> None:
    tied, _, name = cell
    blocks = {f"model.layers.{i}" for i in range(3)}
    units = set(of(*cell)["units"])
    assert blocks < units
    assert units == set(of(tied, "plain", name)["units"])


@those()
def test_losses_equal_those_of_one_unsharded_rank(cell: Key) -> None:
    case = case_of(cell[2], cell[1])
    plain = {"adamw": "plain", "adamw-8bit": "8-bit"}.get(case.job.optimizer, case.job.optimizer)
    plain = "frozen" if case.job.frozen else plain
    like = "inference" if case.job.workload == "inference" else {"full": plain}.get(case.job.tuning, case.job.tuning)
    reference = of(cell[0], like, "single")["losses"]
    assert of(*cell)["losses"] == pytest.approx(reference, rel=parity_tolerance(case))
    assert case.job.workload == "inference" or reference[-1] < reference[0]


@those("plain", "full", "inference", "lora", "qlora", "bf16 qlora", but=("single", *WHOLE_BATCH))
def test_losses_and_parameters_equal_ddp_to_the_bit(cell: Key) -> None:
    ours, ddp = of(*cell), of(*cell[:2], "ddp")
    assert ours["losses"] == ddp["losses"]
    assert ours["parameters"].keys() == ddp["parameters"].keys()
    assert all(torch.equal(bits(ours["parameters"][n]), bits(p)) for n, p in ddp["parameters"].items())


@those("muon", but=("single", "fsdp2", "fsdp2-tuned", *WHOLE_BATCH))
def test_whole_matrices_are_stepped_as_ddp_steps_them_to_the_bit(cell: Key) -> None:
    """Where DTensor divides the products of matrices, they are summed in another order."""
    ours, ddp = of(*cell), of(False, "muon", "ddp")
    assert ours["losses"] == ddp["losses"]
    assert all(torch.equal(ours["parameters"][n], p) for n, p in ddp["parameters"].items())


@those("bf16", "offload", "replicas", but=("single", "ddp", *WHOLE_BATCH))
def test_strategies_that_cast_and_sum_alike_agree_to_the_bit(cell: Key) -> None:
    """Where DDP does not: it computes under autocast, and adds microbatches up before the ranks."""
    ours, theirs = of(*cell)["losses"], of(*cell[:2], "fsdp2")["losses"]
    assert ours == pytest.approx(theirs, rel=parity_tolerance(case_of(cell[2], cell[1])))
    # Whole gradients are added up in another order, which changes a bit on some machines.
    assert ours == theirs or (cell[1] != "bf16" and cell[2] in ("refshard-replicate", "refshard-zero1"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in CORE if n not in VARIANTS],
)
def test_recomputation_changes_no_bit_and_inference_no_weight(name: str) -> None:
    scenarios = ("plain", "full", "selective", "inference")
    plain, full, selective, inference = (of(False, s, name)["parameters"] for s in scenarios)
    model = Llama(small_spec(n_layers=3))
    initialise(model, 0)
    assert all(torch.equal(plain[n], full[n]) for n in plain)
    assert all(torch.equal(plain[n], selective[n]) for n in plain)
    assert all(torch.equal(inference[n], p) for n, p in model.named_parameters())


def on_one_rank(name: str) -> dict[str, Any]:
    return observe(make_strategy(name), case_of(name, "plain").changed(gpus=1), small_spec())


@pytest.mark.parametrize("name", ["tensor-parallel", "fsdp2", "refshard-yafsdp", "pipeline"])
def test_one_rank_announces_what_it_issues(name: str) -> None:
    (result,) = run_ranks(1, on_one_rank, name)
    assert result["announced"] == result["counted"]
    assert result["units"]


def unwrapped_units(name: str) -> tuple[str, ...]:
    """What a strategy finds on a model that was put in place of the one that it wrapped."""
    strategy, case = make_strategy(name), case_of(name, "plain")
    group = dist.group.WORLD
    assert group is not None
    Trainer(case, small_spec(), strategy, group, torch.device("cpu"))
    vars(strategy)["_model"] = Llama(small_spec())
    return strategy.wrapped_units()


@pytest.mark.parametrize(
    "name", ["fsdp2", "fsdp2-tuned", pytest.param("simplefsdp", marks=pytest.mark.full), "tensor-parallel"]
)
def test_units_are_found_and_not_said(name: str) -> None:
    assert run_ranks(2, unwrapped_units, name) == [(), ()]


def refused(name: str, changes: dict[str, Any], spec: ModelSpec) -> str:
    case = case_of(name, "muon").changed(gpus=dist.get_world_size(), **changes)
    group = dist.group.WORLD
    assert group is not None
    try:
        Trainer(case, spec, make_strategy(name), group, torch.device("cpu"))
    except UnsupportedError as error:
        return str(error)
    return ""


def test_what_muon_cannot_step_is_unsupported_in_the_peers_own_words() -> None:
    two = small_spec(n_layers=1, n_heads=2, n_kv_heads=1, dim=4, ffn_dim=8)
    assert run_ranks(2, refused, "fsdp2", {}, two) == [""] * 2
    for said in run_ranks(4, refused, "fsdp2", {}, two):  # keys have two rows
        assert said.startswith("torch's Muon over DTensors says: RuntimeError: aten.add_.Tensor: in-place operations")
    for said in run_ranks(2, refused, "refshard-fsdp", {"tp": 2, "global_batch": 8}, small_spec()):
        assert said == "the engine does not support Muon on matrices split by tensor parallelism"


def test_heads_that_are_normed_are_not_split() -> None:
    """Each rank would have the gradient of its own heads only."""
    for said in run_ranks(2, refused, "tensor-parallel", {"optimizer": "adamw"}, small_spec(query_norm=True)):
        assert said.endswith("nothing here sums their gradients, got query_norm = true")


def test_every_mode_of_the_engine_has_a_row_and_every_row_a_class() -> None:
    assert {f"refshard-{mode}" for mode in MODES} <= ROWS.keys()
    for row in ROWS.values():
        module, _, class_name = row.code.partition(".")
        source = (Path(strategies.__path__[0]) / f"{module}.py").read_text()
        assert f"class {class_name}(Strategy):" in source, row.code


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(SpecError, match=r"strategy: no strategy 'fsdp3'; did you mean 'fsdp2'\?"):
        check_name("fsdp3")


def test_what_a_strategy_lacks_is_named() -> None:
    case = case_of("tensor-parallel", "plain")
    lacking = case.changed(tuning="qlora", offload=True)
    with pytest.raises(
        UnsupportedError,
        match="refshard does not support tensor-parallel with offload, qlora; see refshard list strategies",
    ):
        strategy_for(lacking, cuda=False)
    assert isinstance(strategy_for(case, cuda=False), Strategy)
    flat = "refshard does not support fsdp1 with muon; muon: each rank steps a 1-D part of a flattened matrix, and"
    with pytest.raises(UnsupportedError, match=flat):
        strategy_for(case_of("fsdp1", "muon"), cuda=False)
