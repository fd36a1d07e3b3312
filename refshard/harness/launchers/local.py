"""All ranks on this machine, through torch's elastic launcher: what ``torchrun`` runs, by its API."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from refshard.harness.launchers.base import Launch, Launcher
from refshard.harness.rank import PROGRESS_FILE
from refshard.specs import CaseSpec

_TAIL_LINES = 30


class LocalLauncher(Launcher):
    """One elastic agent in this process, one worker process a rank; no restarts."""

    def launch(self, case: CaseSpec, folder: Path, on_progress: Callable[[str], None]) -> Launch:
        """See :meth:`Launcher.launch`."""
        logs = folder / "logs"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=case.world_size,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.05,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
        )
        start = elastic_launch(config, entrypoint=sys.executable)
        kills_before = _out_of_memory_kills()
        with _quiet_elastic(), _kept_signal_handlers(), _Watch(case.time_limit_s, folder, on_progress) as watch:
            try:
                start("-m", "refshard.harness.worker", str(folder), str(os.getpid()))
                return Launch()
            except ChildFailedError as error:
                rank, exit_code = _first_to_fail(error)
                cause = f"rank {rank} ended with {_cause(exit_code)}"
                starved = exit_code == -signal.SIGKILL and _out_of_memory_kills() > kills_before
                return Launch(
                    timed_out=watch.timed_out,
                    out_of_memory=starved and not watch.timed_out,
                    failed_rank=rank,
                    error=cause,
                    log_tail=_log_tail(logs, rank),
                )
            except SignalException as interruption:
                raise KeyboardInterrupt(interruption.sigval) from None


class _Watch:
    """Beside the blocking launcher: ends the ranks at the time limit and passes progress on; ends leftovers."""

    def __init__(self, limit_s: float, folder: Path, on_progress: Callable[[str], None]) -> None:
        self._limit_s, self._folder, self._on_progress = limit_s, folder, on_progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.timed_out = False

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        leftovers = self._ranks()
        for process in leftovers:
            process.kill()
        psutil.wait_procs(leftovers, timeout=10)

    def _run(self) -> None:
        deadline = time.monotonic() + self._limit_s
        shown = ""
        while not self._stop.wait(0.2):
            if time.monotonic() > deadline:
                self.timed_out = True
                for process in self._ranks():
                    process.kill()
                return
            progress = self._folder / PROGRESS_FILE
            if progress.exists() and (text := progress.read_text()) != shown:
                shown = text
                self._on_progress(text)

    def _ranks(self) -> list[psutil.Process]:
        """This case's worker processes: children that carry its folder in their command line."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if str(self._folder) in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs every failure at length through many loggers; the record holds what a reader needs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Elastic installs handlers that raise, and leaves them there."""
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _first_to_fail(error: ChildFailedError) -> tuple[int, int]:
    """Rank and exit code of the failure that drew the others after it.

    A rank that a signal ended is it, since the others only lost their peer; unless elastic itself sent the signal, to
    end the rest.
    """
    killed = [
        (rank, failure.exitcode)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    ]
    rank, failure = error.get_first_failure()
    return min(killed, default=(rank, failure.exitcode))


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
