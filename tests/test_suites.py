"""The benchmarks under ``suites/``: each runs once, and a record that is replayed is what pytest-benchmark reports."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from refshard.harness.store import RunWriter, read_run
from refshard.records import CaseRecord
from refshard.stats.exact import exact_metrics
from tests.harness.commandline import write_suite
from tests.report.runs import FAILED, run

ROOT = Path(__file__).parents[1]
pytest_plugins = ["pytester"]
CONFTEST = """
from pathlib import Path
import pytest
from refshard.harness.store import read_run
from refshard.replay import replay, replay_clock

@pytest.fixture
def records():
    return read_run(Path(__file__).parent / "run").cases
"""


def run_pytest(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Pytest in a process of its own, with this checkout's settings."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    return subprocess.run([*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    """Where pytest is run: a run, and a ``conftest.py`` that has the fixtures and the run's records."""
    made = run()
    with RunWriter(pytester.path / "run") as writer:
        writer.append(made.header)
        for record in made.cases:
            writer.append(record)
    pytester.makeconftest(CONFTEST)
    return pytester.path


def replayed(pytester: pytest.Pytester, test: str, *arguments: str) -> tuple[pytest.RunResult, list[Any]]:
    """What pytest says of a file of tests, and the benchmarks that it left."""
    pytester.makepyfile(test)
    done = pytester.runpytest_inprocess("--benchmark-json=b.json", *arguments)
    left = pytester.path / "b.json"
    text = left.read_text() if left.exists() else ""
    return done, json.loads(text)["benchmarks"] if text else []


def slowest(record: CaseRecord) -> list[float]:
    """The maximum over ranks of each step."""
    return [max(step) for step in zip(*record.step_times_s)]


def test_a_replayed_record_is_reported_to_the_bit_and_in_order(pytester: pytest.Pytester, folder: Path) -> None:
    test = "import pytest\n@pytest.mark.parametrize('i', [1, 2])\ndef test_it(replay, records, i): replay(records[i])"
    done, found = replayed(pytester, test, "--benchmark-only")  # which runs what asks for `benchmark`, and nothing else
    done.assert_outcomes(passed=2)
    assert len(found) == 2
    for record, benchmark in zip(read_run(folder / "run").cases[1:], found):
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
            "exact_metrics": dict(exact_metrics(record)),
        }


def test_a_case_that_did_not_end_ok_fails_with_its_error(pytester: pytest.Pytester, folder: Path) -> None:
    done, found = replayed(pytester, "def test_it(replay, records): replay(records[-1])")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines([f"{FAILED}-w2-llama-mini-b8x256: failed: RuntimeError: mat1 and mat2 shapes differ*"])
    done.stdout.no_fnmatch_line("*Traceback*")
    assert not found


def test_marks_of_a_test_stay_beside_the_clock(pytester: pytest.Pytester, folder: Path) -> None:
    test = "import pytest\n@pytest.mark.benchmark(group='g')\ndef test_it(replay, records): replay(records[0])"
    _, (found,) = replayed(pytester, test)
    assert found["group"] == "g"
    assert found["stats"]["data"] == slowest(read_run(folder / "run").cases[0])


def test_a_benchmark_with_a_timer_of_its_own_is_refused(pytester: pytest.Pytester, folder: Path) -> None:
    done, _ = replayed(pytester, "def test_it(benchmark, replay, records): replay(records[0])")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*ask for `replay` alone*"])


def test_without_measuring_nothing_is_replayed_but_states_count(pytester: pytest.Pytester, folder: Path) -> None:
    test = "import pytest\n@pytest.mark.parametrize('i', [0, -1])\ndef test_it(replay, records, i): replay(records[i])"
    done, _ = replayed(pytester, test, "--benchmark-disable")
    done.assert_outcomes(failed=1, passed=1)


def test_selected_cases_are_launched_and_their_steps_are_the_benchmarks_rounds(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, "ddp", head="rounds = 2")
    cases, left = ROOT / "suites" / "bench_cases.py", tmp_path / "b.json"
    done = run_pytest(tmp_path, cases, "--suite", suite, "-k", "single", f"--benchmark-json={left}")
    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    kept = read_run(folder)
    assert [(r.case.strategy, r.round) for r in kept.cases] == [("single", 0), ("single", 1)]
    assert kept.end is not None
    found = json.loads(left.read_text())["benchmarks"]
    named = {(b["extra_info"]["spec_hash"], b["extra_info"]["round"]): b["stats"]["data"] for b in found}
    assert named == {(r.spec_hash, r.round): slowest(r) for r in kept.cases}


def test_a_suite_that_is_none_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ROOT / "suites" / "bench_cases.py", "--suite", "gat", "--benchmark-disable")
    assert done.returncode == 2
    assert "\nsuite: no file 'gat'; did you mean 'gate'?\n" in done.stdout


def test_what_takes_long_is_skipped_with_the_option_that_runs_it(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ROOT / "suites" / "bench_blocks.py")
    assert "2 skipped" in done.stdout
    assert "takes minutes or much memory: --long runs it" in done.stdout


@pytest.mark.slow
def test_every_benchmark_runs_once(tmp_path: Path) -> None:
    """Two or three minutes; each at a size that only shows that it works."""
    done = run_pytest(tmp_path, ROOT / "suites", "--benchmark-disable")
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "passed" in last
    assert not {"failed", "error"} & set(last.split())
    assert not (tmp_path / "runs").exists()
