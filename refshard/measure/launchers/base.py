"""The seam between the harness and whatever starts processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from refshard.records import Environment
from refshard.specs.case import CaseSpec

Program = Literal["case", "series", "calibration", "environment", "dryrun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launcher starts: ``processes`` ranks of one of the programs that ``measure/worker.py`` knows.

    What they are to do lies in the folder that the launcher is given, in the file :attr:`asked`. They may take
    ``time_limit_s``.
    """

    program: Program
    processes: int
    time_limit_s: float

    @property
    def asked(self) -> str:
        """Name of the file that says what is to be done."""
        return f"{self.program}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended.

    ``failed_rank`` is the rank that failed first, ``error`` what the launcher can tell of it: how its process ended;
    or, if it timed out, where each rank stood. ``log_tail`` are the last lines that failed ranks wrote, that one's
    first; or all, with their stacks. ``out_of_memory`` says that the kernel killed it for want of memory.
    """

    timed_out: bool = False
    out_of_memory: bool = False
    failed_rank: int | None = None
    error: str | None = None
    log_tail: tuple[str, ...] = ()


class Launcher(ABC):
    """Starts the ranks of one job, waits for them, and leaves no process behind."""

    @abstractmethod
    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """Run ``python -m refshard.measure.worker program folder pid`` on ``job.processes`` ranks.

        ``on_progress`` is called now and then with what rank 0 is at. KeyboardInterrupt passes through, after the
        ranks have ended.

        Raises:
            LaunchError: this machine cannot make what the ranks are to run on.
        """

    @abstractmethod
    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        """Refuse a case that has no room where this launcher starts ranks, as far as that can be known before.

        Raises:
            SpecError: there are too few cores (unless ``oversubscribe``), GPUs or processes.
        """

    @abstractmethod
    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """Describe where ranks run, with the rate of a matrix product on ``threads`` threads.

        What takes a launch uses a folder of its own beside the run's folder, ``beside``.

        Raises:
            LaunchError: it cannot be told, or the ranks would run on machines that differ.
        """
