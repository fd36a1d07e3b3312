"""Emulated cases from suite to records, with a launcher that starts nothing: what is proved of them, what is not."""

from pathlib import Path
from typing import Any

import pytest

from refshard.commands.show import show
from refshard.commands.validate import validate
from refshard.errors import SpecError
from refshard.estimate.candidates import Candidates
from refshard.estimate.estimate import estimate
from refshard.harness.launchers.base import LaunchOutcome
from refshard.harness.run import check_suite, run_suite
from refshard.harness.simulated import configuration_of
from refshard.records import CollectiveCount, LaunchRecord
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec
from tests.emulate import make_cluster, write_cluster
from tests.harness.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite, write_rank
from tests.memory import made
from tests.report.printed import notes, rows, tables, verdict


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return str(write_cluster(tmp_path / "lab.toml", make_cluster()))


def suite(lab: str, **changes: Any) -> SuiteSpec:
    """DDP and the engine on 1024 ranks of the cluster ``lab``."""
    case = {
        "batch_per_rank": 1, "measured_steps": 3, "traced_steps": 1, "device": "cpu", "fidelity": "emulated",
        "cluster": lab, "world_size": 1024, **changes,
    }  # fmt: skip
    return make_suite(matrix={"strategy": ["ddp", "refshard-yafsdp"], "model": ["llama-tiny"]}, case=case)


def records(tmp_path: Path, suite: SuiteSpec, launcher: FakeLauncher) -> list[LaunchRecord]:
    return list(run_suite(suite, tmp_path / "run", launcher, Silent(), ENVIRONMENT, oversubscribe=True).launches)


def test_a_world_of_any_size_takes_as_many_processes_as_are_resident(tmp_path: Path, cluster: str) -> None:
    launcher = FakeLauncher()
    found = records(tmp_path, suite(cluster, resident_ranks=2), launcher)
    assert [case.strategy for case in launcher.launched] == ["ddp", "refshard-yafsdp"], "no reference beside them"
    for record in found:
        assert (record.state, record.error, record.fidelity) == ("ok", None, "emulated")
        assert len(record.step_times_s) == len(record.traces) == 2
        # rank 1 is the slower one: 0.25 s is the median; a token's share is that of one of 1024 ranks
        assert record.metrics["tokens_per_s_gpu"] == pytest.approx(256 / 0.25)


def test_neither_losses_nor_parameters_are_held_against_anything(tmp_path: Path, cluster: str) -> None:
    def outcome(case: CaseSpec, folder: Path) -> LaunchOutcome:
        for rank in range(case.processes):
            write_rank(case, folder, rank, losses=(9.0 + rank,) * case.total_steps, parameters_sha256=str(rank))
        return LaunchOutcome()

    for record in records(tmp_path, suite(cluster, resident_ranks=2), FakeLauncher(outcome)):
        assert (record.state, record.metrics["loss_parity"]) == ("ok", None)
        assert record.proof is not None
        assert (record.proof.loss_parity, record.proof.bit_identical_to_ddp) == (None, None)
        assert record.proof.bits_note == record.proof.parity_note != ""


def test_collectives_must_be_what_was_announced_all_the_same(tmp_path: Path, cluster: str) -> None:
    def outcome(case: CaseSpec, folder: Path) -> LaunchOutcome:
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
        ({"world_size": 6}, "on nodes of 4 ranks, got 6"),
        ({"resident_ranks": 512}, r"resident_ranks: 512 ranks x 1 thread\(s\) exceed the \d+ cores here; lower it"),
        ({"fidelity": "simulated", "workload": "inference"}, "workload must be 'training' for simulated cases"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_anything_is_launched(
    cluster: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_suite(suite(cluster, **changes), FakeLauncher(), oversubscribe=False)


def test_a_case_without_a_closed_form_is_not_simulated() -> None:
    """Such as upstream's YaFSDP, which is not the engine's mode."""
    case = {"fidelity": "simulated", "cluster": "lab-2x2gbit", "world_size": 2, "global_batch": 2, "seq_len": 16}
    made = make_suite(matrix={"strategy": ["yafsdp"], "model": ["llama-tiny"]}, case=case)
    with pytest.raises(SpecError, match=r"'yafsdp' has no closed form; use fidelity 'dryrun'"):
        check_suite(made, FakeLauncher(), oversubscribe=False)


def test_cases_that_are_not_measured_may_stand_beside_those_over_a_network(cluster: str) -> None:
    made = suite(cluster, resident_ranks=2)
    networked = make_suite(matrix=made.matrix, case=made.case, launcher="netlab", network={"hosts": 2, "rate": "2gbit"})
    assert {case.fidelity for case in check_suite(networked, FakeLauncher(), oversubscribe=True)} == {"emulated"}
    uneven = make_suite(
        matrix=made.matrix, case={**made.case, "resident_ranks": 3}, launcher="netlab",
        network={"hosts": 2, "rate": "2gbit"},
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"multiple of network.hosts = 2, got 3"):
        check_suite(uneven, FakeLauncher(), oversubscribe=True)


def test_a_simulated_case_is_a_record_like_any_other(tmp_path: Path) -> None:
    """From suite to record, table, and comparison with the same case as if it had been measured."""
    cluster = str(write_cluster(tmp_path / "cpus.toml", made.cluster(library="gloo", hardware=made.hardware())))
    matrix = {"strategy": ["ddp", "refshard-yafsdp"], "model": ["llama-tiny"]}
    case = {
        "batch_per_rank": 1, "seq_len": 64, "device": "cpu", "world_size": 4, "checkpointing": "full",
        "measured_steps": 3, "traced_steps": 1,
    }  # fmt: skip
    both = make_suite(matrix=[matrix, {**matrix, "fidelity": "simulated", "cluster": cluster}], case=case)
    launcher = FakeLauncher()
    run = run_suite(both, tmp_path / "run", launcher, Silent(), ENVIRONMENT, oversubscribe=True)
    simulated = [record for record in run.launches if record.fidelity == "simulated"]
    assert len(simulated) == 2
    assert all(case.fidelity == "measured" for case in launcher.launched)
    for record in simulated:
        assert (record.state, record.backend) == ("ok", "gloo")
        assert record.recompute == "forward of 6 of 6 layers, not counted"
        configuration = Candidates.of([configuration_of(record.case)])
        one = estimate(load_model("llama-tiny"), load_cluster(cluster).of_world_size(4), 64, configuration)
        assert record.metrics["step_time_s"] == one.step_s[0]
        assert record.metrics["exposed_comm_s"] == one.exchange_s[0] > 0
        assert (record.traces, record.metrics["overlap_ratio"]) == ((), None)
        assert record.metrics["mfu"] is not None
        assert record.metrics["tokens_per_s_gpu"] == pytest.approx(64 / record.metrics["step_time_s"])  # type: ignore[operator]
    assert any(": all times are modelled" in note for note in notes(show(tmp_path / "run")))
    told = validate(tmp_path / "run")
    assert "refshard-yafsdp, 4 ranks, checkpointing full" in {row["case"] for row in rows(tables(told)[0])}
    assert verdict(told)[0].startswith("Simulated: median error of the step time ")
