"""Ranks as tasks of a Slurm job: one job for each launch, submitted from here and run wherever Slurm finds room.

submitit was considered. It asks ``sacct`` for a job's state, by default every ten minutes, which needs Slurm's
accounting database. It neither finds a job whose submission was not answered nor signals tasks to ask where they stand.
"""

import hashlib
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from refshard.errors import LaunchError, SpecError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome, environment_elsewhere
from refshard.measure.launchers.ranks import RankEnd, launch_of, log_tail, stacks, timed_out
from refshard.measure.rank import PROGRESS_FILE
from refshard.measure.worker import ASK
from refshard.records import Environment
from refshard.specs.case import Case

OWN = "slurm"
"""The folder, in the job's, of scripts and of what Slurm writes; all else there but what was asked is the ranks'."""
_ENDS = "ends"
_SPARE_MINUTES = 10
ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
)
"""States of jobs that have ended, for good."""
Ask = Callable[..., tuple[int, str]]
"""Runs a command of Slurm, as :func:`ask` does."""
_COMMAND_S = 60.0

_BATCH = """#!/bin/sh
#SBATCH --requeue
#SBATCH --time={minutes}
{options}#SBATCH --ntasks={ranks}
#SBATCH --open-mode=append
#SBATCH --output={own}/%j.out
cd {folder} || exit
# Slurm runs this again when it requeues the job: it starts afresh.
find . -mindepth 1 -maxdepth 1 ! -name {asked} ! -name {own_name} -exec rm -rf {{}} +
mkdir {ends}
cd "$SLURM_SUBMIT_DIR" || exit
exec srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} sh {own}/rank.sh
"""
_RANK = """#!/bin/sh
# One rank: its place in torchrun's words. Ranks meet where rank 0 says, whatever the submitting shell had set.
trap : USR1 # which asks the worker where it stands
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
    reason: str
    restarts: int

    @property
    def ended(self) -> bool:
        """Whether it has ended, for good."""
        return self.state in ENDED


GONE = Status(state="FORGOTTEN", reason="None", restarts=0)
"""Of a job that Slurm knows no more: it ended a while ago."""


def scripts(job: Job, folder: Path, options: Sequence[str]) -> tuple[str, str]:
    """What sbatch is given, with the user's ``options``, and what each task of it runs."""
    own, quoted = folder / OWN, shlex.quote(str(folder))
    worker = [sys.executable, "-m", "refshard.measure.worker", job.program, str(folder)]
    batch = _BATCH.format(
        minutes=math.ceil(job.time_limit_s / 60) + _SPARE_MINUTES,
        options=f"#SBATCH {shlex.join(options)}\n" if options else "",
        ranks=job.processes,
        folder=quoted,
        own=shlex.quote(str(own)),
        own_name=OWN,
        asked=job.asked,
        ends=shlex.quote(str(folder / _ENDS)),
    )
    return batch, _RANK.format(folder=quoted, ends=_ENDS, worker=shlex.join(worker))


def parse_status(said: str) -> Status:
    """Read a line of ``scontrol --oneliner show job``.

    >>> parse_status("JobId=7 JobName=refshard JobState=PENDING Reason=Resources Restarts=1 Requeue=1")
    Status(state='PENDING', reason='Resources', restarts=1)
    """
    found = dict(reversed(re.findall(r"\b(JobState|Reason|Restarts)=(\S+)", said)))  # what users write comes last
    return Status(state=found["JobState"], reason=found["Reason"], restarts=int(found["Restarts"]))


def ends_of(folder: Path) -> tuple[RankEnd, ...]:
    """How the ranks of a job ended, in the order of their end, as far as their shells lived to tell."""
    found = []
    for path in (folder / _ENDS).glob("*"):
        if path.name.isdecimal():
            when, status = path.read_text().split()
            found.append((float(when), int(path.name), int(status)))
    return tuple(
        RankEnd(
            rank=rank,
            exit_code=128 - status if status > 128 else status,  # as a shell tells of a signal
            log_tail=log_tail(folder / "logs", rank),
        )
        for _, rank, status in sorted(found)
    )


def ask(*command: str) -> tuple[int, str]:
    """Run a command of Slurm; return its exit status, and in one line what it said: on success, not its complaints.

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


def status_of(number: str, ask: Ask) -> tuple[Status | None, str]:
    """What Slurm says of a job; None, and why, if it cannot be asked now."""
    failed, said = ask("scontrol", "--oneliner", "show", "job", number)
    if not failed:
        return parse_status(said), ""
    return (GONE, "") if "Invalid job id" in said else (None, said)


POLL_S = 1.0
PATIENCE_S = 600.0
"""How long Slurm's controller may be out of reach, and a job that an earlier harness left may take to end."""
_PASSING = re.compile(
    "Unable to contact slurm controller|timed out|no answer within|Zero Bytes were transmitted|Connection refused|"
    "Connection reset|Transport endpoint is not connected|Resource temporarily unavailable"
)
"""Complaints of a controller that cannot be reached, or has too much to do; it may have done all the same what it was
asked.
"""


def job_name(folder: Path) -> str:
    """What the jobs that work in ``folder`` are called."""
    return f"refshard-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def submit(
    job: Job,
    folder: Path,
    options: tuple[str, ...],
    ask: Ask,
    on_progress: Callable[[str], None],
    interruption: Interruption,
) -> str | None:
    """The job's number; None if this process is to end before Slurm's controller answers.

    What an earlier harness left for this folder is cancelled before, for it would empty the folder, or write there.

    Raises:
        LaunchError: sbatch refuses the job, what was left does not end, or Slurm is out of reach for long.
    """
    own = folder / OWN
    own.mkdir(exist_ok=True)
    for name, text in zip(("batch.sh", "rank.sh"), scripts(job, folder, options)):
        (own / name).write_text(text)
    before: frozenset[str] | None = None
    shown = ""
    deadline = time.monotonic() + PATIENCE_S
    while not interruption.received:
        jobs, said = _named(folder, ask)
        if jobs is not None and before is None:
            left = [number for number, state in jobs.items() if state not in ENDED]
            if left:
                ask("scancel", *left)
                said = f"ending job {', '.join(left)}, left by an earlier run"
            else:
                before = frozenset(jobs)
        if jobs is not None and before is not None:
            if new := jobs.keys() - before:  # the controller took it, though its answer was lost
                return _only(max(new, key=int), jobs.keys() - before, ask)
            failed, said = ask("sbatch", "--parsable", f"--job-name={job_name(folder)}", str(own / "batch.sh"))
            if not failed:
                number = said.split(";")[0]
                return _only(number, (_named(folder, ask)[0] or {}).keys() - before, ask)
            _check_passing(said)
        elif jobs is None:
            _check_passing(said)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"launcher 'slurm': no job within {PATIENCE_S:g} s ({said}); --resume the run once Slurm answers"
            )
        if said != shown:
            shown = said
            on_progress(said)
        time.sleep(POLL_S)
    return None


def _check_passing(said: str) -> None:
    if not _PASSING.search(said):
        raise LaunchError(f"launcher 'slurm': sbatch rejected the job ({said}); correct --sbatch")


def cancel_named(folder: Path, ask: Ask) -> None:
    """Cancel every job that works in ``folder``, if Slurm can be asked."""
    ask("scancel", f"--user={os.getuid()}", f"--name={job_name(folder)}")


def _named(folder: Path, ask: Ask) -> tuple[dict[str, str] | None, str]:
    """States of the jobs that work in ``folder``, by number; None, and why, if Slurm cannot be asked now."""
    mine = (f"--user={os.getuid()}", f"--name={job_name(folder)}")
    failed, said = ask("squeue", "--noheader", "--states=all", *mine, "--format=%A=%T")
    return (None, said) if failed else (dict(word.split("=") for word in said.split()), "")


def _only(number: str, new: set[str], ask: Ask) -> str:
    """Cancel others that were submitted in vain, as it seemed."""
    if others := sorted(new - {number}):
        ask("scancel", *others)
    return number


_CANCEL_S = 180.0
_LOST = frozenset(("PREEMPTED", "NODE_FAIL", "BOOT_FAIL"))
"""States of jobs that ended through no fault of theirs: they are submitted again."""
_SUBMISSIONS = 4
_ASKED_RANKS = 8
"""How many ranks tell where they stand when their time is over: the first."""
_ANSWER_S = 15.0
"""How long what they tell may take to be seen here."""


class SlurmLauncher(Launcher):
    """Submits with ``sbatch`` from a login node; ``options`` are the user's, as in a shell. ``ask`` runs commands."""

    def __init__(self, options: str, ask: Ask = ask) -> None:
        self._ask = ask
        try:
            self._options = tuple(shlex.split(options))
        except ValueError as error:
            raise SpecError(f"sbatch: {error} in {options!r}; correct it") from None

    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`. A job that is preempted, or loses its node, is submitted again.

        Raises:
            LaunchError: sbatch refuses the job, or Slurm is out of reach for long.
        """
        with Interruption() as interruption:
            try:
                return self._launch(job, folder, on_progress, interruption)
            except BaseException as error:
                with suppress(LaunchError):
                    cancel_named(folder, self._ask)  # whatever went wrong, no job is left
                if interruption.received:  # which takes the place of the error
                    print(f"refshard: {error}", file=sys.stderr, flush=True)
                raise

    def _launch(
        self, job: Job, folder: Path, on_progress: Callable[[str], None], interruption: Interruption
    ) -> LaunchOutcome:
        lost: list[str] = []
        while len(lost) < _SUBMISSIONS and not interruption.received:
            number = submit(job, folder, self._options, self._ask, on_progress, interruption)
            if number is None:
                with suppress(LaunchError):
                    cancel_named(folder, self._ask)  # an answer may have been lost
                return LaunchOutcome()
            submitted = _Submitted(number, job, folder, self._ask)
            status = submitted.wait(on_progress, interruption)
            if status is None:
                return submitted.cancelled(interruption)
            if status.state not in _LOST:
                return launch_of_job(status, submitted.number, folder)
            lost.append(f"job {submitted.number}: {status.state}")
        return LaunchOutcome(
            error=f"Slurm ended the job all {len(lost)} times ({', '.join(lost)}); choose other nodes with --sbatch"
        )

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`. Slurm knows its nodes: it refuses what has no room on any."""

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`. One job tells, for all nodes that ``options`` may lead to."""
        return environment_elsewhere(self, 1, threads, "nodes that Slurm chose", beside, on_progress)


class _Submitted:
    """A job that Slurm has."""

    def __init__(self, number: str, job: Job, folder: Path, ask: Ask) -> None:
        self.number = number
        self._ask = ask
        self._processes = job.processes
        self._limit_s, self._progress = job.time_limit_s, folder / PROGRESS_FILE
        self._folder = folder
        self._ran_s, self._restarts = 0.0, 0
        self._seen: float | None = None
        self._shown = ""

    def wait(self, on_progress: Callable[[str], None], interruption: Interruption) -> Status | None:
        """Its status at its end; None once its time is over or this process is to end.

        Raises:
            LaunchError: Slurm is out of reach for long.
        """
        answered = time.monotonic()
        while not interruption.received:
            status, trouble = status_of(self.number, self._ask)
            now = time.monotonic()
            if status is None:
                if now > answered + PATIENCE_S:
                    raise LaunchError(
                        f"launcher 'slurm': no word of job {self.number} for {PATIENCE_S:g} s ({trouble}); cancel it "
                        "if it runs, and --resume the run"
                    )
                time.sleep(POLL_S)
                continue
            answered = now
            if status.ended or status == GONE:
                return status
            if self._is_over(status, now):
                return None
            self._show(status, on_progress)
            time.sleep(POLL_S)
        return None

    def cancelled(self, interruption: Interruption) -> LaunchOutcome:
        """End it, and wait until it has ended; if its time is over, ask before where its ranks stand."""
        ends = () if interruption.received else self._standing()
        deadline = time.monotonic() + _CANCEL_S
        while True:
            _, trouble = self._ask("scancel", self.number)
            status, _ = status_of(self.number, self._ask)
            if status is not None and (status.ended or status == GONE):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"launcher 'slurm': job {self.number} did not end after scancel ({trouble}); end it by hand"
                )
            time.sleep(POLL_S)
        if interruption.received:
            return LaunchOutcome()
        return timed_out(ends)

    def _standing(self) -> tuple[RankEnd, ...]:
        """The first ranks, as they are."""
        ended = {end.rank: end for end in ends_of(self._folder)}
        asked = range(min(self._processes, _ASKED_RANKS))
        failed, _ = self._ask("scancel", f"--signal={ASK.name}", self.number)
        found = stacks(asked, self._folder, 0.0 if failed else _ANSWER_S, ended.__contains__)
        return tuple(
            ended.get(rank)
            or RankEnd(
                rank=rank,
                exit_code=1,
                log_tail=log_tail(self._folder / "logs", rank),
                stack=found.get(rank, ()),
            )
            for rank in asked
        )

    def _is_over(self, status: Status, now: float) -> bool:
        """Whether it has run for its time. What it waits, or is suspended, counts for nothing; one that is requeued
        starts afresh.
        """
        if status.restarts != self._restarts:
            self._restarts, self._ran_s, self._seen = status.restarts, 0.0, None
        if status.state == "RUNNING" and self._seen is not None:
            self._ran_s += now - self._seen
        self._seen = now if status.state == "RUNNING" else None
        return self._ran_s > self._limit_s

    def _show(self, status: Status, on_progress: Callable[[str], None]) -> None:
        text = f"job {self.number} {status.state.lower()}"
        if status.state == "PENDING":
            text += f": {status.reason}"
        else:
            with suppress(OSError):  # not yet there; or the job starts afresh, and another host removes it
                text = self._progress.read_text()
        if text != self._shown:
            self._shown = text
            on_progress(text)


def launch_of_job(status: Status, number: str, folder: Path) -> LaunchOutcome:
    """What became of a job that ended by itself: its ranks tell, or Slurm."""
    found = launch_of(ends_of(folder), folder)
    if status.state == "OUT_OF_MEMORY":
        error = found.error or f"Slurm ended job {number} in state OUT_OF_MEMORY"
        return replace(found, out_of_memory=True, error=error)
    if found.error is not None or status.state in ("COMPLETED", GONE.state):
        return found
    wrote = folder / OWN / f"{number}.out"  # not of a job that never ran
    tail = wrote.read_text(errors="replace").splitlines()[-30:] if wrote.exists() else []
    return LaunchOutcome(
        error=f"Slurm ended job {number} in state {status.state} ({status.reason})", log_tail=tuple(tail)
    )
