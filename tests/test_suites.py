"""The benchmarks under ``suites/``: each runs once, and a record that is replayed is what pytest-benchmark reports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from refshard.analysis.exact import exact_metrics
from refshard.measure.store import RunWriter, read_run
from refshard.records import LaunchRecord
from tests.measure.commandline import write_suite
from tests.report.runs import FAILED, run

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
CONFTEST = """
from pathlib import Path

import pytest

from refshard.measure.store import read_run
from refshard.replay import replay, replay_clock


@pytest.fixture
def records():
    return read_run(Path(__file__).parent / "run").launches
"""
REPLAYED = """
import pytest


@pytest.mark.parametrize("place", [1, 2])
def test_good(replay, records, place):
    replay(records[place])


@pytest.mark.benchmark(group="marked")
def test_marked(replay, records):
    replay(records[0])


def test_failed(replay, records):
    replay(records[-1])


def test_timed(benchmark, replay, records):
    replay(records[0])
"""


def run_pytest(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One in a process of its own, with this checkout's settings, which does not take itself for a part of xdist."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a ``conftest.py`` that has the fixtures and the run's records, and tests that replay some."""
    made, folder = run(), tmp_path_factory.mktemp("replayed")
    with RunWriter(folder / "run") as writer:
        writer.append(made.header)
        for record in made.launches:
            writer.append(record)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_replayed.py").write_text(REPLAYED)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What pytest says of those tests; ``--benchmark-only`` runs what asks for ``benchmark``, and nothing else."""
    return run_pytest(folder, "test_replayed.py", "--benchmark-only", "--benchmark-json=b.json").stdout


@pytest.fixture(scope="module")
def benchmarks(folder: Path, printed: str) -> dict[str, Any]:
    """The benchmarks that were left, by name."""
    return {left["name"]: left for left in json.loads((folder / "b.json").read_text())["benchmarks"]}


def slowest(record: LaunchRecord) -> list[float]:
    """The maximum over ranks of each step."""
    return [max(step) for step in zip(*record.step_times_s)]


@pytest.mark.parametrize("place", [1, 2])
def test_a_replayed_record_is_reported_to_the_bit_and_in_order(benchmarks: dict[str, Any], place: int) -> None:
    record, benchmark = run().launches[place], benchmarks[f"test_good[{place}]"]
    samples, stats = slowest(record), benchmark["stats"]
    assert len(set(samples)) > 10
    assert stats["data"] == samples
    assert (stats["min"], stats["max"], stats["rounds"]) == (min(samples), max(samples), len(samples))
    assert (stats["median"], stats["mean"], stats["iterations"]) == (median(samples), mean(samples), 1)
    assert benchmark["options"]["timer"] == "refshard.replay"
    assert benchmark["extra_info"] == {
        "fidelity": "measured",
        "spec_hash": record.spec_hash,
        "environment": record.environment,
        "run_id": "made",
        "round": 0,
        "exact_metrics": exact_metrics(record),
    }


def test_marks_of_a_test_stay_beside_the_clock(benchmarks: dict[str, Any]) -> None:
    found = benchmarks["test_marked"]
    assert found["group"] == "marked"
    assert found["stats"]["data"] == slowest(run().launches[0])


def test_a_case_that_did_not_end_ok_fails_with_its_error(printed: str, benchmarks: dict[str, Any]) -> None:
    assert "2 failed, 3 passed" in printed
    assert f"\n{FAILED}-w2-llama-mini-b8x256: failed: RuntimeError: mat1 and mat2 shapes differ" in printed
    assert "Traceback" not in printed
    assert "test_failed" not in benchmarks


def test_a_benchmark_with_a_timer_of_its_own_is_refused(printed: str) -> None:
    assert "ask for `replay` alone" in printed


def test_without_measuring_nothing_is_replayed_but_states_count(folder: Path) -> None:
    done = run_pytest(folder, "test_replayed.py", "--benchmark-disable")
    assert "1 failed, 4 passed" in done.stdout


@pytest.mark.full
def test_selected_cases_are_launched_and_their_steps_are_the_benchmarks_rounds(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, "ddp", head="rounds = 2")
    cases, left = ROOT / "suites" / "bench_cases.py", tmp_path / "b.json"
    done = run_pytest(tmp_path, cases, "--suite", suite, "-k", "single", f"--benchmark-json={left}")
    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    kept = read_run(folder)
    assert [(r.case.job.strategy, r.round) for r in kept.launches] == [("single", 0), ("single", 1)]
    assert kept.end is not None
    found = json.loads(left.read_text())["benchmarks"]
    named = {(b["extra_info"]["spec_hash"], b["extra_info"]["round"]): b["stats"]["data"] for b in found}
    assert named == {(r.spec_hash, r.round): slowest(r) for r in kept.launches}


@pytest.mark.full
def test_a_suite_that_is_none_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ROOT / "suites" / "bench_cases.py", "--suite", "gat", "--benchmark-disable")
    assert done.returncode == 2
    assert "\nsuite: no such file or suite 'gat'; did you mean 'gate'?\n" in done.stdout


@pytest.mark.full
def test_what_takes_long_is_skipped_with_the_option_that_runs_it(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ROOT / "suites" / "bench_blocks.py")
    assert "2 skipped" in done.stdout
    assert "takes minutes or much memory: --long runs it" in done.stdout


@pytest.mark.full
def test_every_benchmark_runs_once(tmp_path: Path) -> None:
    """A minute or two; each at a size that only shows that it works."""
    done = run_pytest(tmp_path, ROOT / "suites", "--benchmark-disable")
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "passed" in last
    assert not {"failed", "error"} & set(last.split())
    assert not (tmp_path / "runs").exists()
