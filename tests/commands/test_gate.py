"""``refshard gate`` and ``refshard accept`` on real launches, of the engine and of copies made worse."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.analysis.exact import OPERATORS, PEAK, exact_metrics
from refshard.commands.gate import Options, beside, find_accepted, peak_alone, two_strategies
from refshard.errors import SpecError
from refshard.measure.gate import Baseline
from refshard.measure.gate import accept as accept_run
from refshard.measure.run import run_suite
from refshard.records import LaunchRecord
from refshard.specs.gate import RULES
from tests.measure.commandline import write_suite
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite

ROOT = Path(__file__).parents[2]
PATCHES = {
    "one extra copy per block": (
        "refshard/engine/hooks.py",
        "        return changed\n",
        "        return tuple(arg.clone() for arg in args), kwargs\n",
    ),
    "one lost prefetch": (
        "refshard/engine/schedule.py",
        "    ahead = position - facts[unit].mode.prefetch -",
        "    ahead = position - facts[unit].mode.prefetch * (position != 3) -",
    ),
    "one extra collective": (
        "refshard/engine/executor.py",
        "        self._effects.agreeing = self._debug or not known\n",
        "        self._effects.agreeing = True\n",
    ),
}
"""What is planted: a file, a passage of it, and what takes its place."""


def refshard(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """``refshard`` as a process of its own, which writes to ``folder``."""
    command = [sys.executable, "-m", "refshard", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A suite of the engine's yafsdp mode on two ranks, and the folder of its accepted baseline."""
    folder = tmp_path_factory.mktemp("accepted")
    suite = write_suite(folder, "refshard-yafsdp", ranks=2)
    assert refshard(folder, "run", suite, "--out", "run", "--oversubscribe").returncode == 0
    done = refshard(folder, "accept", "run", "--reason", "as it is", "--baselines", folder / "baselines")
    assert done.stdout.startswith(f"accepted: {folder / 'baselines'}"), done.stderr
    return suite, folder / "baselines"


def held(suite: Path, baselines: Path, folder: Path, *asked: str | Path) -> tuple[dict[str, Any], int]:
    """The gate's verdict as an object, and its exit status; it writes to ``folder``."""
    done = refshard(
        folder, "gate", "--suite", suite, "--baselines", baselines, "--oversubscribe", "--json", *asked
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.returncode


@pytest.mark.full  # `make gate` does it for the project itself
def test_the_same_code_passes_beside_what_was_accepted(accepted: tuple[Path, Path], tmp_path: Path) -> None:
    found, status = held(*accepted, tmp_path, "--candidate", ROOT)
    assert (status, found["verdict"]) == (0, "pass")
    assert [case["changes"] for case in found["cases"]] == [[], []]


@pytest.mark.parametrize("planted", [pytest.param(name, marks=pytest.mark.full) for n, name in enumerate(PATCHES)])
def test_what_makes_the_engine_worse_is_caught_by_one_launch(
    accepted: tuple[Path, Path], tmp_path: Path, planted: str
) -> None:
    path, was, is_ = PATCHES[planted]
    shutil.copytree(ROOT / "refshard", tmp_path / "worse" / "refshard")
    for name in ("profiles", "suites"):
        (tmp_path / "worse" / name).symlink_to(ROOT / name)
    patched = tmp_path / "worse" / path
    assert patched.read_text().count(was) == 1, "the passage is not there any more: plant it anew"
    patched.write_text(patched.read_text().replace(was, is_))
    found, status = held(*accepted, tmp_path, "--candidate", tmp_path / "worse")
    assert status == 1
    worse = {case["case"].split("-w")[0]: case for case in found["cases"]}
    assert worse["single"]["verdict"] == "pass", "what shards nothing is as it was"
    changed = {change["metric"] for change in worse["refshard-yafsdp"]["changes"]}
    if planted == "one extra copy per block":
        assert changed == {"operators", "allocations", "allocated memory"}
    elif planted == "one lost prefetch":
        assert changed == {"operator order"}
    else:
        assert "the trace shows" in worse["refshard-yafsdp"]["trouble"]


QUICK = """
[gate.times]
screen_rounds = 6
confirm_rounds = 6
visible = 0.9
relevant = 0.8
"""


def test_a_peak_of_memory_counts_if_every_launch_has_it(tmp_path: Path) -> None:
    found = run_suite(make_suite(), tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    record = next(record for record in found.launches if record.case.job.strategy == "ddp")

    def peaking(at: float) -> LaunchRecord:
        return msgspec.structs.replace(record, metrics={**record.metrics, "peak_memory_bytes": at})

    accepted = exact_metrics(peaking(1e8))
    raised = beside("case", accepted, [peaking(2e8)], RULES, own=True)
    assert peak_alone(raised)
    assert beside("case", accepted, [peaking(2e8), peaking(1e8)], RULES, own=True).changes == ()
    (change,) = beside("case", accepted, [peaking(3e8), peaking(2e8)], RULES, own=True).changes
    assert (change.metric, change.after, change.verdict) == (PEAK, 200_000_000, "regressed")
    assert not peak_alone(beside("case", {**accepted, OPERATORS: 1}, [peaking(2e8)], RULES, own=True))


@pytest.mark.full
def test_two_strategies_are_compared_by_time_and_memory_alone(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, "ddp")
    suite.write_text(suite.read_text() + QUICK)
    pair = "refshard-zero2,refshard-fsdp"
    found, status = held(suite, tmp_path, tmp_path, "--candidate", ROOT, "--strategy", pair)
    assert f"{found['baseline']},{found['candidate']}" == pair
    (case,) = found["cases"]
    assert case["time"]["rounds"] == 6
    assert {change["metric"] for change in case["changes"]} == {"peak memory"}, (
        "what is gathered for backward again is not kept"
    )
    assert case["changes"][0]["verdict"] == "improved"
    assert status in (0, 3), "a machine may be too noisy for six rounds"


@pytest.mark.full
def test_noise_is_measured_kept_and_told(tmp_path: Path) -> None:
    """24 launches of the same code are the six rounds of this suite's screening and six to confirm."""
    suite = write_suite(tmp_path, "refshard-yafsdp")
    suite.write_text(suite.read_text() + QUICK)
    aa = ("noise", "--suite", suite, "--permutations", "20", "--oversubscribe", "--json")
    done = refshard(tmp_path, *aa, "--rounds", "12")
    noise = json.loads(done.stdout)
    (case,) = noise["cases"].values()
    assert (noise["launches"], noise["gates"], case["rounds"]) == (24, 20, 12)
    assert 0 <= case["false_alarms"] <= noise["gates"] >= case["found"]
    assert (tmp_path / noise["file"]).is_file()
    (recorded,) = (tmp_path / "runs").iterdir()
    again = refshard(tmp_path, *aa, "--from", recorded)
    assert json.loads(again.stdout) == noise, "the same launches, the same permutations"
    shutil.copytree(recorded, tmp_path / "other")
    both = json.loads(refshard(tmp_path, *aa, "--from", recorded, "--from", "other").stdout)
    (more,) = both["cases"].values()
    assert (both["launches"], more["rounds"]) == (48, 24)
    twice = refshard(tmp_path, *aa, "--from", recorded, "--from", recorded)
    assert (twice.returncode, twice.stdout) == (2, "")
    assert "a folder is given twice" in twice.stderr
    few = refshard(tmp_path, *aa, "--rounds", "1")
    assert few.returncode == 2
    assert "rounds must be >= 12, which one gate needs, got 1" in few.stderr


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"baseline": "HEAD", "strategies": ("ddp", "fsdp2")}, "leave out --baseline"),
        ({"baseline": "HEAD", "portable": True}, "both sides are launched here"),
        ({"strategies": ("ddp", "fsdp3")}, "no strategy 'fsdp3'; did you mean"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Options(suite="gate", **asked)


@pytest.mark.parametrize("given", ["ddp", "ddp,ddp", "a,b,c"])
def test_strategies_are_two(given: str) -> None:
    with pytest.raises(SpecError, match="strategy must be BASELINE,CANDIDATE"):
        two_strategies(given)


@pytest.mark.full
def test_without_a_baseline_nothing_is_launched_and_there_is_no_verdict(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, "ddp", ranks=2)
    found, status = held(suite, tmp_path / "none", tmp_path)
    assert status == 3
    assert "no baseline for this suite" in found["mismatch"]
    assert not (tmp_path / "runs").exists()


def test_a_baseline_of_another_machine_serves_for_what_no_machine_changes(tmp_path: Path) -> None:
    suite, theirs = make_suite(), msgspec.structs.replace(ENVIRONMENT, id="f", cpu="other", torch="2.13.0")
    finished = run_suite(suite, tmp_path / "run", FakeLauncher(), Silent(), theirs)
    accept_run(finished, tmp_path / "baselines", "as it is")
    options = Options(suite="fake", baselines=tmp_path / "baselines")
    found = find_accepted(options, suite, ENVIRONMENT)
    assert isinstance(found, str)
    assert (
        "no baseline for this machine (e); the closest is f: cpu was other and is c; `refshard run fake` here" in found
    )
    found = find_accepted(replace(options, portable=True), suite, ENVIRONMENT)
    assert isinstance(found, Baseline)
    assert found.fingerprint == "f"
    newer = msgspec.structs.replace(ENVIRONMENT, torch="3.0")
    refused = find_accepted(replace(options, portable=True), suite, newer)
    assert isinstance(refused, str), "another torch has other operators"
    assert "torch was 2.13.0 and is 3.0" in refused
