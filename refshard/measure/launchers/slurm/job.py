"""A job of Slurm: the scripts that run its ranks, what Slurm says of it, and what its ranks left when they ended."""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from refshard.errors import LaunchError
from refshard.measure.launchers.base import Job
from refshard.measure.launchers.ranks import RankEnd, log_tail

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
