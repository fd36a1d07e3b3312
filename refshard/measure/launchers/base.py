"""The interface between the suite and what starts processes."""

import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from refshard.errors import LaunchError, SpecError
from refshard.measure.environment import DESCRIBE_FILE, DescribeOptions, described_file, differences
from refshard.measure.load import available_cores
from refshard.records import Environment
from refshard.specs.case import Case


def check_fits_machine(case: Case, processes: int, *, oversubscribe: bool) -> None:
    """Refuse a case of which ``processes`` are to run here, if a GPU or a core would have to serve two of them.

    Raises:
        SpecError: they are too many; more than the cores bear are allowed with ``oversubscribe``.
    """
    gpus = torch.cuda.device_count()
    field = "resident_ranks" if case.protocol.fidelity == "emulated" else "gpus"
    if case.protocol.device == "cuda" and not gpus:
        raise SpecError(
            'device: \'cuda\' asked for, but torch sees no GPU; set device = "cpu" or "auto", or dry-run the suite '
            "with --cluster CLUSTER"
        )
    if gpus and case.protocol.device != "cpu":
        if processes > gpus:
            raise SpecError(f"{field}: {processes} ranks need {processes} GPUs, found {gpus}; lower it")
        return
    wanted, cores = processes * case.protocol.threads_per_rank, available_cores()
    if wanted > cores and not oversubscribe:
        raise SpecError(
            f"{field}: {processes} ranks x {case.protocol.threads_per_rank} thread(s) exceed the {cores} cores here; "
            "lower it, or pass --oversubscribe to measure contention too"
        )


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
    def check(self, case: Case, *, oversubscribe: bool) -> None:
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


_LIMIT_S = 600.0


def environment_elsewhere(
    launcher: Launcher,
    processes: int,
    threads: int,
    network: str,
    beside: Path,
    on_progress: Callable[[str], None],
) -> Environment:
    """Launch ``processes`` ranks that describe their machines, in a folder beside the run's, and return rank 0's; in
    ``network`` what joins them, which a run must have throughout.

    Raises:
        LaunchError: a rank could not, or its machine is of another kind than rank 0's.
    """
    try:
        found = _found(launcher, processes, DescribeOptions(threads=threads, network=network), beside, on_progress)
    except OSError as error:  # of this process
        raise LaunchError(f"ranks cannot write machine data next to {beside} ({error}); fix the cause") from None
    for rank, other in found.items():
        if differing := differences(found[0], other):
            raise LaunchError(
                f"all hosts of a run must be alike: from {found[0].hostname} (rank 0) to {other.hostname} "
                f"(rank {rank}), {'; '.join(differing)}; choose hosts that are alike"
            )
    return msgspec.structs.replace(found[0], argv=("refshard", *sys.argv[1:]))


def _found(
    launcher: Launcher, processes: int, options: DescribeOptions, beside: Path, on_progress: Callable[[str], None]
) -> dict[int, Environment]:
    """What ranks tell of their machines, by rank; rank 0 is there, others as far as this host sees their files."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    parent, prefix = beside.absolute().parent, f".{beside.name}-environment-"
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / DESCRIBE_FILE).write_bytes(msgspec.json.encode(options))
        job = Job(program="environment", processes=processes, time_limit_s=_LIMIT_S)
        launch = launcher.launch(job, folder, on_progress)
        if launch.timed_out or launch.error or not described_file(folder, 0).exists():
            cause = f"no answer within {_LIMIT_S:g} s" if launch.timed_out else launch.error or "no answer"
            last = next((line.strip() for line in reversed(launch.log_tail) if line.strip()), "it wrote nothing")
            raise LaunchError(f"the ranks could not describe their machines: {cause} ({last}); correct that")
        return {
            rank: msgspec.json.decode(path.read_bytes(), type=Environment)
            for rank in range(processes)
            if (path := described_file(folder, rank)).exists()
        }
