"""Ranks as tasks of Slurm's jobs: what is submitted, what is made of its end, and real jobs of a real Slurm."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from refshard.errors import LaunchError, SpecError
from refshard.harness.launchers.base import Job, Launch
from refshard.harness.launchers.ranks import launch_of
from refshard.harness.launchers.slurm import SlurmLauncher, launch_of_job
from refshard.harness.launchers.slurm_job import Status, ask, ends_of, scripts
from refshard.harness.store import read_run
from tests.harness.commandline import only_case, processes_of, start, wait_for, write_suite
from tests.harness.slurm import Slurm, obstacle, running_slurm

JOB = Job(program="case", processes=2, time_limit_s=600.0)


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
        "--job-name=refshard",
        "--requeue",
        "--time=20",
        "--partition=main '--comment=two words' --ntasks=7",
        "--ntasks=2",
        "--open-mode=append",
        f"--output='{tmp_path}/a b/slurm'/%j.out",
    ]
    assert f'{sys.executable} -m refshard.harness.worker case {shlex.quote(str(tmp_path / "a b"))} "$$" >' in rank


def test_the_rank_that_ended_first_is_the_one_that_failed(tmp_path: Path) -> None:
    leave_end(tmp_path, 0, 20.5, 1)
    leave_end(tmp_path, 1, 20.25, 3)
    found = launch_of(ends_of(tmp_path), tmp_path)
    assert (found.failed_rank, found.error) == (1, "rank 1 ended with exit status 3")
    assert found.log_tail == ("rank 1 wrote:", "rank 1 wrote this", "rank 0 wrote:", "rank 0 wrote this")


def test_a_rank_that_a_signal_ended_failed_before_those_that_lost_it(tmp_path: Path) -> None:
    leave_end(tmp_path, 0, 20.25, 1)
    leave_end(tmp_path, 1, 20.5, 137)
    assert launch_of(ends_of(tmp_path), tmp_path).error == "rank 1 ended with signal 9 (SIGKILL)"


def status(state: str) -> Status:
    return Status(state=state, reason="None", restarts=0)


def test_slurms_state_tells_where_no_rank_does(tmp_path: Path) -> None:
    assert launch_of_job(status("COMPLETED"), "7", tmp_path) == Launch()
    killed = launch_of_job(status("OUT_OF_MEMORY"), "7", tmp_path)
    assert (killed.out_of_memory, killed.error) == (True, "Slurm ended job 7 in state OUT_OF_MEMORY")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "7.out").write_text("srun: error: no such thing\n")
    ended = launch_of_job(status("CANCELLED"), "7", tmp_path)
    assert (ended.failed_rank, ended.error) == (None, "Slurm ended job 7 in state CANCELLED (None)")
    assert ended.log_tail == ("srun: error: no such thing",)


def test_slurm_killed_the_rank_that_needed_too_much_memory(tmp_path: Path) -> None:
    leave_end(tmp_path, 1, 20.5, 137)
    found = launch_of_job(status("OUT_OF_MEMORY"), "7", tmp_path)
    assert (found.out_of_memory, found.error) == (True, "rank 1 ended with signal 9 (SIGKILL)")


def test_options_must_be_a_shells() -> None:
    with pytest.raises(SpecError, match=r"sbatch: No closing quotation in \"--comment='a\"; correct it"):
        SlurmLauncher("--comment='a")


def test_a_machine_without_slurm_is_told_so() -> None:
    with pytest.raises(LaunchError, match="needs the program 'no-such-sbatch', not found on PATH; run on a login node"):
        ask("no-such-sbatch")


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


@pytest.mark.slurm
def test_a_suite_runs_as_jobs_and_a_killed_rank_fails_its_case_only(tmp_path: Path, cluster: Slurm) -> None:
    run = tmp_path / "a run"
    suite = write_suite(tmp_path, "single", "ddp", "refshard-fsdp", ranks=2, steps=30)
    process = submitted(cluster, suite, run, "-p main '--comment=a b'")
    wait_for(lambda: measures(run, "ddp"), 240)
    ranks = [p for p in processes_of(run / "cases") if p.cmdline()[1:3] == ["-m", "refshard.harness.worker"]]
    assert len(ranks) == 2
    (victim,) = (p for p in ranks if p.environ()["RANK"] == "1")
    victim.kill()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, err + out
    found = read_run(run)
    assert only_case(found, "ddp")[:2] == ("failed", "rank 1 ended with signal 9 (SIGKILL)")
    ok = {r.case.strategy: len(r.step_times_s) for r in found.cases if r.state == "ok"}
    assert ok == {"single": 1, "refshard-fsdp": 2}
    assert found.header.environment.argv[:2] == ("refshard", "run")
    assert {path.name for path in tmp_path.iterdir()} == {"suite.toml", "a run"}, "the environment's folder is gone"
    assert not cluster.jobs()
    assert not processes_of(run)


@pytest.mark.slow
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
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert only_case(read_run(run), "single")[0] == "ok"
    outputs = {path.stem for path in (case / "slurm").glob("*.out")}
    assert (first in outputs, len(outputs)) == (True, 2)


@pytest.mark.slurm
def test_an_interruption_cancels_the_job_and_so_does_the_time_limit_once_resumed(
    tmp_path: Path, cluster: Slurm
) -> None:
    run = tmp_path / "run"
    suite = write_suite(tmp_path, "single", steps=100_000, more="time_limit_s = 30.0")
    process = submitted(cluster, suite, run)
    wait_for(lambda: measures(run, "single"), 240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert err.rstrip().endswith("refshard: interrupted; what had ended is written; --resume goes on")
    assert not cluster.jobs()
    assert not processes_of(run)
    resumed = start("run", "--resume", run, "--launcher", "slurm", env=cluster.environment)
    _, err = resumed.communicate(timeout=240)
    assert resumed.returncode == 1, err
    state, error, _ = only_case(read_run(run), "single")
    assert (state, error) == ("timeout", "did not end within time_limit_s = 30; the ranks were ended")
    assert not cluster.jobs()
    assert not processes_of(run)


@pytest.mark.full
@pytest.mark.slurm
def test_the_documented_allocation_runs_torchrun_and_resumes_when_requeued(tmp_path: Path, cluster: Slurm) -> None:
    page = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
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
    (before,) = read_run(run).cases
    cluster.ask("scontrol", "requeue", number)
    wait_for(lambda: "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", number), 400)
    found = read_run(run)
    assert [(r.case.strategy, r.state) for r in found.cases] == [("single", "ok"), ("ddp", "ok")]
    assert found.cases[0] == before
    assert not processes_of(run)


@pytest.mark.slurm
def test_what_sbatch_refuses_is_one_line(tmp_path: Path, cluster: Slurm) -> None:
    process = submitted(cluster, write_suite(tmp_path, "single"), tmp_path / "run", "--partition=nope")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (2, "")
    first, last = err.splitlines()
    assert first == f"run folder: {tmp_path / 'run'}"
    assert last.startswith("refshard: launcher 'slurm': sbatch did not take the job (sbatch: error: ")
    assert last.endswith("correct --sbatch")
    assert "invalid partition specified: nope" in last
    assert not (tmp_path / "run").exists()
