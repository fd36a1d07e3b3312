"""Real processes: cases that end well, fail, hang and run out of memory; interruptions that leave nothing behind.

What is worse is in ``test_faults.py``.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from refshard.analysis.kineto import read_timeline
from refshard.measure.launchers.base import log_tail, started
from refshard.measure.launchers.local import worker_of
from refshard.measure.store import read_run
from refshard.records import METRICS, Run
from tests.measure.commandline import SUITE, processes_of, refshard, status_of, write_suite

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "peers", [(), pytest.param(("fsdp2", "ddp"), marks=pytest.mark.full)], ids=["alone", "with peers"]
)
def test_a_suite_runs_and_shows(tmp_path: Path, peers: tuple[str, ...]) -> None:
    suite = write_suite(tmp_path, "single", *peers, "refshard-yafsdp", ranks=2)
    done = refshard("run", suite, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"[{2 + len(peers)}/{2 + len(peers)}] ok" in done.stderr
    assert done.stdout.rstrip().endswith(f"dashboard: {tmp_path / 'run' / 'dashboard.html'}")
    assert (tmp_path / "run" / "dashboard.html").stat().st_size > 10_000
    shown = json.loads(refshard("show", tmp_path / "run", "--json").stdout)
    rows = {row["strategy"]: row for row in shown["cases"]}
    assert set(rows) == {"single", *peers, "refshard-yafsdp"}
    for row in rows.values():
        assert row["state"] == "ok"
        assert row.keys() >= METRICS.keys()
        assert row["loss_parity"] <= 1e-5
    assert rows["refshard-yafsdp"]["overlap_ratio"] > 0
    if peers:
        assert rows["fsdp2"]["overlap_ratio"] == 0, "FSDP2 waits for each collective on a CPU"
        assert rows["refshard-yafsdp"]["bit_identical_to_ddp"] is True
    run = read_run(tmp_path / "run")
    assert all(
        r.case.job.strategy == "single" or (r.proof and r.proof.announced == r.proof.traced) for r in run.launches
    )
    for record in run.launches:  # their own labels, or the harness's marks
        timeline = read_timeline(tmp_path / "run" / record.traces[0])
        assert "model.layers.0" in timeline.spans.unit_names, record.case.job.strategy
    assert not processes_of(tmp_path / "run")


def test_ranks_alone_hold_their_logs_open(tmp_path: Path) -> None:
    with started(sys.executable, [(("-c", "print('here')"), {})], tmp_path) as ranks:
        opened = [file.path for file in psutil.Process().open_files()]
        while ranks.poll() is None:
            time.sleep(0.01)
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert log_tail(tmp_path, 0) == ("here",)


@pytest.mark.full
def test_what_is_unsupported_is_told_and_is_no_failure(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, "tensor-parallel", ranks=2, more="offload = true")
    done = refshard("run", suite, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "refshard does not support tensor-parallel with offload; see refshard list strategies" in done.stderr
    states = {r.case.job.strategy: r.state for r in read_run(tmp_path / "run").launches}
    assert states == {"single": "ok", "tensor-parallel": "unsupported"}


TROUBLE = """
name = "trouble"
[[matrix]]
data = "{tokens}"
[[matrix]]
memory_limit_gib = 0.3
[case]
strategy = "single"
gpus = 1
model = "llama-tiny"
global_batch = 2
seq_len = 16
device = "cpu"
"""


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two cases of which none ends well; it goes on after each, and says so in its exit status only."""
    folder = tmp_path_factory.mktemp("trouble")
    tokens = folder / "tokens.npy"
    np.save(tokens, np.full(5000, 99_999))
    suite = folder / "suite.toml"
    suite.write_text(TROUBLE.format(tokens=tokens))
    done = refshard("run", suite, "--out", folder / "run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not processes_of(folder / "run")
    return read_run(folder / "run")


@pytest.mark.full
def test_a_case_that_fails_is_recorded_with_its_log(trouble: Run) -> None:
    (record,) = (r for r in trouble.launches if r.case.protocol.data != "synthetic")
    assert record.state == "failed"
    assert record.error is not None
    assert "99999" in record.error
    assert any("SpecError" in line for line in record.log_tail)


@pytest.mark.full
def test_a_case_that_runs_out_of_memory_is_oom(trouble: Run) -> None:
    (record,) = (r for r in trouble.launches if r.case.protocol.memory_limit_gib is not None)
    assert record.state == "oom", record.error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name = ", "suite.toml: not valid TOML"),
        ('name = "x"\nmatrx = {}', "suite.toml: unknown key 'matrx'; did you mean 'matrix'?"),
        (
            SUITE.format(head="", strategies='"fsdp3"', ranks=1, steps=3, more=""),
            "strategy: no strategy 'fsdp3'; did you mean 'fsdp2'?",
        ),
        (SUITE.format(head="", strategies='"ddp"', ranks=512, steps=3, more="").replace("batch = 2", "batch = 512"),
         "gpus: 512 ranks x 1 thread(s) exceed"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(content)
    status, err = status_of(["run", str(suite), "--out", str(tmp_path / "run")], capsys)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("refshard: ")
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "no-such-suite"],
            "suite: no such file or suite 'no-such-suite'; known: emulated, emulated_gpu, ",
        ),
        (["show", "/no/such/run"], "/no/such/run: there is no such run; `refshard run` makes one"),
        (["report", "/no/such/run"], "/no/such/run: there is no such run; `refshard run` makes one"),
        (["list", "strategy"], "list: unknown 'strategy'; did you mean 'strategies'?"),
    ],
)
def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, err = status_of(arguments, capsys)
    assert status == 2
    assert err.startswith(f"refshard: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.full
def test_a_mistake_is_one_line_of_a_real_process_too() -> None:
    """What it imports is as silent as it is."""
    done = refshard("run", "no-such-suite")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("refshard: suite: no such file or suite 'no-such-suite'")
    assert len(done.stderr.splitlines()) == 1


def test_ranks_of_a_checkout_from_before_the_package_was_renamed_run_its_worker(tmp_path: Path) -> None:
    assert worker_of(None) == worker_of(tmp_path) == "refshard.measure.worker"
    worker = tmp_path / "refshard" / "harness" / "worker.py"
    worker.parent.mkdir(parents=True)
    worker.touch()
    assert worker_of(tmp_path) == "refshard.harness.worker"


@pytest.mark.processes
def test_a_rank_that_is_killed_ends_the_others_and_both_ends_are_told(tmp_path: Path) -> None:
    programs = ("import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)")
    with started(sys.executable, [(("-c", program), {}) for program in programs], tmp_path) as ranks:
        while (ends := ranks.poll()) is None:
            time.sleep(0.01)
    assert [(end.rank, end.exit_code) for end in ends] == [(0, -9), (1, -15)]
