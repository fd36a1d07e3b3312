"""The harness under fire: what a fault leaves behind, and that a resumed run mends it. All processes are real."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from refshard.measure.store import RECORDS, read_run
from refshard.records import Run
from tests.measure.commandline import processes_of, refshard, status_of, wait_for, write_suite
from tests.measure.faults import (
    check_left,
    check_mended,
    kill_within_collective,
    launches,
    planting,
    ranks_of,
    record_of,
    running,
)
from tests.measure.planted.sitecustomize import HANGING

pytestmark = pytest.mark.full

LIMIT_S = 60.0  # enough for a reference beside it, on a machine with four times as much to do
SUITE = f"""
name = "beaten"
[[matrix]]
strategy = ["ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp", "refshard-zero1"]
[[matrix]]
strategy = ["refshard-zero2"]
time_limit_s = {LIMIT_S}
[case]
gpus = 2
model = "llama-tiny"
global_batch = 2
seq_len = 16
device = "cpu"
measured_steps = 3
traced_steps = 1
"""
FAULTS = (
    "ddp 1 forward kill",
    "fsdp2 1 backward kill",
    "refshard-fsdp 0 forward hang",  # and the test kills rank 1, which waits for it
    "refshard-yafsdp 1 result kill",
    "refshard-zero1 1 forward fail",
    "refshard-zero2 1 forward hang",
)
FAILED = ("ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp", "refshard-zero1")


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, taken_port: int) -> Path:
    """Of a run whose ranks met every one of :data:`FAULTS`, in an environment that names a taken port."""
    base = tmp_path_factory.mktemp("beaten")
    (base / "suite.toml").write_text(SUITE)
    run = base / "run"
    env = {**planting(*FAULTS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken_port), "WORLD_SIZE": "7"}
    with running("run", base / "suite.toml", "--out", run, env=env) as process:
        kill_within_collective(run, "refshard-fsdp", victim=1)
        out, err = process.communicate(timeout=1800)
    assert process.returncode == 1, err
    assert "Traceback" not in out + err
    return run


@pytest.fixture(scope="module")
def beaten(folder: Path) -> Run:
    """As it was after the faults."""
    return check_left(folder)


@pytest.fixture(scope="module")
def mended(folder: Path, beaten: Run) -> Run:
    """The same run, resumed without faults."""
    done = refshard("run", folder.parent / "suite.toml", "--resume", folder)
    assert done.returncode == 1, "out of time stays so"
    assert "[5/5]" in done.stderr
    return check_mended(folder, beaten, kept=("ok", "timeout"))


def test_the_rest_of_the_suite_is_done(beaten: Run) -> None:
    """And a port that is taken, of which the environment speaks, disturbs nobody."""
    assert beaten.end is not None
    assert beaten.end.states == {"ok": 2, "failed": 5, "timeout": 1}
    assert not beaten.end.interrupted
    assert {r.case.job.strategy for r in beaten.launches if r.state == "ok"} == {"single"}, "with either time limit"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"])
def test_a_killed_rank_fails_its_case_with_the_cause(beaten: Run, strategy: str) -> None:
    """In forward, in backward, in a collective, and while it writes its result."""
    record = record_of(beaten, strategy)
    assert (record.state, record.error) == ("failed", "rank 1 ended with signal 9 (SIGKILL)")


def test_the_rank_that_failed_first_is_named_and_not_its_echo(beaten: Run) -> None:
    record = record_of(beaten, "refshard-zero1")
    assert (record.state, record.error) == ("failed", "rank 1: ZeroDivisionError: planted")
    assert "ZeroDivisionError: planted" in record.log_tail


def test_out_of_time_says_where_each_rank_stood(beaten: Run) -> None:
    """Rank 1 sleeps and never enters its collective; rank 0 waits in it."""
    record = record_of(beaten, "refshard-zero2")
    assert record.state == "timeout"
    assert record.error is not None
    told = f"did not finish within time_limit_s = {LIMIT_S:g}; the ranks were killed: rank 1 in hang (sitecustomize.py:"
    assert record.error.startswith(told)
    assert ", rank 0 waiting in wait (collectives.py:" in record.error
    heads = [line for line in record.log_tail if line.endswith("most recent call first:")]
    assert heads == ["rank 0, most recent call first:", "rank 1, most recent call first:"]
    assert any(line.endswith(" in train") for line in record.log_tail)
    assert re.search(r"; rank 0 waits in \w+ of .*; rank 1 does not call it", record.error)


def test_a_resumed_run_repeats_what_failed_and_only_that(beaten: Run, mended: Run) -> None:
    assert [r.case.job.strategy for r in mended.launches if r.state != "ok"] == ["refshard-zero2"]
    again = [r for r in mended.launches if r not in beaten.launches]
    assert sorted(r.case.job.strategy for r in again) == sorted(FAILED)
    assert launches(mended) == launches(beaten)
    assert mended.end is not None
    assert mended.end.states == {"ok": 7, "timeout": 1}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command line says, in this process, as it refuses its arguments."""

    def refused(*arguments: str | Path) -> str:
        status, err = status_of([str(argument) for argument in arguments], capsys)
        assert status == 2
        assert len([line for line in err.splitlines() if not line.startswith("run folder: ")]) == 1
        return err.splitlines()[-1]

    return refused


def test_a_changed_suite_is_refused(folder: Path, mended: Run, refused: Callable[..., str]) -> None:
    before = (folder / RECORDS).read_bytes()
    other = folder.parent / "other.toml"
    other.write_text(SUITE.replace("[[matrix]]", "rounds = 2\n[[matrix]]", 1))
    assert refused("run", other, "--resume", folder) == (
        "refshard: run run cannot be resumed: the suite's rounds was 1 and is 2; start a new run"
    )
    assert (folder / RECORDS).read_bytes() == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes all cores but one away")
def test_a_changed_machine_is_refused(folder: Path, mended: Run, refused: Callable[..., str]) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        error = refused("run", "--resume", folder, "--oversubscribe")
    finally:
        os.sched_setaffinity(0, cores)
    assert f"cannot be resumed: logical_cores was {len(cores)} and is 1; start a new run" in error


def test_changed_code_is_refused(folder: Path, mended: Run, tmp_path: Path) -> None:
    """Whether it was committed or not: this is a copy of the package, with one more line."""
    import refshard as package

    source = Path(package.__file__).parents[1]
    for name in ("refshard", "profiles", "suites", "dashboards"):
        shutil.copytree(source / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "refshard" / "strategies" / "ddp.py").open("a") as file:
        file.write("# changed\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    with running("run", "--resume", folder, env=env) as process:
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 2, err
    assert "cannot be resumed: code_sha256 was '" in err


def test_a_killed_run_is_resumed_and_has_one_writer(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Killed in its second launch; and as if in the midst of a line."""
    suite, run = write_suite(tmp_path, "single", "ddp", ranks=2), tmp_path / "run"
    with running("run", suite, "--out", run, env=planting("ddp 1 forward hang")) as process:
        wait_for(lambda: list(run.glob(f"cases/ddp-*/{HANGING}")), 120)
        ranks = ranks_of(run, "ddp")
        assert "the folder is not empty; name a new one, or resume the run in it" in refused("run", suite, "--out", run)
        assert "another process is writing this run; wait for it or stop it" in refused("run", "--resume", run)
        assert process.poll() is None
        assert ranks_of(run, "ddp") == ranks
        process.kill()
    wait_for(lambda: not processes_of(run))
    with (run / RECORDS).open("ab") as file:
        file.write(b'{"type":"case","schema":1,"run_id":"run"')
    before = check_left(run)
    assert ([r.case.job.strategy for r in before.launches], before.end) == (["single"], None)
    assert refshard("run", "--resume", run).returncode == 0
    check_mended(run, before)


@pytest.mark.parametrize("content", [b"", b'{"type":"run","schema":1,"run_id":"run"'])
def test_without_a_header_there_is_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / RECORDS).write_bytes(content)
    assert status_of(["run", "--resume", str(tmp_path)], capsys) == (
        2,
        f"refshard: {tmp_path / RECORDS}: does not begin with a run record: it is not a run, or was cut before "
        "the first launch; remove the folder and start a new one\n",
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, too small for a trace."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path, process: "subprocess.Popen[str]") -> None:
    """Take what room there is, and what becomes free, until the process has ended."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while process.poll() is None:
            try:
                file.write(bytes(512))
            except OSError:
                time.sleep(0.005)


def test_a_full_disk(tmp_path: Path, disk: Path) -> None:
    """At first as a rank writes its trace; then for everybody."""
    np.save(tmp_path / "tokens.npy", np.zeros(5000, dtype=np.int64))
    # So long a path that a record takes more than a page: it does not fit into what is left of the last one.
    data = f"{tmp_path}{'/.' * 1900}/tokens.npy"
    suite = write_suite(tmp_path, "single", steps=20, head="rounds = 2", more=f'data = "{data}"')
    run = disk / "run"
    with running("run", suite, "--out", run) as process:
        wait_for(lambda: list(run.glob("cases/*round1/progress")), 120)
        fill(disk, process)
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 2, err
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    before = check_left(run)
    assert before.end is None or before.end.interrupted, "a closing record may fit where none of a case does"
    (record,) = before.launches
    assert (record.state, record.error) == ("failed", "rank 0: OSError: [Errno 28] No space left on device")
    assert any("Traceback" in line for line in record.log_tail)

    (disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    done = refshard("run", "--resume", run)
    assert done.returncode == 0, done.stderr
    check_mended(run, before)


INTERRUPTED = re.compile(
    r"Interrupted: (nothing was launched yet|"
    r"(\d+ of \d+|finished) launches (are )?saved\. Resume with: refshard run --resume .+)"
)
"""The second signal may come while the first is told."""


def interrupt(
    tmp_path: Path,
    ready: Callable[[Path], object],
    delay_s: float,
    *signals: signal.Signals,
    rounds: int = 1,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Start a run, wait until it is ``ready`` and ``delay_s`` longer, send the signals; check what is left."""
    suite, run = write_suite(tmp_path, "single", steps=20, head=f"rounds = {rounds}"), tmp_path / "run"
    with running("run", suite, "--out", run, env=env) as process:
        wait_for(lambda: ready(run) or process.poll() is not None, 120)
        time.sleep(delay_s)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.01)
        out, err = process.communicate(timeout=1800)
    assert not processes_of(run)
    if (run / RECORDS).exists():
        # It may have been at its end; or has nothing but a file.
        assert process.returncode in (130, 0, *(-number for number in signals)), err
        assert "Traceback" not in out + err
        assert process.returncode != 130 or INTERRUPTED.fullmatch(err.splitlines()[-1])
    else:
        assert process.returncode != 0
    return run


def resume(run: Path) -> None:
    before = check_left(run)
    done = refshard("run", "--resume", run)
    assert done.returncode == 0, done.stderr
    check_mended(run, before)


def has_launched(run: Path) -> object:
    return list(run.glob("cases/*/progress"))


@pytest.mark.full
def test_ctrl_c_twice_in_a_launch(tmp_path: Path) -> None:
    run = interrupt(tmp_path, has_launched, 0.0, signal.SIGINT, signal.SIGINT)
    found = read_run(run)
    assert not found.launches
    assert found.end is None or found.end.interrupted
    resume(run)


@pytest.mark.full
def test_an_end_that_is_asked_for_while_the_dashboard_is_drawn(tmp_path: Path) -> None:
    """The run itself is whole; resuming it draws the page."""
    hung = planting("single 0 dashboard hang")
    run = interrupt(tmp_path, lambda run: (run / HANGING).exists(), 0.0, signal.SIGTERM, env=hung)
    found = read_run(run)
    assert found.end is not None
    assert not found.end.interrupted
    assert not [path for path in run.iterdir() if "dashboard" in path.name]
    resume(run)
    assert (run / "dashboard.html").exists()


@pytest.mark.full
def test_what_ignores_a_hang_up_goes_on(tmp_path: Path) -> None:
    """As under nohup."""
    suite, run = write_suite(tmp_path, "single"), tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running("run", suite, "--out", run) as process:
            wait_for(lambda: has_launched(run), 120)
            process.send_signal(signal.SIGHUP)
            _, err = process.communicate(timeout=1800)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.returncode == 0, err


EVENTS: tuple[Callable[[Path], object], ...] = (
    lambda _run: True,
    lambda run: (run / RECORDS).exists(),
    has_launched,
    lambda run: list(run.glob("cases/*round1")),
)
"""What a signal follows; the run goes on for seconds after each."""


def moments() -> list[object]:
    """A seeded sample over the whole of a run: after each event, how long after it, and which signals."""
    drawn = random.Random(5)
    kinds = [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)]
    return [
        pytest.param(
            event,
            drawn.uniform(0, 4),
            drawn.choice(kinds),
        )
        for event in range(len(EVENTS))
    ]


@pytest.mark.parametrize(("event", "delay_s", "signals"), moments())
def test_an_interruption_at_any_moment(
    tmp_path: Path, event: int, delay_s: float, signals: tuple[signal.Signals, ...]
) -> None:
    run = interrupt(tmp_path, EVENTS[event], delay_s, *signals, rounds=2)
    if (run / RECORDS).exists() and (run / RECORDS).read_bytes().count(b"\n"):
        resume(run)
