"""How the job of a launch comes into Slurm's queue: once, whatever an earlier harness or a lost answer left there.

A job's name tells the folder that it works in, so that it can be found by who does not know its number.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from refshard.errors import LaunchError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job
from refshard.measure.launchers.slurm.job import ENDED, OWN, Ask, scripts

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
    script = _write(job, folder, options)
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
            failed, said = ask("sbatch", "--parsable", f"--job-name={job_name(folder)}", script)
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


def _write(job: Job, folder: Path, options: tuple[str, ...]) -> str:
    """Write what Slurm is to run; return the path for sbatch."""
    own = folder / OWN
    own.mkdir(exist_ok=True)
    batch, rank = scripts(job, folder, options)
    (own / "batch.sh").write_text(batch)
    (own / "rank.sh").write_text(rank)
    return str(own / "batch.sh")


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
