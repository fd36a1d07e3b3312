"""Accepted baselines: what may become one, and a file that a reviewer can read."""

from pathlib import Path

import pytest

from refshard.errors import SpecError, StoreError
from refshard.measure.gate import accept, baseline_file, read_baseline
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.run import run_suite
from refshard.records import Run
from refshard.specs.case import Case
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite


def timing_out(_case: Case, _folder: Path) -> LaunchOutcome:
    return LaunchOutcome(timed_out=True)


def run(tmp_path: Path, launcher: FakeLauncher | None = None) -> Run:
    return run_suite(make_suite(), tmp_path / "run", launcher or FakeLauncher(), Silent(), ENVIRONMENT)


def test_a_run_becomes_the_baseline_of_its_suite_and_machine(tmp_path: Path) -> None:
    path, before = accept(run(tmp_path), tmp_path / "baselines", "the first one")
    assert before is None
    assert path == baseline_file(tmp_path / "baselines", ENVIRONMENT, "fake")
    assert path == tmp_path / "baselines" / "e" / "fake.json"
    made = read_baseline(path)
    assert (made.suite, made.fingerprint, made.reason) == ("fake", "e", "the first one")
    assert made.machine["torch"] == "2.13.0"
    assert len(made.cases) == 3
    assert all(case["peak memory"] for case in made.cases.values())
    lines = path.read_text().splitlines()
    assert sum('"all_reduce count": 1' in line for line in lines) == 2, "a metric a line"
    assert accept(run(tmp_path / "again"), tmp_path / "baselines", "the second")[1] == made


def test_what_is_no_baseline_is_refused(tmp_path: Path) -> None:
    whole = run(tmp_path)
    with pytest.raises(SpecError, match="reason: none given"):
        accept(whole, tmp_path, "  ")
    with pytest.raises(SpecError, match="run run did not finish, so it cannot be a baseline; finish it with --resume"):
        accept(Run(header=whole.header, launches=whole.launches), tmp_path, "why")
    failing = run(tmp_path / "failing", FakeLauncher(timing_out))
    with pytest.raises(SpecError, match="ended in state timeout; all must be ok"):
        accept(failing, tmp_path, "why")
    assert not list(tmp_path.glob("**/fake.json"))


def test_a_damaged_baseline_is_told(tmp_path: Path) -> None:
    path, _ = accept(run(tmp_path), tmp_path / "baselines", "the first one")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(StoreError, match=r"damaged baseline .* restore it, or accept a new one"):
        read_baseline(path)
