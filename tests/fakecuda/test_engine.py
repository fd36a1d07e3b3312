"""The engine on fake GPUs: groups do not grow with models, and what fails leaves nothing behind."""

from pathlib import Path

import pytest

from refshard.engine.placement import MODES
from refshard.measure.assemble import failure_of
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.rank import RankResult
from refshard.specs.case import Case
from tests.fakecuda.engine_checks import BACKENDS, CASES
from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.engine_checks", mode="host", ranks=2, memory_bytes=256 << 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_share_their_groups_which_end_with_all_others(seen: Seen, backend: str) -> None:
    groups = 3 if backend == "gloo" else 2  # torch makes a group for a mesh of GPUs there
    for found in seen.on_all(f"groups of {backend}"):
        assert found == {"counts": [groups] * 3, "left": 0}


def test_memory_that_a_gpu_or_its_nccl_lacks_is_unsupported_in_every_mode_and_under_fsdp2(seen: Seen) -> None:
    for group, symmetric in seen.on_all("memory_that_this_nccl_lacks"):
        for mode, said in zip((*MODES, "fsdp2"), zip(group, symmetric)):
            if mode == "fsdp":
                assert all("mode 'fsdp' gives each back to torch's allocator after use" in words for words in said)
            else:
                assert said[0].startswith("comm_memory: 'group' needs NCCL's allocator and GPUs with NVLink multicast")
                assert said[1].endswith("this one says: SymmetricMemory does not find allocation backend NCCL")


def test_a_backward_that_raised_leaves_the_model_sharded_at_once(seen: Seen) -> None:
    for found in seen.on_all("backwards_that_raise"):
        assert found == {mode: [12] * 40 for mode in ("zero1", "fsdp", "yafsdp")}


@pytest.mark.parametrize(("mode", "where"), CASES)
def test_ranks_without_memory_raise_and_go_on_with_what_they_have(seen: Seen, mode: str, where: str) -> None:
    for found, expected in zip(seen.on_all(f"{mode} {where}"), seen.on_all("never_runs_out")):
        assert found["failed"]["state"] == "oom"
        assert found["failed"]["error"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 MiB")
        assert found["left"] == 0
        assert found["losses"] == expected


def test_a_case_of_which_one_rank_runs_out_of_memory_ends_oom(seen: Seen, tmp_path: Path) -> None:
    """Even where the rank that waited for it is the first to fail."""
    first, second = seen.on_all("one_rank_runs_out")
    assert (first["state"], second["state"]) == ("failed", "oom")
    assert first["error"].startswith("all_gather of unit '0' failed on rank 0; another rank has probably ended")
    ranks = [RankResult(rank=rank, **told) for rank, told in enumerate((first, second))]
    outcome = LaunchOutcome(failed_rank=0, error="rank 0 ended with exit status 1")
    case = Case.of(strategy="refshard-fsdp", model="llama-mini", gpus=2, global_batch=2, seq_len=8)
    state, error = failure_of(case, outcome, ranks, tmp_path)
    assert state == "oom"
    assert error.startswith("rank 1: OutOfMemoryError: CUDA out of memory.")
