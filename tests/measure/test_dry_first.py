"""Dry runs before a suite is measured: what will not fit is skipped, with what the dry run says of it."""

from pathlib import Path

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.measure.dry.first import cases_to_skip, folder_of_dry_runs
from refshard.measure.run import resume_run, run_suite
from refshard.measure.store import read_run
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.quantities import MIB
from refshard.records import Run
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite

NODE = msgspec.structs.replace(ENVIRONMENT, gpus=("NVIDIA H100 80GB HBM3",) * 8)
SUITE = make_suite(
    rounds=2,
    matrix={"strategy": ["ddp", "refshard-fsdp"], "gpus": 8, "model": "llama-mini"},
    case={"global_batch": 8, "seq_len": 32, "precision": "bf16", "measured_steps": 3, "traced_steps": 1},
)
REASON = "dry run on dgx-h100: out of memory: needs at least 90.0 GiB"


def measure(suite: SuiteSpec, folder: Path, skipped: dict[Case, str]) -> tuple[Run, list[str]]:
    """The run, and the strategies that were launched."""
    launcher = FakeLauncher()
    done = run_suite(suite, folder, launcher, Silent(), NODE, oversubscribe=True, skipped=skipped)
    return done, [case.job.strategy for case in launcher.launched]


def case_of(strategy: str) -> Case:
    return next(case for case in SUITE.cases() if case.job.strategy == strategy)


def test_a_skipped_case_is_a_record_with_the_reason_and_no_launch(tmp_path: Path) -> None:
    done, launched = measure(SUITE, tmp_path / "run", {case_of("ddp"): REASON})
    assert sorted(launched) == ["refshard-fsdp"] * 2 + ["single"] * 2
    skipped = [record for record in done.launches if record.case.job.strategy == "ddp"]
    assert [(record.state, record.error, record.round) for record in skipped] == [
        ("skipped", REASON, 0),
        ("skipped", REASON, 1),
    ]
    assert done.well


@pytest.mark.slow
def test_what_was_skipped_is_launched_once_a_resumed_run_no_longer_skips_it(tmp_path: Path) -> None:
    skipped = {case_of("ddp"): REASON}
    measure(SUITE, tmp_path / "run", skipped)
    again, all_ = FakeLauncher(), FakeLauncher()
    resume_run(tmp_path / "run", again, Silent(), NODE, oversubscribe=True, skipped=skipped)
    done = resume_run(tmp_path / "run", all_, Silent(), NODE, oversubscribe=True)
    assert again.launched == []
    assert [case.job.strategy for case in all_.launched] == ["ddp"] * 2
    assert {record.state for record in done.launches} == {"ok"}


@pytest.mark.full
def test_dry_runs_say_what_will_not_fit_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs on which the engine may fill 300 MiB (it has two communicators): DDP's 30M parameters take 480, and an
    eighth of that fits.

    This process may be one that torchrun started: the dry runs have no peers all the same.
    """
    for name, value in {"TORCHELASTIC_RUN_ID": "id", "RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    node = load_cluster("dgx-h100")
    memory = context(node.accelerator).bytes + sum(COMMUNICATOR_BYTES) + 300 * MIB
    hardware = msgspec.structs.replace(node.accelerator, memory_bytes=memory)
    small = tmp_path / "small.toml"
    small.write_text(to_toml(msgspec.structs.replace(node, hardware=hardware)))
    told: list[str] = []
    skipped = cases_to_skip(SUITE, str(small), NODE, tmp_path / "run", told.append)
    assert skipped.keys() == {case_of("ddp")}
    assert skipped[case_of("ddp")].startswith(f"dry run on {small}: out of memory: needs at least ")
    assert told[-1] == "dry run says: 1 of 2 cases will not fit"
    dry = folder_of_dry_runs(tmp_path / "run")
    before = (dry / "records.jsonl").read_bytes()
    assert {record.case.job.strategy: record.state for record in read_run(dry).launches} == {
        "ddp": "oom",
        "refshard-fsdp": "ok",
    }
    assert cases_to_skip(SUITE, str(small), NODE, tmp_path / "run", told.append) == skipped
    assert (dry / "records.jsonl").read_bytes() == before


def test_what_keeps_dry_runs_from_starting_is_told_and_skips_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    unknown = msgspec.structs.replace(NODE, gpus=("NVIDIA H900",))
    assert cases_to_skip(SUITE, "auto", unknown, tmp_path / "run", told.append) == {}
    assert told == [
        "no dry runs, so every case is launched: cluster: no profile has the GPU 'NVIDIA H900'; choose a profile or "
        "your own file with --dry-run-first (docs/how-to/machines.md)"
    ]


def test_without_gpus_nothing_is_dry_run(tmp_path: Path) -> None:
    told: list[str] = []
    assert cases_to_skip(SUITE, "auto", ENVIRONMENT, tmp_path / "run", told.append) == {}
    assert told == []


def test_a_suite_as_dry_runs_has_its_measured_cases_once() -> None:
    tables = [
        {"strategy": ["ddp", "fsdp2"], "gpus": 2},
        {"strategy": "fsdp2", "gpus": 4, "fidelity": "emulated", "cluster": "dgx-a100"},
    ]
    suite = make_suite(matrix=tables, case={"model": "llama-mini", "global_batch": 8}, rounds=5)
    dry = suite.as_dry_run("dgx-h100")
    measured = [
        case for case in suite.cases() if case.protocol.fidelity == "measured" and case.job.strategy != "single"
    ]
    assert list(dry.cases()) == [case.as_dry_run("dgx-h100") for case in measured]
    assert dry.most_rounds == 1


def test_a_suite_as_dry_runs_keeps_the_cases_that_were_chosen() -> None:
    chosen = msgspec.structs.replace(SUITE, only=(case_of("ddp").name,))
    assert list(chosen.as_dry_run("dgx-h100").cases()) == [case_of("ddp").as_dry_run("dgx-h100")]


def test_a_suite_without_measured_cases_has_no_dry_runs() -> None:
    with pytest.raises(SpecError, match="has no measured case to dry-run"):
        SUITE.as_dry_run("dgx-h100").as_dry_run("dgx-h100")
