"""``make gpu``: its plan, and that a run which was killed goes on. Stand-ins take the place of what needs a GPU."""

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from refshard.measure.store import RECORDS, read_run
from tests.measure.commandline import processes_of, wait_for

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
PIECES = ("doctor", "tests", "dryrun", "suite", "calibration", "blocks", "traces")
SUITE = """
name = "stand_in"
[matrix]
strategy = ["ddp"]
gpus = [2]
model = ["llama-tiny"]
[case]
global_batch = 2
seq_len = 16
device = "cpu"
measured_steps = 3
traced_steps = 1
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """``make gpu`` with this interpreter's environment and stand-ins, into a folder of the test's."""
    (tmp_path / "venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (tmp_path / "venv" / name).symlink_to(Path(sys.prefix) / name)
    (tmp_path / "venv" / ".test").touch()
    (tmp_path / "suite.toml").write_text(SUITE)
    values = {
        "VENV": tmp_path / "venv",
        "GPU_OUT": tmp_path / "gpu",
        "GPU_SUITE": tmp_path / "suite.toml",
        "GPU_TESTS": "tests/gpu/test_needs.py -p no:cacheprovider",
        "GPU_CALIBRATION": "--device cpu --gpus 2 --quick",
        "GPU_BLOCKS": "--benchmark-disable",
    }
    return ["make", "gpu", *(f"{name}={value}" for name, value in values.items())]


def test_the_plan_names_each_piece_with_its_time_limit(command: list[str], tmp_path: Path) -> None:
    plan = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    limited = [line for line in plan.splitlines() if line.startswith("timeout ")]
    calls = [line.split(" 540 ")[1].split()[:2] for line in limited]
    assert [(Path(program).name, first) for program, first in calls] == [
        ("python", "-m"), ("refshard", "run"), ("refshard", "calibrate"), ("python", "-m"), ("refshard", "trace"),
    ]  # fmt: skip
    assert [Path(line.split()[-1]).stem for line in plan.splitlines() if line.startswith("touch ")] == list(PIECES)
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize(("count", "suite"), [(0, "gpu_1"), (1, "gpu_1"), (7, "gpu_1"), (8, "gpu_8")])
def test_the_suite_is_that_of_the_machines_size(command: list[str], tmp_path: Path, count: int, suite: str) -> None:
    listing = tmp_path / "bin" / "nvidia-smi"
    listing.parent.mkdir()
    listing.write_text(f"#!/bin/sh\nfor gpu in $(seq {count}); do echo GPU; done\n")
    listing.chmod(0o755)
    chosen = [*(part for part in command if not part.startswith("GPU_SUITE=")), "--dry-run"]
    env = {**os.environ, "PATH": f"{listing.parent}{os.pathsep}{os.environ['PATH']}"}
    plan = subprocess.run(chosen, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert f"refshard run {suite} --out {tmp_path}/gpu/suite " in plan


@pytest.mark.full
def test_a_killed_run_goes_on_with_what_is_missing(command: list[str], tmp_path: Path) -> None:
    """Killed once its suite has ended a launch. What was done before stays, and a piece that fails stops no other."""
    out = tmp_path / "gpu"
    broken = [*command, "GPU_TESTS=there/are/none"]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(broken, cwd=ROOT, stdout=nowhere, stderr=nowhere, start_new_session=True) as made:
        try:
            wait_for(lambda: lines_of(out / "suite" / RECORDS) >= 2, 240)  # its header, and a launch
        finally:
            os.killpg(made.pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(out))
    before = read_run(out / "suite")
    assert done_in(out) == {"dryrun"}
    first = (out / "suite.log").read_text()

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = read_run(out / "suite")
    assert after.launches[: len(before.launches)] == before.launches
    assert {record.state for record in after.launches} == {"ok"}
    assert len(after.launches) == after.header.planned > len(before.launches)
    assert done_in(out) == set(PIECES) - {"doctor"}, done.stdout[-4000:] + done.stderr[-2000:]
    assert (out / "suite.log").read_text().startswith(first)
    check_folder(out)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "timeout" not in again.stdout, "there is nothing left to do"
    assert again.returncode == (0 if (out / "doctor.done").exists() else 2)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def done_in(out: Path) -> set[str]:
    """The pieces that are done; the doctor may find something wrong with any machine that tests run on."""
    return {path.stem for path in out.glob("*.done")} - {"doctor"}


def check_folder(out: Path) -> None:
    """The index names what is there, and all of it is in the archive."""
    index = (out / "README.txt").read_text()
    for name in (
        "doctor.txt",
        "tests.xml",
        "suite/",
        "dashboard.html",
        "calibration.toml",
        "blocks.log",
        "traces.html",
    ):
        assert name in index
        assert (out / name).exists() or (out / "suite" / name).exists(), name
    with tarfile.open(out.with_suffix(".tar.gz")) as archive:
        packed = set(archive.getnames())
    assert {"gpu/README.txt", "gpu/doctor.json", "gpu/suite/records.jsonl", "gpu/traces.html"} <= packed


@pytest.mark.full
def test_what_fails_or_is_out_of_time_stops_no_other_and_is_named_at_the_end(
    command: list[str], tmp_path: Path
) -> None:
    """The suite is out of time at once; its traces, the last piece, find nothing."""
    cut = [*command, "GPU_TESTS=there/are/none", "GPU_PIECE_S=0.5", "GPU_BLOCKS=--no-such-option"]
    done = subprocess.run(cut, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    told = done.stdout.splitlines()[-1].removeprefix("not done: ").removeprefix("doctor ")
    assert (
        told == f"tests suite calibration blocks traces; see the logs in {tmp_path}/gpu. `make gpu` goes on with them."
    )
    assert {path.stem for path in (tmp_path / "gpu").glob("*.log")} == set(PIECES) - {"doctor"}, "each was begun"
    assert (tmp_path / "gpu" / "doctor.txt").exists()
    assert (tmp_path / "gpu.tar.gz").exists()
