"""What every launcher shares: processes that are started, watched and ended, and what their end tells."""

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes

from refshard.harness.interruption import Interruption
from refshard.harness.launchers.base import Job, Launch
from refshard.harness.launchers.stacks import ask_for_stacks, standing
from refshard.harness.rank import PROGRESS_FILE

_TAIL_LINES, _LEAST_LINES = 30, 8
_POLL_S = 0.1
_ROOM_BYTES = 2**20
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"


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
        with _no_handlers_of_elastic():
            processes = start_processes(
                name="rank",
                entrypoint=program,
                args=dict(enumerate(arguments)),
                envs={rank: dict(environment) for rank, environment in enumerate(environments)},
                logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
            )
        failures, stacks = _watch(processes, job.time_limit_s, folder, on_progress, interruption)
    if stacks:
        return Launch(timed_out=True, error=standing(stacks), log_tail=_tails(logs, tuple(stacks), stacks))
    if not failures:
        return Launch()
    rank, exit_code = first_to_fail(failures)
    return Launch(
        out_of_memory=exit_code == -signal.SIGKILL and _out_of_memory_kills() > kills_before,
        failed_rank=rank,
        error=f"rank {rank} ended with {_cause(exit_code)}{_want_of_room(folder)}",
        log_tail=_tails(logs, (rank, *(other for other in failures if other != rank))),
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
    folder: Path,
    on_progress: Callable[[str], None],
    interruption: Interruption,
) -> tuple[dict[int, int], dict[int, tuple[str, ...]]]:
    """Wait for the end: exit codes other than 0 by rank, in the order of their end; and if time ran out, where each
    rank stood then.
    """
    deadline = time.monotonic() + limit_s
    progress, shown = folder / PROGRESS_FILE, ""
    while (result := processes.wait(timeout=0)) is None:
        if interruption.received:
            processes.close(signal.SIGTERM)
            return {}, {}
        if time.monotonic() > deadline:
            stacks = ask_for_stacks(processes.pids(), folder)
            processes.close(signal.SIGKILL)
            return {}, stacks
        if progress.exists() and (text := progress.read_text()) != shown:
            shown = text
            on_progress(text)
        time.sleep(_POLL_S)
    return {rank: failure.exitcode for rank, failure in result.failures.items()}, {}


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


def _want_of_room(folder: Path) -> str:
    """A rank on a full disk can neither leave a result nor say why; this can."""
    free = shutil.disk_usage(folder).free
    return f"; the disk of {folder} is full ({free} bytes are free)" if free < _ROOM_BYTES else ""


def _out_of_memory_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _tails(logs: Path, ranks: Sequence[int], stacks: Mapping[int, tuple[str, ...]] | None = None) -> tuple[str, ...]:
    """The last lines of each of ``ranks`` and, if given, the innermost frames of its stack; headed by the rank's number
    where several have any, which then share the space.
    """
    share = max(_TAIL_LINES // len(ranks), _LEAST_LINES)
    parts = {f"rank {rank} wrote:": _log_tail(logs, rank, share) for rank in ranks}
    parts |= {f"rank {rank}, most recent call first:": stack[:share] for rank, stack in (stacks or {}).items()}
    parts = {head: lines for head, lines in parts.items() if lines}
    if len(parts) == 1 and not stacks:
        return next(iter(parts.values()))
    return tuple(line for head, lines in parts.items() for line in (head, *lines))


def _log_tail(logs: Path, rank: int, most: int) -> tuple[str, ...]:
    lines: list[str] = []
    for stream in ("stdout", "stderr"):
        for path in sorted(logs.glob(f"**/{rank}/{stream}.log")):
            lines += path.read_text(errors="replace").splitlines()
    return tuple(lines[-most:])
