"""Ranks as tasks of a Slurm job: one job for each launch, submitted here and run wherever Slurm finds room."""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from refshard.errors import LaunchError, SpecError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.launchers.elsewhere import environment_elsewhere
from refshard.measure.launchers.ranks import RankEnd, launch_of, log_tail, timed_out
from refshard.measure.launchers.slurm.job import GONE, OWN, Ask, Status, ask, ends_of, status_of
from refshard.measure.launchers.slurm.submit import PATIENCE_S, POLL_S, cancel_named, submit
from refshard.measure.launchers.stacks import stacks
from refshard.measure.rank import PROGRESS_FILE
from refshard.measure.worker import ASK
from refshard.records import Environment
from refshard.specs.case import CaseSpec

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

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
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
