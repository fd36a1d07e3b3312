"""Ranks as tasks of a Slurm job: one job for each launch, submitted from here and run wherever Slurm finds room.

submitit was considered. It asks ``sacct`` for a job's state, by default every ten minutes, which needs Slurm's
accounting database. It cannot find a job if sbatch's reply was lost, nor signal tasks to write their stacks.
"""

import hashlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from refshard.errors import LaunchError, SpecError
from refshard.measure.launchers.base import (
    Launcher,
    LaunchOutcome,
    Program,
    RankEnd,
    Ranks,
    environment_elsewhere,
    launch_of,
    log_tail,
    stacks,
)
from refshard.measure.worker import ASK, PROGRESS_FILE, request_file
from refshard.records import Environment
from refshard.specs.case import Case

OWN = "slurm"
"""The folder, in the launch's, of scripts and Slurm's output; all else there but the request belongs to the ranks."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""How long Slurm's controller may not answer, and a job left by an earlier harness may take to end."""
_ENDS = "ends"
_SPARE_MINUTES = 10
_COMMAND_S, _CANCEL_S, _ANSWER_S = 60.0, 180.0, 15.0
"""How long a command, the end of a cancelled job, and the stacks of its ranks may take."""
_SUBMISSIONS = 4
_ASKED_RANKS = 8
"""How many ranks write their stacks at the time limit: the first."""
_LOST = frozenset(("PREEMPTED", "NODE_FAIL", "BOOT_FAIL"))
"""States of jobs that ended through no fault of theirs: they are submitted again."""
_FORGOTTEN = "FORGOTTEN"
"""A job that Slurm no longer knows: it ended a while ago."""
ENDED = frozenset(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", _FORGOTTEN, *_LOST))
"""States of jobs that have ended for good."""
_PASSING = re.compile(
    "Unable to contact slurm controller|timed out|no answer within|Zero Bytes were transmitted|Connection refused|"
    "Connection reset|Transport endpoint is not connected|Resource temporarily unavailable"
)
"""Complaints of a controller that is out of reach or overloaded; it may have served the request all the same."""
Ask = Callable[..., tuple[int, str]]
"""Runs a command of Slurm, as :func:`ask` does."""

_BATCH = """#!/bin/sh
#SBATCH --requeue
#SBATCH --time={minutes}
{options}#SBATCH --ntasks={ranks}
#SBATCH --open-mode=append
#SBATCH --output={own}/%j.out
cd {folder} || exit
# Slurm runs this again when it requeues the job: it starts afresh.
find . -mindepth 1 -maxdepth 1 ! -name {request} ! -name {own_name} -exec rm -rf {{}} +
mkdir {ends}
cd "$SLURM_SUBMIT_DIR" || exit
exec srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} sh {own}/rank.sh
"""
_RANK = """#!/bin/sh
# One rank: its place in torchrun's variables. Ranks meet where rank 0 says, whatever the submitting shell had set.
trap : USR1 # it asks the worker for its stack
unset MASTER_ADDR MASTER_PORT
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
LOCAL_WORLD_SIZE=$(echo "$SLURM_GTIDS" | tr , '\\n' | wc -l)
export LOCAL_WORLD_SIZE
case ${{CUDA_VISIBLE_DEVICES-}} in
'' | *,*) ;;
*) LOCAL_RANK=0 ;; # bound to one GPU: the first that it sees
esac
cd {folder} || exit
logs=$PWD/logs/$RANK ends=$PWD/{ends}
mkdir -p "$logs"
cd "$SLURM_SUBMIT_DIR" || exit
{worker} "$$" >"$logs/stdout.log" 2>"$logs/stderr.log"
status=$?
echo "$(date +%s.%N) $status" >"$ends/$RANK.tmp"
mv "$ends/$RANK.tmp" "$ends/$RANK"
exit "$status"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What Slurm says of a job. ``restarts`` counts how often it was requeued."""

    state: str
    reason: str = "None"
    restarts: int = 0


def scripts(program: Program, folder: Path, options: Sequence[str]) -> tuple[str, str]:
    """The script for sbatch, with the user's ``options``, and the one that each task of it runs."""
    own, quoted = folder / OWN, shlex.quote(str(folder))
    worker = [sys.executable, "-m", "refshard.measure.worker", program.name, str(folder)]
    batch = _BATCH.format(
        minutes=math.ceil(program.time_limit_s / 60) + _SPARE_MINUTES,
        options=f"#SBATCH {shlex.join(options)}\n" if options else "",
        ranks=program.processes,
        folder=quoted,
        own=shlex.quote(str(own)),
        own_name=OWN,
        request=request_file(folder, program.name).name,
        ends=shlex.quote(str(folder / _ENDS)),
    )
    return batch, _RANK.format(folder=quoted, ends=_ENDS, worker=shlex.join(worker))


def parse_status(line: str) -> Status:
    """Read a line of ``scontrol --oneliner show job``.

    >>> parse_status("JobId=7 JobName=refshard JobState=PENDING Reason=Resources Restarts=1 Requeue=1")
    Status(state='PENDING', reason='Resources', restarts=1)
    """
    found = dict(reversed(re.findall(r"\b(JobState|Reason|Restarts)=(\S+)", line)))  # what users write comes last
    return Status(state=found["JobState"], reason=found["Reason"], restarts=int(found["Restarts"]))


def ends_of(folder: Path) -> tuple[RankEnd, ...]:
    """How the ranks of a job ended, in the order of their end, as far as their shells lived to write it."""
    found = []
    for path in (folder / _ENDS).glob("*"):
        if path.name.isdecimal():
            when, status = path.read_text().split()
            found.append((float(when), int(path.name), int(status)))
    return tuple(
        # A shell reports a signal as 128 more.
        RankEnd(rank=rank, exit_code=128 - status if status > 128 else status, log_tail=log_tail(folder, rank))
        for _, rank, status in sorted(found)
    )


def ask(*command: str) -> tuple[int, str]:
    """Run a command of Slurm; return its exit status, and its output or, if it failed, its complaint, in one line.

    Raises:
        LaunchError: it is not installed here.
    """
    try:
        # In a session of its own: Ctrl-C must not end the command that submits a job, or cancels it.
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=_COMMAND_S)
    except FileNotFoundError:
        raise LaunchError(
            f"launcher 'slurm' needs the program '{command[0]}', not found on PATH; run on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_COMMAND_S:g} s"
    return done.returncode, " ".join((done.stdout if done.returncode == 0 else done.stderr).split())


def job_name(folder: Path) -> str:
    """The name of the jobs that work in ``folder``."""
    return f"refshard-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


class SlurmLauncher(Launcher):
    """Submits with ``sbatch`` from a login node; ``options`` are the user's, as in a shell. ``ask`` runs commands."""

    def __init__(self, options: str, ask: Ask = ask) -> None:
        self._ask = ask
        try:
            self._options = tuple(shlex.split(options))
        except ValueError as error:
            raise SpecError(f"sbatch: {error} in {options!r}; correct it") from None

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        """See :meth:`Launcher.start`. A job that is preempted, or loses its node, is submitted again.

        Raises:
            LaunchError: sbatch refuses the job, or Slurm is out of reach for long.
        """
        (folder / OWN).mkdir(exist_ok=True)
        for name, text in zip(("batch.sh", "rank.sh"), scripts(program, folder, self._options)):
            (folder / OWN / name).write_text(text)
        job = _Job(program.processes, folder, self._ask)
        try:
            yield job
        except BaseException:
            with suppress(LaunchError):
                job.cancel_all()
            raise

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`. Slurm knows its nodes: it refuses what fits on none."""

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`. One node stands for all that ``options`` may lead to."""
        return environment_elsewhere(self, 1, threads, "nodes that Slurm chose", run, on_progress)


class _Job(Ranks):
    """The job of one launch; what an earlier harness left for its folder is cancelled before it is submitted."""

    pause_s: ClassVar[float] = POLL_S

    def __init__(self, processes: int, folder: Path, ask: Ask) -> None:
        self._processes, self._folder, self._ask = processes, folder, ask
        self._number: str | None = None  # not submitted yet
        self._before: frozenset[str] | None = None  # jobs of this folder that have ended
        self._answered = time.monotonic()
        self._lost: list[str] = []
        self._status = Status(state="PENDING")
        self._seen: float | None = None
        self._ran_s, self._shown = 0.0, ""
        self._stacks: dict[int, tuple[str, ...]] = {}

    def poll(self) -> tuple[RankEnd, ...] | None:
        if self._number is None and not self._submit():
            return None
        assert self._number is not None
        status, said = self._state(self._number)
        now = time.monotonic()
        if status is None:
            self._check_patience(
                f"no word of job {self._number} for {PATIENCE_S:g} s ({said}); cancel it if it runs, and --resume the "
                "run"
            )
            return None
        # Waiting and suspension do not count; a job that is requeued starts afresh.
        if status.restarts != self._status.restarts:
            self._ran_s, self._seen = 0.0, None
        if status.state == "RUNNING" and self._seen is not None:
            self._ran_s += now - self._seen
        self._seen = now if status.state == "RUNNING" else None
        self._status, self._answered = status, now
        if status.state in _LOST:
            self._lost.append(f"job {self._number}: {status.state}")
            if len(self._lost) < _SUBMISSIONS:
                self._number, self._before, self._ran_s, self._seen = None, None, 0.0, None
                return None
        if status.state not in ENDED:
            self._shown = f"job {self._number} {status.state.lower()}"
            if status.state == "PENDING":
                self._shown += f": {status.reason}"
            else:
                with suppress(OSError):  # not there yet; or the job starts afresh, and another host removes it
                    self._shown = (self._folder / PROGRESS_FILE).read_text()
            return None
        return ends_of(self._folder)

    def _submit(self) -> bool:
        """Take one step towards a job; whether there is one."""
        jobs, said = self._named()
        if jobs is not None and self._before is None:
            if left := [number for number, state in jobs.items() if state not in ENDED]:
                self._ask("scancel", *left)  # it would empty the folder, or write there
                said = f"ending job {', '.join(left)}, left by an earlier run"
            else:
                self._before = frozenset(jobs)
        if jobs is not None and self._before is not None:
            if not (new := jobs.keys() - self._before):  # else the controller took it, though its answer was lost
                batch = str(self._folder / OWN / "batch.sh")
                failed, said = self._ask("sbatch", "--parsable", f"--job-name={job_name(self._folder)}", batch)
                if not failed:
                    new = {said.split(";")[0], *((self._named()[0] or {}).keys() - self._before)}
            if new:
                self._number, self._answered = max(new, key=int), time.monotonic()
                if others := sorted(new - {self._number}):
                    self._ask("scancel", *others)  # submitted in vain, as it seemed
                return True
        if (jobs is None or self._before is not None) and not _PASSING.search(said):
            raise LaunchError(f"launcher 'slurm': sbatch rejected the job ({said}); correct --sbatch")
        self._check_patience(f"no job within {PATIENCE_S:g} s ({said}); --resume the run once Slurm answers")
        self._shown = said
        return False

    def _check_patience(self, message: str) -> None:
        if time.monotonic() > self._answered + PATIENCE_S:
            raise LaunchError(f"launcher 'slurm': {message}")

    def _named(self) -> tuple[dict[str, str] | None, str]:
        """States of the jobs that work in the folder, by number; None, and why, if Slurm cannot be reached now."""
        mine = (f"--user={os.getuid()}", f"--name={job_name(self._folder)}")
        failed, said = self._ask("squeue", "--noheader", "--states=all", *mine, "--format=%A=%T")
        return (None, said) if failed else (dict(word.split("=") for word in said.split()), "")

    def _state(self, number: str) -> tuple[Status | None, str]:
        """What Slurm says of a job; None, and why, if it cannot be reached now."""
        failed, said = self._ask("scontrol", "--oneliner", "show", "job", number)
        if not failed:
            return parse_status(said), ""
        return (Status(state=_FORGOTTEN), "") if "Invalid job id" in said else (None, said)

    def outcome(self, ends: tuple[RankEnd, ...]) -> LaunchOutcome:
        if len(self._lost) == _SUBMISSIONS:
            lost = ", ".join(self._lost)
            return LaunchOutcome(
                error=f"Slurm ended the job all {_SUBMISSIONS} times ({lost}); choose other nodes with --sbatch"
            )
        assert self._number is not None
        return launch_of_job(self._status, self._number, self._folder)

    def ask(self) -> None:
        ranks, ended = range(min(self._processes, _ASKED_RANKS)), {end.rank for end in ends_of(self._folder)}
        failed, _ = self._ask("scancel", f"--signal={ASK.name}", str(self._number))
        self._stacks = stacks(ranks, self._folder, 0.0 if failed else _ANSWER_S, ended.__contains__)

    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        """See :meth:`Ranks.end`. Slurm chooses the signal; the ends are of the ranks that :meth:`ask` covers."""
        ended = {end.rank: end for end in ends_of(self._folder)}
        ranks = range(min(self._processes, _ASKED_RANKS))
        ends = tuple(
            ended.get(rank)
            or RankEnd(rank=rank, exit_code=1, log_tail=log_tail(self._folder, rank), stack=self._stacks.get(rank, ()))
            for rank in ranks
        )
        if self._number is None:
            with suppress(LaunchError):
                self.cancel_all()  # an answer may have been lost
            return ends
        deadline = time.monotonic() + _CANCEL_S
        while True:
            _, said = self._ask("scancel", self._number)
            status, _ = self._state(self._number)
            if status is not None and status.state in ENDED:
                return ends
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"launcher 'slurm': job {self._number} did not end after scancel ({said}); end it by hand"
                )
            time.sleep(POLL_S)

    def cancel_all(self) -> None:
        """Cancel every job that works in the folder, if Slurm can be reached."""
        self._ask("scancel", f"--user={os.getuid()}", f"--name={job_name(self._folder)}")

    @property
    def ran_s(self) -> float:
        return self._ran_s

    def progress(self) -> str:
        return self._shown


def launch_of_job(status: Status, number: str, folder: Path) -> LaunchOutcome:
    """The outcome of a job that ended by itself, as its ranks tell it, or Slurm."""
    found = launch_of(ends_of(folder), folder)
    if status.state == "OUT_OF_MEMORY":
        error = found.error or f"Slurm ended job {number} in state OUT_OF_MEMORY"
        return replace(found, out_of_memory=True, error=error)
    if found.error is not None or status.state in ("COMPLETED", _FORGOTTEN):
        return found
    wrote = folder / OWN / f"{number}.out"  # missing if the job never ran
    tail = wrote.read_text(errors="replace").splitlines()[-30:] if wrote.exists() else []
    return LaunchOutcome(
        error=f"Slurm ended job {number} in state {status.state} ({status.reason})", log_tail=tuple(tail)
    )
