"""The closed forms that `plan` predicts by, held to dry runs of the same cases: memory and collectives.

``closed_forms.json`` holds what the dry runs came to. ``make test`` repeats three of them and ``make full`` all;
``pytest tests/dryrun/test_closed_forms.py --accept`` rewrites it. Memory is what torch's allocator hands out. cuBLAS's
workspaces, which closed forms leave out, are switched off in the dry runs too. The allocator gives a block the rest of
a segment where that is at most 1 MiB; closed forms do not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import msgspec
import pytest

from refshard.measure.dry.many import dry_run_many
from refshard.plan.estimate import estimate
from refshard.plan.space import Candidates
from refshard.records import CollectiveCount
from refshard.specs.case import Case, Protocol
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job, Optimizer, Precision, Schedule, Tuning
from refshard.specs.model import ModelSpec, load_model, parameter_count
from refshard.specs.writing import to_toml
from tests.fakecuda.needs import needs_device
from tests.plan.issued import issued_by_rank

RECORDED = Path(__file__).with_name("closed_forms.json")

PEERS = ("ddp", "fsdp1", "fsdp2", "fsdp2-tuned")
ENGINE = tuple(f"refshard-{mode}" for mode in ("replicate", "zero1", "zero2", "fsdp", "yafsdp"))
HYBRID = ("fsdp1", "fsdp2", "fsdp2-tuned", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
POLICIES = ("none", "selective", "full")
MODELS = ("llama3-8b", "llama3.2-1b")
"""One with units beside the blocks, and one whose ends are tied, with a vocabulary that decides its peak."""
CLUSTER, DATA_RANKS = "dgx-h100x8", 4

ERROR, FP32_ERROR = 0.02, 0.03


@dataclass(frozen=True, slots=True)
class Cell:
    """A case: one sequence for each data-parallel rank and microbatch. ``layers`` of the model, or all."""

    strategy: str
    model: str
    policy: str
    ranks: int
    microbatches: int
    layers: int | None = None
    replicas: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    interleave: int = 1
    zero_bubble: bool = False
    fp32: bool = False
    tuning: Tuning = "full"
    optimizer: Optimizer = "adamw"
    frozen: str = ""

    def __str__(self) -> str:
        layers = f"x{self.layers}" if self.layers else ""
        axes = f"r{self.replicas}t{self.tp}c{self.cp}p{self.pp}i{self.interleave}"
        flags = "zero-bubble" * self.zero_bubble + "fp32" * self.fp32 + self.tuning * (self.tuning != "full")
        flags += self.optimizer * (self.optimizer != "adamw") + self.frozen
        name = f"{self.strategy}-{self.model}{layers}-{self.policy}-w{self.ranks}m{self.microbatches}-{axes}-{flags}"
        return name.removesuffix("-")

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the batch is divided."""
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return 8192 if self.fp32 else 4096

    @property
    def precision(self) -> Precision:
        """What it computes in."""
        return "fp32" if self.fp32 else "bf16"


def data_parallel(
    strategy: str, place: int, ranks: int, replicas: int, policy: str, microbatches: int | None = None
) -> Cell:
    """Of the model at ``place``; by default, microbatches change with it, too."""
    model = MODELS[place % 2]
    return Cell(
        strategy, model, policy, ranks, microbatches or 1 + place // 2 % 2, layers=3 if place % 2 == 0 else None,
        replicas=replicas,
    )  # fmt: skip


def grid() -> list[Cell]:
    """All strategies over all axes, models and microbatches in turn; as many replicas as nodes in hybrid sharding."""
    plain = product((*PEERS, *ENGINE), (8, 64), (1,), POLICIES)
    hybrid = product(HYBRID, (64,), (8,), POLICIES)
    return [data_parallel(strategy, place, *rest) for place, (strategy, *rest) in enumerate((*plain, *hybrid))]  # type: ignore[arg-type]


def split_grid() -> list[Cell]:
    """FSDP2 and DDP over the other axes; torch splits no tied model over a pipeline, and no DDP over tensors."""
    axes: list[dict[str, int]] = [
        {"tp": 2, "microbatches": 1},
        {"tp": 4, "microbatches": 2},
        {"cp": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 4, "layers": 4},
        {"pp": 4, "microbatches": 8, "layers": 8},
        {"pp": 2, "interleave": 2, "microbatches": 4, "layers": 8},
        {"pp": 4, "interleave": 2, "microbatches": 12, "layers": 16},
        {"tp": 2, "cp": 2, "pp": 2, "microbatches": 4, "layers": 4},
        {"tp": 4, "cp": 2, "pp": 4, "microbatches": 8, "layers": 8},
    ]
    found = []
    for strategy, model, axis, policy in product(("fsdp2", "ddp"), MODELS, axes, POLICIES):
        if (model == MODELS[1] and "pp" in axis) or (strategy == "ddp" and "tp" in axis):
            continue
        divided = axis.get("tp", 1) * axis.get("cp", 1) * axis.get("pp", 1)
        layers = axis.get("layers", 3 if model == MODELS[0] else None)
        found.append(Cell(strategy, model, policy, DATA_RANKS * divided, **{**axis, "layers": layers}))  # type: ignore[arg-type]
    for pp, interleave in ((2, 1), (4, 2)):
        found.append(
            Cell(
                "fsdp2", MODELS[0], "none", DATA_RANKS * pp, microbatches=8, layers=16, pp=pp,
                interleave=interleave, zero_bubble=True,
            )
        )  # fmt: skip
    return found


FP32 = [Cell("fsdp2", MODELS[0], policy, 8, 1, fp32=True) for policy in POLICIES]
"""With grouped heads CUDA has no fused kernel in fp32: 8 GiB of scores a layer."""


def tuned_grid() -> list[Cell]:
    """One GPU, and adapters there and over the strategies."""
    tunings: tuple[Tuning, ...] = ("full", "lora", "qlora")
    one = [
        Cell("single", model, policy, 1, microbatches, layers=layers, tuning=tuning)
        for tuning, policy in product(tunings, POLICIES)
        for model, microbatches, layers in ((MODELS[0], 1, 3), (MODELS[1], 2, None))
    ]
    several = product((*PEERS, *ENGINE), tunings[1:])
    return one + [
        Cell(strategy, MODELS[0], POLICIES[place % 3], 8, 1 + place % 2, layers=4, tuning=tuning)
        for place, (strategy, tuning) in enumerate(several)
    ]


def optimizer_grid() -> list[Cell]:
    """Other optimizers than AdamW, each where it steps tensors of another kind."""
    tunings: tuple[tuple[Optimizer, str, Tuning], ...] = (
        *(("sgd", strategy, "full") for strategy in ("single", "ddp", "fsdp2", "refshard-zero1", "refshard-yafsdp")),
        *(("adafactor", strategy, "full") for strategy in ("single", "ddp", "refshard-replicate")),
        ("sgd", "fsdp2", "lora"), ("adafactor", "single", "lora"),
    )  # fmt: skip
    return [
        Cell(
            strategy, MODELS[0], POLICIES[place % 3], 1 if strategy == "single" else 8, 1 + place % 2, layers=3,
            tuning=tuning, optimizer=optimizer,
        )
        for place, (optimizer, strategy, tuning) in enumerate(tunings)
    ]  # fmt: skip


def frozen_grid() -> list[Cell]:
    """Frozen parts over the strategies; enough layers are trained to take turns in YaFSDP's ring."""
    parts = ("first-2", "embedding,head", "first-3,head")
    strategies = ("single", "ddp", "fsdp2", *ENGINE)
    return [
        Cell(
            strategy, MODELS[0], POLICIES[(place + shift) % 3], 1 if strategy == "single" else 8,
            1 + (place + shift // 2) % 2, layers=8 if strategy == "refshard-yafsdp" else 4,
            frozen=parts[(place + 2 * shift) % 3],
        )
        for shift in (0, 1) for place, strategy in enumerate(strategies)
    ]  # fmt: skip


CELLS = [*grid(), *split_grid(), *FP32, *tuned_grid(), *optimizer_grid(), *frozen_grid()]
FEW = [cell for cell in CELLS if str(cell) in {
    "refshard-fsdp-llama3-8bx3-none-w64m2-r8t1c1p1i1", "fsdp2-llama3-8bx3-none-w8m2-r1t1c2p1i1",
    "fsdp2-llama3-8bx4-none-w8m4-r1t1c1p2i1",
}]  # fmt: skip
"""Of each kind one: hybrid sharding, and two of the axes that split a model."""


def job_of(cell: Cell, model: str = "") -> Job:
    """The cell as a job; ``model`` is the file of one that is cut."""
    return Job(
        strategy=cell.strategy, model=model or cell.model, gpus=cell.ranks, cluster=CLUSTER, seq_len=cell.seq_len,
        global_batch=cell.data_ranks * cell.microbatches, microbatches=cell.microbatches, checkpointing=cell.policy,
        precision=cell.precision, dp_replicate=cell.replicas, tp=cell.tp, sequence_parallel=cell.tp > 1, cp=cell.cp,
        pp=cell.pp, interleave=cell.interleave, schedule=_schedule(cell), tuning=cell.tuning,
        optimizer=cell.optimizer, frozen=cell.frozen,
    )  # fmt: skip


def _schedule(cell: Cell) -> Schedule:
    if cell.zero_bubble:
        return "zero-bubble"
    return "interleaved" if cell.interleave > 1 else "1f1b"


def _model(cell: Cell, folder: Path) -> str:
    if cell.layers is None:
        return cell.model
    path = folder / f"{cell.model}-{cell.layers}.toml"
    path.write_text(to_toml(model_of(cell)))
    return str(path)


def model_of(cell: Cell) -> ModelSpec:
    """The model, cut to so many layers."""
    model = load_model(cell.model)
    if cell.layers is None:
        return model
    cut = msgspec.structs.replace(model, n_layers=cell.layers, source=f"{cell.layers} layers")
    return msgspec.structs.replace(cut, params=parameter_count(cut))


class Recorded(msgspec.Struct):
    """What a dry run of a cell came to.

    ``allocated`` is the most that the allocator hands out on a rank, without a limit of memory, in bytes; ``issued``
    has, for each rank of the pipeline, the number and the bytes of collectives by kind.
    """

    allocated: int
    issued: list[dict[str, tuple[int, int]]]


def dry_run(cells: Sequence[Cell], folder: Path) -> dict[str, Recorded]:
    cases = [Case(job=job_of(cell, _model(cell, folder)), protocol=Protocol(fidelity="dryrun")) for cell in cells]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    found = dry_run_many(cases, folder / "runs", lambda _: None, time_limit_s=3600, environment=environment)
    recorded = {}
    for cell, results in zip(cells, found, strict=True):
        assert [(one.state, one.error) for one in results] == [("ok", None)] * cell.pp, cell
        allocated = max(one.peak.allocated for one in results)
        recorded[str(cell)] = Recorded(allocated, [_by_kind(step.issued) for step in results[-1].steps])
    return recorded


def _by_kind(issued: Sequence[CollectiveCount]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for one in issued:
        if one.op != "broadcast":  # of the mean loss
            count, nbytes = found.get(one.op, (0, 0))
            found[one.op] = count + one.count, nbytes + one.bytes
    return found


@cache
def recorded() -> dict[str, Recorded]:
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Recorded])


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_memory_is_what_the_strategys_own_code_allocates(cell: Cell, request: pytest.FixtureRequest) -> None:
    if cell.interleave > 1 and cell.pp > 2 and (cell.strategy == "ddp" or cell.policy != "none"):
        request.applymarker(pytest.mark.xfail(reason="interleaved over four ranks: 2 to 4 % off", strict=True))
    cluster = load_cluster(CLUSTER).of_world_size(cell.ranks)
    memory = estimate(model_of(cell), cluster, cell.seq_len, Candidates.of([job_of(cell)])).memory
    error = FP32_ERROR if cell.fp32 else ERROR
    assert float(memory.peak[0]) == pytest.approx(recorded()[str(cell)].allocated, rel=error)


@pytest.mark.parametrize("cell", split_grid(), ids=str)
def test_collectives_are_those_that_the_code_issues(cell: Cell) -> None:
    """Number and bytes by kind, of each rank of the pipeline. DDP's buckets are one reduction in closed form."""
    for rank, issued in enumerate(recorded()[str(cell)].issued):
        priced = issued_by_rank(model_of(cell), job_of(cell), rank)
        assert {op: nbytes for op, (_, nbytes) in priced.items()} == pytest.approx(
            {op: n for op, (_, n) in issued.items()}
        )
        counts = {op: count for op, (count, _) in issued.items()}
        if cell.strategy == "ddp":
            counts["all_reduce"] = cell.interleave
        assert {op: count for op, (count, _) in priced.items()} == counts


@needs_device
@pytest.mark.parametrize(
    "cells", [pytest.param(FEW, marks=pytest.mark.processes), pytest.param(CELLS, marks=pytest.mark.full)], ids=len
)
def test_dry_runs_are_as_recorded(cells: list[Cell], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = dry_run(cells, tmp_path)
    if request.config.getoption("accept") and cells is CELLS:
        lines = (f"{json.dumps(name)}: {msgspec.json.encode(one).decode()}" for name, one in found.items())
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == {name: recorded()[name] for name in found}
