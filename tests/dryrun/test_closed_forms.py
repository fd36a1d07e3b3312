"""The closed forms that `plan` predicts memory by, held to dry runs of the same cases.

Both count what torch's allocator hands out. cuBLAS's workspaces, which the closed forms leave out, are switched off in
the dry runs too. The allocator gives a block the rest of a segment where that is at most 1 MiB; closed forms do not.
"""

from functools import cache
from itertools import product

import pytest

from refshard.memory.tensors import Batch
from refshard.memory.walk import RankJob, predict_memory
from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import RECIPES
from refshard.specs.case import CaseSpec
from refshard.specs.model import load_model
from tests.dryrun.forked import run_forked
from tests.fakecuda.needs import needs_device

pytestmark = pytest.mark.processes

PEERS = ("ddp", "fsdp1", "fsdp2", "fsdp2-tuned")
ENGINE = tuple(f"refshard-{mode}" for mode in ("replicate", "zero1", "zero2", "fsdp", "yafsdp"))
HYBRID = ("fsdp1", "fsdp2", "fsdp2-tuned", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
POLICIES = ("none", "selective", "full")
MODELS = ("llama3-8b-cut3", "llama3.2-1b")
"""One with units beside the blocks, and one whose ends are tied, with a vocabulary that decides its peak."""

ENGINE_ERROR, PEER_ERROR = 0.005, 0.02

COVER = [
    ("ddp", "llama3-8b-cut3", 8, 1, "none", 2),
    ("refshard-zero2", "llama3.2-1b", 8, 1, "selective", 1),
    ("fsdp2-tuned", "llama3-8b-cut3", 8, 1, "full", 1),
    ("refshard-yafsdp", "llama3.2-1b", 64, 1, "none", 1),
    ("refshard-zero1", "llama3-8b-cut3", 64, 1, "selective", 2),
    ("refshard-replicate", "llama3.2-1b", 64, 1, "full", 2),
    ("refshard-fsdp", "llama3.2-1b", 64, 8, "none", 1),
    ("fsdp1", "llama3-8b-cut3", 64, 8, "selective", 2),
    ("fsdp2", "llama3-8b-cut3", 64, 8, "full", 2),
]
"""Each strategy once, and each pair of values of the other axes."""

Case = tuple[str, str, int, int, str, int]


def grid() -> list[Case]:
    """All strategies over all axes, models and microbatches in turn; as many replicas as nodes in hybrid sharding."""
    plain = product((*PEERS, *ENGINE), (8, 64), (1,), POLICIES)
    hybrid = product(HYBRID, (64,), (8,), POLICIES)
    made = [
        (strategy, MODELS[index % 2], ranks, replicas, policy, 1 + index // 2 % 2)
        for index, (strategy, ranks, replicas, policy) in enumerate((*plain, *hybrid))
    ]
    return [case for case in made if case not in COVER]


def spec_of(strategy: str, model: str, ranks: int, replicas: int, policy: str, microbatches: int) -> CaseSpec:
    """Sequences of 4,096 tokens, one for each rank and microbatch."""
    return CaseSpec(
        strategy=strategy,
        world_size=ranks,
        model=model,
        global_batch=ranks * microbatches,
        seq_len=4096,
        microbatches=microbatches,
        checkpointing=policy,
        precision="bf16",
        replicas=replicas,
        fidelity="dryrun",
        cluster="dgx-h100x8",
    )


@cache
def dry_peaks(ranks: int, *, cover: bool) -> dict[Case, int]:
    """Bytes of the highest that the allocator hands out, without a limit of memory: of all cases of a world size."""
    cases = [case for case in (COVER if cover else grid()) if case[2] == ranks]
    results = run_forked([spec_of(*case) for case in cases])
    assert [(result.state, result.error) for result in results] == [("ok", None)] * len(cases)
    return {case: result.peak.allocated for case, result in zip(cases, results, strict=True)}


def predicted_peak(case: CaseSpec) -> int:
    """The same in closed form."""
    model = load_model(case.model)
    batch = Batch(
        sequences=case.global_batch // case.world_size // case.microbatches, seq_len=case.seq_len, dtype="bf16"
    )
    job = RankJob(
        model=model,
        world_size=case.world_size,
        batch=batch,
        microbatches=case.microbatches,
        checkpointing=checkpointing_of(case.checkpointing, model.n_layers),
        replicas=case.replicas,
    )
    return predict_memory(job, RECIPES[case.strategy]).peak


@needs_device
@pytest.mark.parametrize("case", [*COVER, *(pytest.param(case, marks=pytest.mark.full) for case in grid())], ids=str)
def test_a_closed_form_is_what_the_strategys_own_code_allocates(case: Case) -> None:
    strategy, _, ranks, *_ = case
    dry_peak = dry_peaks(ranks, cover=case in COVER)[case]
    assert predicted_peak(spec_of(*case)) == pytest.approx(
        dry_peak, rel=PEER_ERROR if strategy in PEERS else ENGINE_ERROR
    )
