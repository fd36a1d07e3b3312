"""What every launcher shares: processes that are started, watched and ended, and what their end tells."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, Std, start_processes

from refshard.harness.launchers.base import Job, Launch
from refshard.harness.rank import PROGRESS_FILE

_TAIL_LINES = 30
_POLL_S = 0.1
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def worker_arguments(job: Job, folder: Path) -> tuple[str, ...]:
    """What follows the Python interpreter on a rank's command line. Its parent must be this process."""
    return ("-m", "refshard.harness.worker", job.program, str(folder), str(os.getpid()))


def rank_environment(
    rank: int, local_rank: int, *, world_size: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """The variables by which a rank finds its place and its peers, as torchrun names them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


class Interruption:
    """Notes signals that ask this process to end, for as long as it lasts, and raises KeyboardInterrupt at its end.

    Nothing is raised in between, so what was made meanwhile (processes, a network) is removed by its own ``with``,
    undisturbed, whenever a signal comes and however many. Signals can be noted in the main thread only.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._kept: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def received(self) -> bool:
        """Whether this process was asked to end."""
        return bool(self._received)

    def note(self, number: int) -> None:
        """Remember that the signal came."""
        self._received.append(number)

    def install(self) -> None:
        """Handle the signals from here on; also takes them back from whoever handled them since."""
        for number in _INTERRUPTIONS:
            signal.signal(number, lambda received, _frame: self.note(received))

    def __enter__(self) -> "Interruption":
        self._kept = {number: signal.getsignal(number) for number in _INTERRUPTIONS}
        self.install()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        if self._received:
            raise KeyboardInterrupt(signal.Signals(self._received[0]).name)


def run_ranks(
    program: str,
    arguments: Sequence[tuple[str, ...]],
    environments: Sequence[Mapping[str, str]],
    job: Job,
    folder: Path,
    on_progress: Callable[[str], None],
    interruption: Interruption,
) -> Launch:
    """Run ``program`` with ``arguments[rank]`` and ``environments[rank]`` for each rank, and leave no process behind.

    Ends the ranks when one fails, at ``job.time_limit_s``, and when ``interruption`` noted a signal: then the
    launch that is returned means nothing, and the end of ``interruption`` raises.
    """
    logs = folder / "logs"
    kills_before = _out_of_memory_kills()
    with _quiet_elastic(), _no_leftovers(folder):
        try:
            processes = start_processes(
                name="rank",
                entrypoint=program,
                args=dict(enumerate(arguments)),
                envs={rank: dict(environment) for rank, environment in enumerate(environments)},
                logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
            )
            interruption.install()  # elastic installed handlers that raise, and leaves them there
        except SignalException as signalled:
            interruption.note(signalled.sigval)
            return Launch()
        failures, timed_out = _watch(processes, job.time_limit_s, folder / PROGRESS_FILE, on_progress, interruption)
    if timed_out:
        return Launch(timed_out=True, failed_rank=0, log_tail=_log_tail(logs, 0))
    if not failures:
        return Launch()
    rank, exit_code = first_to_fail(failures)
    return Launch(
        out_of_memory=exit_code == -signal.SIGKILL and _out_of_memory_kills() > kills_before,
        failed_rank=rank,
        error=f"rank {rank} ended with {_cause(exit_code)}",
        log_tail=_log_tail(logs, rank),
    )


def first_to_fail(exit_codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the failure that drew the others after it; ``exit_codes`` in the order of their end.

    A rank that a signal ended is it, since the others only lost their peer; unless elastic itself sent the signal, to
    end the rest.

    >>> first_to_fail({1: 1, 0: -9})
    (0, -9)
    >>> first_to_fail({1: 1, 0: -15})
    (1, 1)
    """
    killed = [(rank, code) for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    return min(killed, default=next(iter(exit_codes.items())))


def _watch(
    processes: PContext,
    limit_s: float,
    progress: Path,
    on_progress: Callable[[str], None],
    interruption: Interruption,
) -> tuple[dict[int, int], bool]:
    """Wait for the end: exit codes other than 0 by rank, in the order of their end, and whether time ran out."""
    deadline = time.monotonic() + limit_s
    shown = ""
    while (result := processes.wait(timeout=0)) is None:
        if interruption.received:
            processes.close(signal.SIGTERM)
            return {}, False
        if time.monotonic() > deadline:
            processes.close(signal.SIGKILL)
            return {}, True
        if progress.exists() and (text := progress.read_text()) != shown:
            shown = text
            on_progress(text)
        time.sleep(_POLL_S)
    return {rank: failure.exitcode for rank, failure in result.failures.items()}, False


@contextmanager
def _no_leftovers(folder: Path) -> Iterator[None]:
    """At the end, on every path, end those children that carry the job's folder in their command line."""
    try:
        yield
    finally:
        leftovers = []
        for process in psutil.Process().children(recursive=True):
            try:
                if str(folder) in process.cmdline():
                    process.kill()
                    leftovers.append(process)
            except psutil.Error:
                continue
        psutil.wait_procs(leftovers, timeout=10)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs every failure at length through many loggers; the record holds what a reader needs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit status {exit_code}"
    return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"


def _out_of_memory_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _log_tail(logs: Path, rank: int) -> tuple[str, ...]:
    lines: list[str] = []
    for stream in ("stdout", "stderr"):
        for path in sorted(logs.glob(f"**/{rank}/{stream}.log")):
            lines += path.read_text(errors="replace").splitlines()
    return tuple(lines[-_TAIL_LINES:])
