"""Ranks as tasks of Slurm's jobs: what is submitted, what is made of its end, and real jobs of a real Slurm."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen

import pytest
from psutil import Process

from refshard.errors import LaunchError, SpecError
from refshard.measure.launchers.base import LaunchOutcome, Program, launch_of
from refshard.measure.launchers.slurm import SlurmLauncher, Status, ask, ends_of, job_name, launch_of_job, scripts
from refshard.measure.run import run_suite
from refshard.measure.store import RunWriter, read_run
from tests.measure.commandline import interrupted, only_case, processes_of, start, status_of, wait_for, write_suite
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite
from tests.measure.launchers.slurm import Slurm, obstacle, running_slurm

JOB = Program(name="case", processes=2, time_limit_s=600.0)


def leave_end(folder: Path, rank: int, when: float, status: int) -> None:
    """What the shell of a rank leaves, and what the rank wrote."""
    (folder / "ends").mkdir(exist_ok=True)
    (folder / "ends" / str(rank)).write_text(f"{when} {status}\n")
    logs = folder / "logs" / str(rank)
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text(f"rank {rank} wrote this\n")


def test_a_batch_script_holds_the_users_options_before_what_must_hold(tmp_path: Path) -> None:
    batch, rank = scripts(JOB, tmp_path / "a b", ["--partition=main", "--comment=two words", "--ntasks=7"])
    options = [line.removeprefix("#SBATCH ") for line in batch.splitlines() if line.startswith("#SBATCH ")]
    assert options == [
        "--requeue",
        "--time=20",
        "--partition=main '--comment=two words' --ntasks=7",
        "--ntasks=2",
        "--open-mode=append",
        f"--output='{tmp_path}/a b/slurm'/%j.out",
    ]
    assert f'{sys.executable} -m refshard.measure.worker case {shlex.quote(str(tmp_path / "a b"))} "$$" >' in rank


@pytest.mark.parametrize(
    ("ends", "rank", "how"),
    [
        ([(20.5, 1), (20.25, 3)], 1, "exit status 3"),
        ([(20.25, 1), (20.5, 137)], 1, "signal 9 (SIGKILL)"),  # rank 0 only lost it
    ],
)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path, ends: list[tuple[float, int]], rank: int, how: str
) -> None:
    for number, (when, status) in enumerate(ends):
        leave_end(tmp_path, number, when, status)
    found = launch_of(ends_of(tmp_path), tmp_path)
    assert (found.failed_rank, found.error) == (rank, f"rank {rank} ended with {how}")
    assert found.log_tail == ("rank 1 wrote:", "rank 1 wrote this", "rank 0 wrote:", "rank 0 wrote this")


@pytest.mark.parametrize(
    ("state", "killed", "found"),
    [
        ("COMPLETED", False, LaunchOutcome()),
        ("OUT_OF_MEMORY", False,
         LaunchOutcome(out_of_memory=True, error="Slurm ended job 7 in state OUT_OF_MEMORY")),
        ("OUT_OF_MEMORY", True,
         LaunchOutcome(out_of_memory=True, failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)",
                       log_tail=("rank 1 wrote this",))),
        ("CANCELLED", False,
         LaunchOutcome(error="Slurm ended job 7 in state CANCELLED (None)", log_tail=("srun: error: no such thing",))),
    ],
)  # fmt: skip
def test_slurms_state_tells_where_no_rank_does(tmp_path: Path, state: str, killed: bool, found: LaunchOutcome) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "7.out").write_text("srun: error: no such thing\n")
    if killed:
        leave_end(tmp_path, 1, 20.5, 137)
    assert launch_of_job(Status(state=state), "7", tmp_path) == found


def test_options_must_be_a_shells() -> None:
    with pytest.raises(SpecError, match=r"sbatch: No closing quotation in \"--comment='a\"; correct it"):
        SlurmLauncher("--comment='a")


@pytest.mark.processes
def test_a_machine_without_slurm_is_told_so() -> None:
    with pytest.raises(LaunchError, match="needs the program 'no-such-sbatch', not found on PATH; run on a login node"):
        ask("no-such-sbatch")


class FakeSlurm:
    """Slurm's commands, from memory: states of jobs by number, and what the next calls of sbatch say.

    A line that starts with ``!`` is a complaint about a job that it took all the same. ``shown`` are the states that
    scontrol tells of the running job, poll by poll.
    """

    def __init__(self, folder: Path, *sbatch: str, shown: Sequence[str] = ("COMPLETED",)) -> None:
        self.folder, self.jobs, self.sbatch, self.shown = folder, dict[str, str](), list(sbatch), list(shown)
        self.asked: list[str] = []
        self.name = ""

    def __call__(self, *command: str) -> tuple[int, str]:
        self.asked.append(" ".join((command[0], *(part for part in command[1:] if part.isdecimal() or "SIG" in part))))
        (name,) = [part for part in command if part.startswith("--job-name=")] or [self.name]
        self.name = name
        return {"squeue": self._squeue, "sbatch": self._sbatch, "scancel": self._scancel, "scontrol": self._scontrol}[
            command[0]
        ](*command[1:])

    def _squeue(self, *_: str) -> tuple[int, str]:
        return 0, " ".join(f"{number}={state}" for number, state in self.jobs.items())

    def _sbatch(self, *_: str) -> tuple[int, str]:
        said = self.sbatch.pop(0) if self.sbatch else ""
        if said and not said.startswith("!"):
            return 1, said
        number = str(max(map(int, self.jobs), default=40) + 1)
        self.jobs[number] = "PENDING"
        return (1, said) if said else (0, number)

    def _scancel(self, *options: str) -> tuple[int, str]:
        named = [option for option in options if option.isdecimal()]
        if "--signal=SIGUSR1" in options:
            return 0, ""
        for number in named or self.jobs:
            self.jobs[number] = "CANCELLED"
        return 0, ""

    def _scontrol(self, *options: str) -> tuple[int, str]:
        number = options[-1]
        if self.jobs[number] == "PENDING":
            state = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        else:
            state = self.jobs[number]
        return 0, f"JobId={number} JobState={state} Reason=None Restarts=0"


def launched(
    slurm: FakeSlurm, on_progress: Callable[[str], None] = lambda _: None, time_limit_s: float = 600.0
) -> LaunchOutcome:
    job = Program(name="case", processes=2, time_limit_s=time_limit_s)
    return SlurmLauncher("", slurm).launch(job, slurm.folder, on_progress)


def test_a_job_is_called_after_its_folder(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    assert launched(slurm) == LaunchOutcome()
    assert slurm.name == f"--job-name={job_name(tmp_path)}"
    assert job_name(tmp_path) != job_name(tmp_path / "a")
    assert slurm.asked == ["squeue", "sbatch", "squeue", "scontrol 41"]


LOST_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("jobs", "said", "asked", "told"),
    [
        ({"7": "RUNNING", "8": "FAILED"}, [], ["squeue", "scancel 7", "squeue", "sbatch", "squeue", "scontrol 9"],
         ["ending job 7, left by an earlier run"]),
        ({}, ["!" + LOST_ANSWER], ["squeue", "sbatch", "squeue", "scontrol 41"], ["!" + LOST_ANSWER]),
        *(({}, [said] * 2, [*["squeue", "sbatch"] * 3, "squeue", "scontrol 41"], [said])
          for said in (LOST_ANSWER, "no answer within 60 s", "Unable to contact slurm controller (x)")),
    ],
    ids=["what an earlier run left ends first", "the answer was lost", "lost twice", "no answer", "no controller"],
)  # fmt: skip
@pytest.mark.processes
def test_one_job_is_submitted_whatever_the_controller_says(
    tmp_path: Path, jobs: dict[str, str], said: list[str], asked: list[str], told: list[str]
) -> None:
    slurm, shown = FakeSlurm(tmp_path, *said), list[str]()
    slurm.jobs = jobs
    assert launched(slurm, shown.append) == LaunchOutcome()
    assert (slurm.asked, shown) == (asked, told)


def test_what_goes_wrong_here_leaves_no_job(tmp_path: Path) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    slurm = FakeSlurm(tmp_path, shown=["RUNNING"])
    (tmp_path / "progress").write_text("measure 1/2")
    with pytest.raises(BrokenPipeError):
        launched(slurm, broken)
    assert slurm.jobs == {"41": "CANCELLED"}


@pytest.mark.processes
def test_what_goes_wrong_as_an_interrupted_job_is_cancelled_is_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path, shown=["RUNNING"])

    def stubborn(*command: str) -> tuple[int, str]:
        if command[0] == "scancel":
            raise LaunchError("job 41 does not end")
        return slurm(*command)

    with pytest.raises(KeyboardInterrupt):
        SlurmLauncher("", stubborn).launch(JOB, tmp_path, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert capsys.readouterr().err == "refshard: job 41 does not end\n"


@pytest.mark.processes
def test_progress_may_go_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()  # cannot be read, as what another host has just removed
    told: list[str] = []
    assert launched(FakeSlurm(tmp_path, shown=["RUNNING", "COMPLETED"]), told.append) == LaunchOutcome()
    assert told == ["job 41 running"]


@pytest.mark.processes
def test_a_job_that_never_ran_wrote_nothing(tmp_path: Path) -> None:
    found = launched(FakeSlurm(tmp_path, shown=["PENDING", "CANCELLED"]))
    assert found == LaunchOutcome(error="Slurm ended job 41 in state CANCELLED (None)")


@pytest.mark.processes
def test_what_a_job_is_suspended_counts_not_for_its_time(tmp_path: Path) -> None:
    shown = ["RUNNING", "SUSPENDED", "SUSPENDED", "SUSPENDED", "RUNNING", "COMPLETED"]
    assert launched(FakeSlurm(tmp_path, shown=shown), time_limit_s=0.5) == LaunchOutcome()


@pytest.mark.processes
def test_ranks_tell_where_they_stand_before_their_job_is_cancelled(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path, shown=["RUNNING"])
    leave_end(tmp_path, 1, 20.5, 0)
    (tmp_path / "stack0").write_text('Thread 0x1 (most recent call first):\n  File "/a/b.py", line 7 in f\n')
    found = launched(slurm, time_limit_s=0.5)
    assert found.timed_out
    assert found.error == "rank 0 in f (b.py:7)"
    assert found.log_tail[:2] == ("rank 1 wrote:", "rank 1 wrote this")
    assert slurm.asked[-4:-1] == ["scontrol 41", "scancel --signal=SIGUSR1 41", "scancel 41"]


def test_a_folder_that_cannot_be_made_beside_the_runs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    slurm = FakeSlurm(tmp_path)
    with pytest.raises(LaunchError, match=r"cannot write machine data next to .*file/run \(.*\); fix the cause"):
        SlurmLauncher("", slurm).environment(1, tmp_path / "file" / "run", lambda _: None)
    assert not slurm.asked


def test_what_can_be_refused_at_once_waits_for_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else this machine, which runs no Slurm, or has none, would be told first."""
    run, other = tmp_path / "run", tmp_path / "other"
    run_suite(make_suite(), run, FakeLauncher(), Silent(), ENVIRONMENT)
    other.mkdir()
    suite = str(write_suite(other, "ddp"))
    slurm = ["--launcher", "slurm"]
    status, said = status_of(["run", suite, *slurm, "--out", str(run)], capsys)
    assert (status, "the folder is not empty; name a new one" in said) == (2, True)
    status, said = status_of(["run", suite, *slurm, "--resume", str(run)], capsys)
    assert (status, "run run cannot be resumed: the suite's name was" in said) == (2, True)
    with RunWriter(run, reopen=True):
        status, said = status_of(["run", *slurm, "--resume", str(run)], capsys)
    assert (status, "another process is writing this run" in said) == (2, True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if found := obstacle():
        pytest.skip(found)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submitted(cluster: Slurm, suite: Path, run: Path, options: str = "--partition=main") -> Popen[str]:
    return start("run", suite, "--launcher", "slurm", "--sbatch", options, "--out", run, env=cluster.environment)


def measures(run: Path, strategy: str) -> bool:
    return any(p.read_text().startswith("measure") for p in run.glob(f"cases/{strategy}*/progress"))


def workers(run: Path) -> list[Process]:
    """The processes of a case's ranks."""
    return processes_of(run / "cases", "refshard.measure.worker")


@pytest.mark.processes
@pytest.mark.slurm
def test_a_case_runs_as_a_job(tmp_path: Path, cluster: Slurm) -> None:
    with submitted(cluster, write_suite(tmp_path, "single"), tmp_path / "run") as process:
        out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err + out
    assert only_case(read_run(tmp_path / "run"), "single")[0] == "ok"


@pytest.mark.full
@pytest.mark.slurm
def test_a_suite_runs_as_jobs_and_a_killed_rank_fails_its_case_only(tmp_path: Path, cluster: Slurm) -> None:
    run = tmp_path / "a run"
    suite = write_suite(tmp_path, "single", "ddp", "refshard-fsdp", ranks=2, steps=30)
    process = submitted(cluster, suite, run, "-p main '--comment=a b'")
    wait_for(lambda: measures(run, "ddp"), 240)
    ranks = workers(run)
    assert len(ranks) == 2
    (victim,) = (p for p in ranks if p.environ()["RANK"] == "1")
    victim.kill()
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 1, err + out
    found = read_run(run)
    assert only_case(found, "ddp")[:2] == ("failed", "rank 1 ended with signal 9 (SIGKILL)")
    ok = {r.case.job.strategy: len(r.step_times_s) for r in found.launches if r.state == "ok"}
    assert ok == {"single": 1, "refshard-fsdp": 2}
    assert found.header.environment.argv[:2] == ("refshard", "run")
    assert {path.name for path in tmp_path.iterdir()} == {"suite.toml", "a run"}, "the environment's folder is gone"
    assert not cluster.jobs()
    assert not processes_of(run)


@pytest.mark.full
@pytest.mark.slurm
def test_a_job_that_slurm_takes_back_starts_afresh(tmp_path: Path, cluster: Slurm) -> None:
    """First it is requeued, then preempted; all the while its controller is out of reach now and then."""
    run = tmp_path / "run"
    process = submitted(cluster, write_suite(tmp_path, "single", steps=200), run)
    wait_for(lambda: measures(run, "single"), 240)
    (first,) = cluster.jobs()
    (case,) = run.glob("cases/single*")
    (case / "rank7.json").touch()
    os.kill(cluster.controller, signal.SIGSTOP)
    try:
        assert not cluster.ask("scontrol", "show", "jobs")
    finally:
        os.kill(cluster.controller, signal.SIGCONT)
    cluster.ask("scontrol", "requeue", first)
    wait_for(lambda: not (case / "rank7.json").exists(), 240)
    wait_for(lambda: measures(run, "single"), 240)
    assert cluster.jobs() == [first]
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    assert cluster.ask(*urgent)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    assert only_case(read_run(run), "single")[0] == "ok"
    outputs = {path.stem for path in (case / "slurm").glob("*.out")}
    assert (first in outputs, len(outputs)) == (True, 2)


@pytest.mark.full
@pytest.mark.slurm
def test_an_interruption_cancels_the_job_and_so_does_the_time_limit_once_resumed(
    tmp_path: Path, cluster: Slurm
) -> None:
    run = tmp_path / "run"
    suite = write_suite(tmp_path, "single", steps=100_000, more="time_limit_s = 60.0")
    process = submitted(cluster, suite, run)
    wait_for(lambda: measures(run, "single"), 240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == interrupted(run)
    assert not cluster.jobs()
    assert not processes_of(run)
    resumed = start("run", "--resume", run, "--launcher", "slurm", env=cluster.environment)
    _, err = resumed.communicate(timeout=1800)
    assert resumed.returncode == 1, err
    state, error, log_tail = only_case(read_run(run), "single")
    assert state == "timeout"
    assert error is not None
    assert error.startswith("did not finish within time_limit_s = 60; the ranks were killed: rank 0 ")
    assert "not answering" not in error
    assert "rank 0, most recent call first:" in log_tail
    assert not cluster.jobs()
    assert not processes_of(run)


@pytest.mark.slurm
@pytest.mark.full
def test_a_job_that_a_killed_harness_left_ends_before_the_run_goes_on(tmp_path: Path, cluster: Slurm) -> None:
    run = tmp_path / "run"
    killed = submitted(cluster, write_suite(tmp_path, "single", steps=100_000), run)
    wait_for(lambda: measures(run, "single"), 240)
    killed.kill()
    killed.communicate(timeout=1800)
    (left,) = cluster.jobs()
    resumed = start("run", "--resume", run, "--launcher", "slurm", env=cluster.environment)
    wait_for(lambda: left not in cluster.jobs() and workers(run), 240)
    assert {p.environ()["SLURM_JOB_ID"] for p in workers(run)} == set(cluster.jobs())
    resumed.send_signal(signal.SIGTERM)
    _, err = resumed.communicate(timeout=1800)
    assert resumed.returncode == 130, err
    assert f"  ending job {left}, left by an earlier run\n" in err
    assert not cluster.jobs()
    assert not processes_of(run)


@pytest.mark.full
@pytest.mark.slurm
def test_the_documented_allocation_runs_torchrun_and_resumes_when_requeued(tmp_path: Path, cluster: Slurm) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "measure.md").read_text()
    script = page.partition("```sbatch\n")[2].partition("```")[0]
    smaller = [
        ("--nodes=4", "--nodes=1"),
        (" --gpus-per-node=8", ""),
        ("per-node 8", "per-node 2"),
        ("/shared", tmp_path),
    ]
    for said, here in smaller:
        assert said in script
        script = script.replace(said, str(here))
    (tmp_path / "job.sh").write_text(script)
    write_suite(tmp_path, "ddp", ranks=2, steps=100).rename(tmp_path / "mine.toml")
    run, path = tmp_path / "runs" / "mine", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run.parent.mkdir()
    options = [f"--chdir={tmp_path}", f"--export=ALL,PATH={path}", f"--output={tmp_path}/out", "--ntasks=1"]
    number = cluster.ask("sbatch", "--parsable", *options, str(tmp_path / "job.sh")).strip()
    wait_for(lambda: measures(run, "ddp"), 240)
    (before,) = read_run(run).launches
    cluster.ask("scontrol", "requeue", number)
    wait_for(lambda: "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", number), 400)
    found = read_run(run)
    assert [(r.case.job.strategy, r.state) for r in found.launches] == [("single", "ok"), ("ddp", "ok")]
    assert found.launches[0] == before
    assert not processes_of(run)


@pytest.mark.slurm
@pytest.mark.full
def test_what_sbatch_refuses_is_one_line(tmp_path: Path, cluster: Slurm) -> None:
    process = submitted(cluster, write_suite(tmp_path, "single"), tmp_path / "run", "--partition=nope")
    out, err = process.communicate(timeout=1800)
    assert (process.returncode, out) == (3, "")
    first, last = err.splitlines()
    assert first == f"run folder: {tmp_path / 'run'}"
    assert last.startswith("refshard: launcher 'slurm': sbatch rejected the job (sbatch: error: ")
    assert last.endswith("correct --sbatch")
    assert "invalid partition specified: nope" in last
    assert not (tmp_path / "run").exists()
