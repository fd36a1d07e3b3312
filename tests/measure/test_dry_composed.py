"""Dry runs of cases whose mesh has several axes: one rank for each rank of a pipeline, replayed together."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.errors import UnsupportedError
from refshard.measure.dry import rank as dry_rank
from refshard.measure.dry.rank import DryResult, rank_folder, ranks_of, result_file
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import run_suite
from refshard.records import LaunchRecord
from refshard.specs.case import Case
from tests.fakecuda.needs import needs_device
from tests.measure.fakes import ENVIRONMENT, Silent, make_suite

BF16: dict[str, Any] = {"strategy": "fsdp2", "precision": "bf16"}
TABLES: dict[str, dict[str, Any]] = {
    "pipeline": {"strategy": "fsdp2", "gpus": 8, "pp": 2, "microbatches": 4},
    "interleaved": {
        **BF16, "gpus": 16, "pp": 2, "microbatches": 4, "interleave": 2, "schedule": "interleaved",
        "tp": 2, "checkpointing": "full",
    },
    "zero bubble": {
        **BF16, "gpus": 8, "pp": 2, "microbatches": 4, "schedule": "zero-bubble",
    },
    "ddp": {"strategy": "ddp", "gpus": 8, "pp": 2, "microbatches": 2},
    "sequence": {**BF16, "gpus": 16, "tp": 2, "sequence_parallel": True, "checkpointing": "full"},
    "context": {**BF16, "gpus": 16, "cp": 2, "checkpointing": "selective"},
    "ddp, context": {"strategy": "ddp", "gpus": 8, "cp": 2, "precision": "bf16"},
    "all": {
        **BF16, "gpus": 32, "pp": 2, "microbatches": 2, "cp": 2,
        "tp": 2, "sequence_parallel": True, "dp_replicate": 2, "checkpointing": "full",
    },
}  # fmt: skip


FEW = ("all",)
"""``make test`` runs this one."""
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in TABLES]
Ran = Callable[[str], LaunchRecord]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The record of a case, dry-run with the few or with the others."""
    shared = {"fidelity": "dryrun", "cluster": "dgx-h100x32", "model": "llama-tiny", "seq_len": 64, "global_batch": 16}

    @cache
    def launched(few: bool) -> dict[Case, LaunchRecord]:
        suite = make_suite(matrix=[table for name, table in TABLES.items() if (name in FEW) is few], case=shared)
        folder = tmp_path_factory.mktemp("dry") / "run"
        launches = run_suite(suite, folder, LocalLauncher(), Silent(), ENVIRONMENT).launches
        return {record.case: record for record in launches}

    return lambda name: launched(name in FEW)[Case.of(**{**shared, **TABLES[name]})]


@pytest.mark.processes
@needs_device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestRun:
    """Real processes on the fake device."""

    @pytest.mark.parametrize("name", NAMES)
    def test_every_rank_issues_what_it_announces(self, ran: Ran, name: str) -> None:
        record = ran(name)
        assert (record.state, record.error) == ("ok", None)
        assert record.proof is not None
        assert record.proof.failures == ()
        assert record.proof.traced == record.proof.announced != ()

    @pytest.mark.parametrize("name", NAMES)
    def test_one_rank_of_each_stage_is_followed(self, ran: Ran, name: str) -> None:
        record = ran(name)
        each = record.case.job.gpus // record.case.job.pp
        assert [step.rank for step in record.steps] == list(range(0, record.case.job.gpus, each))
        assert len(record.traces) == len(record.step_times_s) == record.case.job.pp
        assert record.metrics["step_time_s"] == max(step for (step,) in record.step_times_s)

    @pytest.mark.full
    def test_what_is_split_by_sequence_is_not_summed(self, ran: Ran) -> None:
        proof = ran("sequence").proof
        assert proof is not None
        sums = [count.count for count in proof.announced if count.op == "all_reduce"]
        assert sums == [13 + 3], "the gradients of norms, and the loss"


def answer(states: dict[int, str]) -> Any:
    def run(rank: int) -> DryResult:
        if states[rank] == "raises":
            raise UnsupportedError("no")
        time.sleep(0.05)
        return DryResult(state=states[rank], wrapped_units=(str(os.getpid()),))  # type: ignore[arg-type]

    return run


def left(folder: Path, rank: int) -> DryResult:
    return msgspec.json.decode(result_file(rank_folder(folder, rank)).read_bytes(), type=DryResult)


def folders(folder: Path, ranks: range) -> None:
    for rank in ranks:
        rank_folder(folder, rank).mkdir()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process.* is multi-threaded:DeprecationWarning")
def test_ranks_run_in_processes_of_their_own(tmp_path: Path) -> None:
    folders(tmp_path, range(3))
    assert dry_rank._run_in_processes(range(3), answer(dict.fromkeys(range(3), "ok")), tmp_path)
    assert len({left(tmp_path, rank).wrapped_units for rank in range(3)} | {(str(os.getpid()),)}) == 4


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process.* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("state", "found"), [("oom", "oom"), ("raises", "failed")])
def test_no_rank_is_started_after_one_that_ended_badly(state: str, found: str, tmp_path: Path) -> None:
    many = len(os.sched_getaffinity(0)) + 2
    folders(tmp_path, range(many))
    states = {rank: state if rank == 0 else "ok" for rank in range(many)}
    assert not dry_rank._run_in_processes(range(many), answer(states), tmp_path)
    assert left(tmp_path, 0).state == found
    assert not result_file(rank_folder(tmp_path, many - 1)).exists()


def test_each_stage_is_told_by_its_first_rank() -> None:
    case = Case.of(strategy="fsdp2", gpus=32, model="llama-tiny", global_batch=8, pp=4, tp=2)
    assert ranks_of(case) == (0, 8, 16, 24)
    alone = case.changed(strategy="pipeline", pp=1, tp=1)
    assert ranks_of(alone) == tuple(range(32))
