"""Emulated cases from suite to records, with a launcher that starts nothing: what is proved of them, what is not."""

from pathlib import Path
from typing import Any

import pytest

from refshard.errors import SpecError
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.run import check_suite, run_suite
from refshard.records import CollectiveCount, LaunchRecord
from refshard.specs.case import Case
from refshard.specs.suite import SuiteSpec
from tests.emulate import make_cluster, write_cluster
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite, write_rank


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return str(write_cluster(tmp_path / "lab.toml", make_cluster()))


def suite(lab: str, **changes: Any) -> SuiteSpec:
    """DDP and the engine on 1024 ranks of the cluster ``lab``."""
    case = {
        "batch_per_rank": 1, "measured_steps": 3, "traced_steps": 1, "device": "cpu", "fidelity": "emulated",
        "cluster": lab, "gpus": 1024, **changes,
    }  # fmt: skip
    return make_suite(matrix={"strategy": ["ddp", "refshard-yafsdp"], "model": ["llama-tiny"]}, case=case)


def records(tmp_path: Path, suite: SuiteSpec, launcher: FakeLauncher) -> list[LaunchRecord]:
    return list(run_suite(suite, tmp_path / "run", launcher, Silent(), ENVIRONMENT, oversubscribe=True).launches)


def test_a_world_of_any_size_takes_as_many_processes_as_are_resident(tmp_path: Path, cluster: str) -> None:
    launcher = FakeLauncher()
    found = records(tmp_path, suite(cluster, resident_ranks=2), launcher)
    assert [case.job.strategy for case in launcher.launched] == ["ddp", "refshard-yafsdp"], "no reference beside them"
    for record in found:
        assert (record.state, record.error, record.fidelity) == ("ok", None, "emulated")
        assert len(record.step_times_s) == len(record.traces) == 2
        # rank 1 is the slower one: 0.25 s is the median; a token's share is that of one of 1024 ranks
        assert record.metrics["tokens_per_s_gpu"] == pytest.approx(256 / 0.25)


def test_neither_losses_nor_parameters_are_held_against_anything(tmp_path: Path, cluster: str) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.processes):
            write_rank(
                case, folder, rank, losses=(9.0 + rank,) * case.protocol.total_steps, parameters_sha256=str(rank)
            )
        return LaunchOutcome()

    for record in records(tmp_path, suite(cluster, resident_ranks=2), FakeLauncher(outcome)):
        assert (record.state, record.metrics["loss_parity"]) == ("ok", None)
        assert record.proof is not None
        assert (record.proof.loss_parity, record.proof.bit_identical_to_ddp) == (None, None)
        assert record.proof.bits_note == record.proof.parity_note != ""


def test_collectives_must_be_what_was_announced_all_the_same(tmp_path: Path, cluster: str) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        write_rank(case, folder, 0, announced=(CollectiveCount(op="all_reduce", count=2, bytes=800),))
        return LaunchOutcome()

    for record in records(tmp_path, suite(cluster), FakeLauncher(outcome)):
        assert record.state == "failed"
        assert "the plan announced 2 all_reduce of 800 B, the trace shows 1 all_reduce of 400 B" in str(record.error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "no-such"}, "cluster: no profile and no file 'no-such'"),
        ({"gpus": 6}, "on nodes of 4 ranks, got 6"),
        ({"resident_ranks": 512}, r"resident_ranks: 512 ranks x 1 thread\(s\) exceed the \d+ cores here; lower it"),
        ({"fidelity": "simulated"}, "got 'simulated' for ddp-.*; use fidelity = 'dryrun'"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_anything_is_launched(
    cluster: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_suite(suite(cluster, **changes), FakeLauncher(), oversubscribe=False)


def test_cases_that_are_not_measured_may_stand_beside_those_over_a_network(cluster: str) -> None:
    made = suite(cluster, resident_ranks=2)
    networked = make_suite(matrix=made.matrix, case=made.case, launcher="netlab", network={"hosts": 2, "rate": "2gbit"})
    assert {case.protocol.fidelity for case in check_suite(networked, FakeLauncher(), oversubscribe=True)} == {
        "emulated"
    }
    uneven = make_suite(
        matrix=made.matrix, case={**made.case, "resident_ranks": 3}, launcher="netlab",
        network={"hosts": 2, "rate": "2gbit"},
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"multiple of network.hosts = 2, got 3"):
        check_suite(uneven, FakeLauncher(), oversubscribe=True)
