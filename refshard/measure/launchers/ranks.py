"""Processes that every launcher starts, watches and ends: where they stand, and what their end says."""

import logging
import os
import re
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import final

import msgspec
import psutil
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    Std,
    SubprocessContext,
    start_processes,
)

from refshard.measure.flight import flight_file
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.rank import PROGRESS_FILE
from refshard.measure.worker import ASK, stack_file

_ANSWER_S = 5.0
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_COLLECTIVES = ("/torch/distributed/", "/refshard/engine/collectives.py")
_BACKWARD = "/torch/autograd/graph.py"


def ask_for_stacks(pids: Mapping[int, int], folder: Path) -> dict[int, tuple[str, ...]]:
    """Each rank's stack of its main thread, innermost frame first; empty of a rank that does not answer.

    A rank that cannot write it yet ends by the signal: ask those only that are to be ended.
    """
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, ASK)

    def has_ended(rank: int) -> bool:
        return not psutil.pid_exists(pids[rank]) or psutil.Process(pids[rank]).status() == psutil.STATUS_ZOMBIE

    return stacks(pids, folder, _ANSWER_S, has_ended)


def stacks(
    ranks: Iterable[int], folder: Path, limit_s: float, has_ended: Callable[[int], bool]
) -> dict[int, tuple[str, ...]]:
    """The stacks that ``ranks`` write, which were asked; see :func:`ask_for_stacks`."""
    files = {rank: stack_file(folder, rank) for rank in ranks}
    flights = [flight_file(folder, rank) for rank in files]
    before: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        texts = {rank: _text(file) for rank, file in files.items()}
        answered = all(text or has_ended(rank) for rank, text in texts.items())
        if texts == before and answered and not any(file.exists() and not _text(file) for file in flights):
            break
        before = texts
        time.sleep(0.1)
    return {rank: _main_thread(text) for rank, text in before.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # not yet there, or removed by another host
        return ""


def _main_thread(text: str) -> tuple[str, ...]:
    """The frames of the thread that was there first, which faulthandler writes last."""
    _, _, last = text.rpartition("(most recent call first):\n")
    return tuple(line for line in last.splitlines() if _FRAME.fullmatch(line))


def standing(stacks: Mapping[int, tuple[str, ...]]) -> str:
    """Where all ranks are, in words; those first that the others may be waiting for.

    >>> standing({0: ('  File "/torch/distributed/c.py", line 5 in barrier',), 1: ('  File "/a/b.py", line 7 in f',)})
    'rank 1 in f (b.py:7), rank 0 waiting in barrier (c.py:5)'
    """
    places: dict[tuple[int, str], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(_place(stack), []).append(rank)
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {words}"
        for (_, words), ranks in sorted(places.items())
    )


def _place(stack: tuple[str, ...]) -> tuple[int, str]:
    """How surely the others are not being waited for here, and the place in words."""
    innermost = _FRAME.fullmatch(stack[0]) if stack else None
    if innermost is None:
        return 0, "not answering (stopped or exiting)"
    file, words = innermost["file"], f"{innermost['function']} ({Path(innermost['file']).name}:{innermost['line']})"
    if any(place in file for place in _COLLECTIVES):
        return 2, f"waiting in {words}"
    if file.endswith(_BACKWARD):  # torch's own code, which waits there for DDP's all-reduces
        return 1, "in backward or waiting for its collective"
    return 0, f"in {words}"


_TAIL_LINES, _LEAST_LINES = 30, 8
POLL_S = 0.1
"""How often ranks are looked after: rarely enough to leave them the cores."""
_ROOM_BYTES = 2**20
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def worker_arguments(job: Job, folder: Path, worker: str = "refshard.measure.worker") -> tuple[str, ...]:
    """What follows the Python interpreter on a rank's command line. Its parent must be this process."""
    return ("-m", worker, job.program, str(folder), str(os.getpid()))


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


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: its exit code, or minus the signal that ended it, and the last lines that it wrote.

    ``out_of_memory`` says that the kernel killed it for want of memory. ``stack`` is where it stood when its time was
    over, innermost frame first.
    """

    rank: int
    exit_code: int
    out_of_memory: bool = False
    log_tail: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


class Ranks(ABC):
    """Ranks that were started."""

    @abstractmethod
    def poll(self) -> tuple[RankEnd, ...] | None:
        """How they ended, in the order of their end; None while they run. When one fails, the others are ended."""

    @abstractmethod
    def ask(self) -> None:
        """Ask those that run where they stand, before they are ended for their time is over."""

    @abstractmethod
    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        """End with this signal those that run, and return how all ended."""


class RankLauncher(Launcher):
    """The course of a launch: start the ranks, watch them, end them. Launchers differ in where ranks start."""

    @final
    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`.

        Ends the ranks when one fails, at the job's time limit, and when a signal was noted: then the outcome that is
        returned means nothing, and the end of ``interruption`` raises.
        """
        shown, progress = "", folder / PROGRESS_FILE
        with Interruption() as interruption, self.start(job, folder) as ranks:
            deadline = time.monotonic() + job.time_limit_s
            while (ends := ranks.poll()) is None:
                if interruption.received:
                    ranks.end(signal.SIGTERM)
                    return LaunchOutcome()
                if time.monotonic() > deadline:
                    ranks.ask()
                    return timed_out(ranks.end(signal.SIGKILL))
                if progress.exists() and (text := progress.read_text()) != shown:
                    shown = text
                    on_progress(text)
                time.sleep(POLL_S)
            return launch_of(ends, folder)

    @abstractmethod
    def start(self, job: Job, folder: Path) -> AbstractContextManager[Ranks]:
        """Start the ranks, which work in ``folder``; none of them outlives the context."""


@contextmanager
def started(
    program: str,
    arguments: Sequence[tuple[str, ...]],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    logs: Path,
    first_rank: int = 0,
) -> Iterator[Ranks]:
    """Processes of this one, a rank each from ``first_rank`` on; none that works in ``folder`` outlives the context."""
    kills_before = out_of_memory_kills()
    with _quiet_elastic(), _no_leftovers(folder):
        with _no_handlers_of_elastic():
            processes = start_processes(
                name="rank",
                entrypoint=program,
                args=dict(enumerate(arguments)),
                envs={index: dict(environment) for index, environment in enumerate(environments)},
                logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
            )
            _close_logs(processes)
        yield _Processes(processes, folder, logs, first_rank, kills_before)


class _Processes(Ranks):
    """Children of this process."""

    def __init__(self, processes: PContext, folder: Path, logs: Path, first_rank: int, kills_before: int) -> None:
        self._processes, self._folder, self._logs, self._first_rank = processes, folder, logs, first_rank
        self._kills_before = kills_before
        self._stacks: dict[int, tuple[str, ...]] = {}

    def poll(self) -> tuple[RankEnd, ...] | None:
        result = self._processes.wait(timeout=0)
        if result is None:
            return None
        failed = {index: failure.exitcode for index, failure in result.failures.items()}
        exit_codes = {**failed, **{index: 0 for index in self._processes.pids() if index not in failed}}
        killed = out_of_memory_kills() > self._kills_before
        return tuple(
            RankEnd(
                rank=self._first_rank + index,
                exit_code=exit_code,
                out_of_memory=killed and exit_code == -signal.SIGKILL,
                log_tail=log_tail(self._logs, index),
                stack=self._stacks.get(self._first_rank + index, ()),
            )
            for index, exit_code in exit_codes.items()
        )

    def ask(self) -> None:
        pids = {self._first_rank + index: pid for index, pid in self._processes.pids().items()}
        self._stacks = ask_for_stacks(children(pids), self._folder)

    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        self._processes.close(number)
        return self.poll() or ()


def children(pids: Mapping[int, int]) -> dict[int, int]:
    """Those of ``pids``, by rank, that are processes of this one; the kernel gives the number of an ended one anew."""
    own = {child.pid for child in psutil.Process().children()}
    return {rank: pid for rank, pid in pids.items() if pid in own}


def timed_out(ends: Sequence[RankEnd]) -> LaunchOutcome:
    """A launch whose time was over, and where its ranks stood then, as far as they were asked."""
    ends = sorted(ends, key=lambda end: end.rank)
    stacks = {end.rank: end.stack for end in ends if end.exit_code}  # one that ended well stands nowhere
    return LaunchOutcome(
        timed_out=True, error=standing(stacks) if any(stacks.values()) else None, log_tail=_tails(ends)
    )


def launch_of(ends: Sequence[RankEnd], folder: Path) -> LaunchOutcome:
    """What the ends of ranks, in their order, say of their launch in ``folder``."""
    failed = {end.rank: end for end in ends if end.exit_code}
    if not failed:
        return LaunchOutcome()
    killed = {rank: end for rank, end in failed.items() if end.out_of_memory}  # the kernel's choice draws the others
    rank, exit_code = first_to_fail({rank: end.exit_code for rank, end in (killed or failed).items()})
    cause = f"signal {-exit_code} ({signal.Signals(-exit_code).name})" if exit_code < 0 else f"exit status {exit_code}"
    if (free := shutil.disk_usage(folder).free) < _ROOM_BYTES:  # a rank can then neither leave a result nor say why
        cause += f"; the disk of {folder} is full ({free} bytes are free)"
    return LaunchOutcome(
        out_of_memory=failed[rank].out_of_memory,
        failed_rank=rank,
        error=f"rank {rank} ended with {cause}",
        log_tail=_tails([failed.pop(rank), *failed.values()]),
    )


def first_to_fail(exit_codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the failure that drew the others after it; ``exit_codes`` in the order of their end.

    A rank that a signal ended is it, since the others only lost their peer; unless elastic itself sent the signal, to
    end the rest.

    >>> first_to_fail({1: 1, 0: -9})
    (0, -9)
    >>> first_to_fail({1: 1, 0: -15})
    (1, 1)
    >>> first_to_fail({1: -9, 0: -6})
    (1, -9)
    """
    killed = [(rank, code) for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    return next(iter(killed or exit_codes.items()))


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
def _no_handlers_of_elastic() -> Iterator[None]:
    """Elastic installs handlers that raise, and leaves them there, for the signals that this variable names: none."""
    before = os.environ.get(_HANDLED)
    os.environ[_HANDLED] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HANDLED]
        else:
            os.environ[_HANDLED] = before


def _close_logs(processes: PContext) -> None:
    """Each rank writes its logs through handles of its own; elastic closes its own only of ranks that it ends."""
    assert isinstance(processes, SubprocessContext)
    for handler in processes.subprocess_handlers.values():
        for log in (handler._stdout, handler._stderr):
            if log is not None:
                log.close()


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs every failure at length through many loggers; the record holds what a reader needs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def out_of_memory_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _tails(ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """The last lines of each rank, and the innermost frames of its stack where it was asked; headed by the rank's
    number where several have any, which then share the space.
    """
    share = max(_TAIL_LINES // max(len(ends), 1), _LEAST_LINES)
    parts = {f"rank {end.rank} wrote:": end.log_tail[-share:] for end in ends}
    parts |= {f"rank {end.rank}, most recent call first:": end.stack[:share] for end in ends}
    parts = {head: lines for head, lines in parts.items() if lines}
    if len(parts) == 1 and not any(end.stack for end in ends):
        return next(iter(parts.values()))
    return tuple(line for head, lines in parts.items() for line in (head, *lines))


def log_tail(logs: Path, rank: int) -> tuple[str, ...]:
    """The last lines that a rank wrote, to its standard output and then to its standard error."""
    lines: list[str] = []
    for stream in ("stdout", "stderr"):
        for path in sorted(logs.glob(f"**/{rank}/{stream}.log")):
            lines += path.read_text(errors="replace").splitlines()
    return tuple(lines[-_TAIL_LINES:])
