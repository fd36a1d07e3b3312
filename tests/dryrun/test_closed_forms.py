"""The closed forms that `plan` predicts memory by, held to dry runs of the same cases.

Both count what torch's allocator hands out. cuBLAS's workspaces, which the closed forms leave out, are switched off in
the dry runs too. The allocator gives a block the rest of a segment where that is at most 1 MiB; closed forms do not.
"""

from itertools import product
from pathlib import Path

import pytest

from refshard.harness.dry.record import launch_dry
from refshard.harness.launchers.local import LocalLauncher
from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import find_recipe
from refshard.simulate.kernels import Batch
from refshard.simulate.memory import RankJob, predict_memory
from refshard.specs.case import CaseSpec
from refshard.specs.model import load_model
from tests.fakecuda.needs import needs_device

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
    """All strategies over all axes, the models in turn; hybrid sharding over as many replicas as there are nodes."""
    plain = product((*PEERS, *ENGINE), (8, 64), (1,), POLICIES, (1, 2))
    hybrid = product(HYBRID, (64,), (8,), POLICIES, (1, 2))
    made = [
        (strategy, MODELS[index % 2], ranks, replicas, policy, microbatches)
        for index, (strategy, ranks, replicas, policy, microbatches) in enumerate((*plain, *hybrid))
    ]
    return [case for case in made if case not in COVER]


def dry_peak(case: CaseSpec, folder: Path) -> int:
    """Bytes of the highest that the allocator has handed out, in a dry run without a limit of memory."""
    launched = launch_dry(case, LocalLauncher(), folder, lambda _: None)
    result = (launched.unlimited or launched.results)[-1]
    assert (result.state, result.error) == ("ok", None)
    return result.peak.allocated


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
    return predict_memory(job, find_recipe(case.strategy)).peak


@needs_device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("strategy", "model", "ranks", "replicas", "policy", "microbatches"),
    [*COVER, *(pytest.param(*case, marks=pytest.mark.full) for case in grid())],
)
def test_a_closed_form_is_what_the_strategys_own_code_allocates(
    strategy: str,
    model: str,
    ranks: int,
    replicas: int,
    policy: str,
    microbatches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CaseSpec(
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
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    error = PEER_ERROR if strategy in PEERS else ENGINE_ERROR
    assert predicted_peak(case) == pytest.approx(dry_peak(case, tmp_path), rel=error)
