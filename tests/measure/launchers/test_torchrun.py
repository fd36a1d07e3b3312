"""Ranks that a real torchrun started: on one host, and on two that this one plays."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from refshard.cli import main
from refshard.errors import SpecError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Program, RankEnd, timed_out
from refshard.measure.launchers.torchrun import Announced, Place, Report, Server, TorchrunLauncher, place_of
from refshard.measure.store import read_run
from refshard.specs.case import Case
from tests.measure.commandline import only_case, processes_of, wait_for, write_suite
from tests.measure.faults import planting, running
from tests.measure.planted.sitecustomize import HANGING

PLACE = Place(rank=0, local_rank=0, world_size=2, local_world_size=1, address="127.0.0.1")
ALONE = ("--standalone", "--nproc-per-node", "2")
TORCHRUN = ("torch.distributed.run",)
ACCELERATE = (
    "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip
"""Modules that start ranks, with options."""


@contextmanager
def torchrun(
    agent: Sequence[str],
    suite: Path,
    run: Path,
    *,
    by: Sequence[str] = TORCHRUN,
    before: Sequence[str] = (),
    planted: Sequence[str] = (),
) -> "Iterator[subprocess.Popen[str]]":
    """``refshard run`` under torchrun, or what else starts its agents, with options ``agent``; ``before`` is what the
    command line begins with, and its ranks meet the faults ``planted``. It is killed if the test fails before it ends.
    """
    measure = [sys.executable, "-m", "refshard", "run", str(suite), "--launcher", "torchrun", "--out", str(run)]
    command = [
        *before,
        sys.executable,
        "-m",
        *by,
        *agent,
        "--no_python" if by == ACCELERATE else "--no-python",
        *measure,
    ]
    environment = {**planting(*planted), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def two_nodes() -> list[str]:
    """Torchrun's options on each of two nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    return ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"]


def measures(run: Path, strategy: str) -> bool:
    return any(p.read_text().startswith("measure") for p in run.glob(f"cases/{strategy}*/progress"))


def workers(run: Path) -> dict[str, psutil.Process]:
    """The processes of a case's ranks, by rank."""
    found = [p for p in processes_of(run / "cases") if "refshard.measure.worker" in p.cmdline()]
    return {process.environ()["RANK"]: process for process in found}


@pytest.mark.processes
def test_a_case_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with torchrun(("--standalone", "--nproc-per-node=1"), write_suite(tmp_path, "single"), run) as process:
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    assert only_case(read_run(run), "single")[0] == "ok"


@pytest.mark.full
@pytest.mark.parametrize(
    ("by", "options"),
    [(TORCHRUN, ALONE), (ACCELERATE, ())],  # the agents are the same
    ids=["torchrun", "accelerate launch"],
)
def test_one_host(tmp_path: Path, by: tuple[str, ...], options: tuple[str, ...]) -> None:
    pytest.importorskip(by[0].partition(".")[0], reason="accelerate comes with the extra 'peers'")
    run = tmp_path / "run"
    suite = write_suite(tmp_path, "single", "ddp", "megatron-fsdp", ranks=2)  # the last needs a GPU
    with torchrun(options, suite, run, by=by) as process:
        wait_for(lambda: len(workers(run)) == 2, 240)
        assert workers(run)["1"].environ()["LOCAL_RANK"] == "1"
        out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    assert out.count("dashboard: ") == 1, "rank 0 prints, and no other"
    assert err.count("run folder: ") == 1
    assert "recvValue" not in err, "servers leave before rank 0's store does"
    records = read_run(run)
    ok = {r.case.job.strategy: len(r.step_times_s) for r in records.launches if r.state == "ok"}
    assert ok == {"single": 1, "ddp": 2}
    assert only_case(records, "megatron-fsdp")[0] == "unsupported", "which fails no launch"
    assert not processes_of(run)


@pytest.mark.full
def test_two_hosts_and_a_killed_rank_fails_its_case_only(tmp_path: Path) -> None:
    run, options = tmp_path / "run", two_nodes()
    suite = write_suite(tmp_path, "single", "ddp", "refshard-fsdp", ranks=2)
    with ExitStack() as ended:
        started = [torchrun(options, suite, run, planted=["ddp 1 forward kill"]) for _ in range(2)]
        agents = [ended.enter_context(agent) for agent in started]
        wait_for(lambda: len(workers(run)) == 2, 240)
        found = workers(run)
        assert [found[rank].environ()["LOCAL_RANK"] for rank in ("0", "1")] == ["0", "0"]
        said = [agent.communicate(timeout=1800) for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1], said
    assert sorted(out.count("dashboard: ") for out, _ in said) == [0, 1]
    records = read_run(run)
    assert only_case(records, "ddp")[:2] == ("failed", "rank 1 ended with signal 9 (SIGKILL)")
    ok = {r.case.job.strategy: len(r.step_times_s) for r in records.launches if r.state == "ok"}
    assert ok == {"single": 1, "refshard-fsdp": 2}
    assert not processes_of(run)


@pytest.mark.full
def test_a_signal_to_torchrun_leaves_no_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with torchrun(ALONE, write_suite(tmp_path, "ddp", ranks=2, steps=100_000), run) as process:
        wait_for(lambda: measures(run, "single"), 240)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=1800)
    found = read_run(run)
    assert found.end is not None
    assert found.end.interrupted
    assert not processes_of(run)


@pytest.mark.full
def test_the_end_of_rank_0s_agent_ends_all(tmp_path: Path) -> None:
    run, options = tmp_path / "run", two_nodes()
    suite = write_suite(tmp_path, "ddp", ranks=2)
    with ExitStack() as ended:
        started = [torchrun(options, suite, run, planted=["ddp 1 forward hang"]) for _ in range(2)]
        agents = [ended.enter_context(agent) for agent in started]
        wait_for(lambda: list(run.glob(f"cases/ddp-*/{HANGING}")), 400)
        harness = psutil.Process(workers(run)["0"].ppid())
        agent = next(agent for agent in agents if agent.pid == harness.ppid())
        agent.kill()
        for each in agents:
            each.communicate(timeout=1800)
    wait_for(lambda: not processes_of(run), 120)


@pytest.mark.full  # it waits for half a minute
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="hiding a folder from a process needs root")
@pytest.mark.full
def test_a_folder_that_a_node_does_not_share_is_told(tmp_path: Path) -> None:
    run, options, suite = tmp_path / "private" / "run", two_nodes(), write_suite(tmp_path, "ddp", ranks=2)
    run.parent.mkdir()
    hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{run.parent}" && exec "$@"', "sh"]
    with ExitStack() as ended:
        agents = [ended.enter_context(torchrun(options, suite, run, before=before)) for before in ([], hide)]
        said = "".join(err for agent in agents for err in (agent.communicate(timeout=1800)[1],))
    assert f"refshard: rank 1 on {socket.gethostname()} does not see {run.parent}/." in said
    assert "set --out to a folder that all nodes share" in said
    assert not processes_of(run)


@pytest.mark.full
def test_a_time_limit_asks_all_ranks_before_it_ends_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    suite = write_suite(tmp_path, "ddp", ranks=2, steps=100_000, more="time_limit_s = 40.0")
    with torchrun(ALONE, suite, run) as process:
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 1, err
    state, error, log_tail = only_case(read_run(run), "ddp")
    assert state == "timeout"
    assert error is not None
    assert error.startswith("did not finish within time_limit_s = 40; the ranks were killed: rank")
    assert "not answering" not in error
    assert [line for line in log_tail if line.endswith("most recent call first:")] == [
        "rank 0, most recent call first:",
        "rank 1, most recent call first:",
    ]
    assert not processes_of(run)


def served(store: HashStore, folder: Path) -> Report:
    """The report of rank 1's server on the first job, which is to work in ``folder``, and on no more."""
    program = Program(name="case", processes=2, time_limit_s=60.0)
    announced = Announced(program=program, folder=str(folder), port=1)
    store.set("job/0", msgspec.json.encode(announced).decode())
    store.set("job/1", "true")
    place = msgspec.structs.replace(PLACE, rank=1)
    assert Server(place, store, Interruption()).serve()
    return msgspec.json.decode(store.get("job/0/end/0"), type=Report)


def test_a_job_that_is_called_off_before_its_folder_is_seen_is_no_trouble(tmp_path: Path) -> None:
    store = HashStore()
    store.set("job/0/call_off", str(int(signal.SIGTERM)))
    found = served(store, tmp_path / "not yet")
    assert (found.trouble, found.end.rank, found.end.exit_code) == ("", 1, -signal.SIGTERM)


def test_a_server_that_cannot_start_its_rank_says_why(tmp_path: Path) -> None:
    (tmp_path / "case.json").touch()
    (tmp_path / "logs").touch()
    trouble = served(HashStore(), tmp_path).trouble
    assert trouble.startswith(f"rank 1 on {socket.gethostname()} cannot be started ([Errno ")
    assert trouble.endswith("); correct that and --resume the run")


def test_a_rank_that_ended_well_is_not_said_to_stand_anywhere() -> None:
    frame = '  File "/a/b.py", line 7 in f'
    found = timed_out([RankEnd(rank=1, exit_code=0), RankEnd(rank=0, exit_code=-9, stack=(frame,))])
    assert found.error == "rank 0 in f (b.py:7)"


def case(**changes: object) -> Case:
    fields = {"strategy": "ddp", "model": "llama-tiny", "gpus": 2, "global_batch": 4, "device": "cpu"}
    return Case.of(**{**fields, **changes})  # type: ignore[arg-type]


def test_more_ranks_than_torchrun_started_are_refused() -> None:
    launcher = TorchrunLauncher(PLACE)
    launcher.check(case(), oversubscribe=False)
    with pytest.raises(SpecError, match=r"gpus: 4 ranks asked for, torchrun started 2; lower it, or raise torch"):
        launcher.check(case(gpus=4), oversubscribe=True)


def test_a_process_that_torchrun_did_not_start_is_told_how() -> None:
    with pytest.raises(SpecError, match=r"needs torchrun, which did not start this process; run: torchrun "):
        place_of({"RANK": "0"})


@pytest.mark.full
def test_torchrun_must_not_start_several_harnesses(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    with running("run", write_suite(tmp_path, "single"), "--out", tmp_path / "run", env=environment) as process:
        out, err = process.communicate(timeout=1800)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("refshard: launcher: torchrun started this process, and with launcher 'local' each of its")
    assert not (tmp_path / "run").exists()


NETLAB = 'launcher = "netlab"\nnetwork = { hosts = 2, rate = "1gbit" }'


@pytest.mark.parametrize(
    ("head", "arguments", "message"),
    [
        ("", ["--launcher", "slrum"], "launcher: unknown 'slrum'; did you mean 'slurm'?"),
        (
            "",
            ["--sbatch", "-p main"],
            "sbatch needs launcher 'slurm', got launcher 'local'; add --launcher slurm",
        ),
        (NETLAB, ["--launcher", "slurm"], "launcher: got 'slurm', but this suite creates its own hosts"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str, arguments: list[str], message: str
) -> None:
    suite = write_suite(tmp_path, "ddp", ranks=2, head=head)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(suite), "--out", str(tmp_path / "run"), *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"refshard: {message}")
    assert not (tmp_path / "run").exists()
