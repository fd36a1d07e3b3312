"""How ranks are launched: start them, watch them, end them. The launchers differ in where ranks start."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

import msgspec
import psutil
import torch

from refshard.errors import LaunchError, SpecError
from refshard.measure.environment import DescribeOptions, described_file, differences
from refshard.measure.flight import flight_file
from refshard.measure.interruption import Interruption
from refshard.measure.worker import ASK, PROGRESS_FILE, request_file, stack_file
from refshard.records import Environment
from refshard.resources import available_cores
from refshard.specs.case import Case

POLL_S = 0.1
"""How often ranks are polled: rarely enough to leave them the cores."""
_DESCRIBE_S = 600.0
_ANSWER_S = 5.0
_END_S = 30.0
"""How long ranks have to end after a signal before they are killed."""
_TAIL_LINES, _LEAST_LINES = 30, 8
_ROOM_BYTES = 2**20
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_COLLECTIVES = ("/torch/distributed/", "/refshard/engine/collectives.py")
_BACKWARD = "/torch/autograd/graph.py"


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """``processes`` ranks of one of the programs in ``measure/worker.py``, which may run for ``time_limit_s``.

    Each has a request in the launch's folder: :func:`refshard.measure.worker.request_file`.
    """

    name: Literal["case", "series", "calibration", "environment", "dryrun"]
    processes: int
    time_limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended.

    ``failed_rank`` is the rank that failed first; ``error`` says how its process ended or, after a timeout, where each
    rank stood. ``log_tail`` holds the last lines that failed ranks wrote, the first failed rank's first; or those of
    all ranks, with their stacks. ``out_of_memory``: the kernel's OOM killer ended it.
    """

    timed_out: bool = False
    out_of_memory: bool = False
    failed_rank: int | None = None
    error: str | None = None
    log_tail: tuple[str, ...] = ()


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: its exit code (minus the signal, if one ended it) and the last lines that it wrote.

    ``out_of_memory``: the kernel's OOM killer ended it. ``stack`` is where it stood at its time limit, innermost frame
    first.
    """

    rank: int
    exit_code: int
    out_of_memory: bool = False
    log_tail: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


class Ranks(ABC):
    """The ranks of one launch."""

    pause_s: ClassVar[float] = POLL_S

    @abstractmethod
    def poll(self) -> tuple[RankEnd, ...] | None:
        """How they ended, in the order of their end; None while they run. When one fails, the others are ended."""

    @abstractmethod
    def outcome(self, ends: tuple[RankEnd, ...]) -> LaunchOutcome:
        """What their ends say of the launch."""

    @abstractmethod
    def ask(self) -> None:
        """Request the stacks of running ranks, before the time limit ends them."""

    @abstractmethod
    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        """End running ranks with this signal, and return how all ended."""

    @property
    @abstractmethod
    def ran_s(self) -> float:
        """Seconds that count towards the time limit."""

    @abstractmethod
    def progress(self) -> str:
        """What rank 0 is doing; empty if unknown."""


class Launcher(ABC):
    """Starts the ranks of a program, waits for them, and leaves no process behind."""

    @final
    def launch(self, program: Program, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """Run ``python -m refshard.measure.worker NAME FOLDER PID`` on all ranks; report progress of rank 0.

        Ends the ranks when one fails, at the time limit, and at a signal: then the outcome returned is meaningless,
        and the end of the :class:`Interruption` raises.

        Raises:
            LaunchError: the ranks cannot be started here.
        """
        shown = ""
        with Interruption() as interruption:
            try:
                with self.start(program, folder) as ranks:
                    while not interruption.received:
                        if (ends := ranks.poll()) is not None:
                            return ranks.outcome(ends)
                        if ranks.ran_s > program.time_limit_s:
                            ranks.ask()
                            return timed_out(ranks.end(signal.SIGKILL))
                        if (text := ranks.progress()) and text != shown:
                            shown = text
                            on_progress(text)
                        time.sleep(ranks.pause_s)
                    ranks.end(signal.SIGTERM)
                    return LaunchOutcome()
            except BaseException as error:
                if interruption.received:  # KeyboardInterrupt replaces the error
                    print(f"refshard: {error}", file=sys.stderr, flush=True)
                raise

    @abstractmethod
    def start(self, program: Program, folder: Path) -> AbstractContextManager[Ranks]:
        """Start the ranks, which work in ``folder``; none outlives the context."""

    @abstractmethod
    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """Refuse a case that does not fit where this launcher starts ranks, as far as that is known before.

        Raises:
            SpecError: there are too few cores (unless ``oversubscribe``), GPUs or processes.
        """

    @abstractmethod
    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        """Describe where ranks run, with the rate of a matrix product on ``threads`` threads.

        If that takes a launch, its folder is next to the run's folder ``run``.

        Raises:
            LaunchError: a rank cannot describe its machine, or the machines differ.
        """


def check_fits_machine(case: Case, processes: int, *, oversubscribe: bool) -> None:
    """Refuse a case if its ``processes`` on this machine would share a GPU or a core.

    Raises:
        SpecError: they are too many; ``oversubscribe`` allows more than there are cores.
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


def environment_elsewhere(
    launcher: Launcher, processes: int, threads: int, network: str, run: Path, on_progress: Callable[[str], None]
) -> Environment:
    """Launch ranks that describe their machines and return rank 0's environment; ``network`` says what joins them.

    Raises:
        LaunchError: a rank cannot, or its machine differs from rank 0's.
    """
    options = DescribeOptions(threads=threads, network=network)
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        parent, prefix = run.absolute().parent, f".{run.name}-environment-"
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            request_file(folder, "environment").write_bytes(msgspec.json.encode(options))
            program = Program(name="environment", processes=processes, time_limit_s=_DESCRIBE_S)
            launch = launcher.launch(program, folder, on_progress)
            if launch.timed_out or launch.error or not described_file(folder, 0).exists():
                cause = f"no answer within {_DESCRIBE_S:g} s" if launch.timed_out else launch.error or "no answer"
                raise LaunchError(
                    f"the ranks could not describe their machines: {cause} ({last_line(launch)}); correct that"
                )
            paths = {rank: described_file(folder, rank) for rank in range(processes)}  # this host may not see all
            found = {r: msgspec.json.decode(p.read_bytes(), type=Environment) for r, p in paths.items() if p.exists()}
    except OSError as error:  # of this process
        raise LaunchError(f"ranks cannot write machine data next to {run} ({error}); fix the cause") from None
    for rank, other in found.items():
        if differing := differences(found[0], other):
            raise LaunchError(
                f"all hosts of a run must be alike: from {found[0].hostname} (rank 0) to {other.hostname} "
                f"(rank {rank}), {'; '.join(differing)}; choose hosts that are alike"
            )
    return msgspec.structs.replace(found[0], argv=("refshard", *sys.argv[1:]))


def last_line(launch: LaunchOutcome) -> str:
    """The last thing that the ranks wrote."""
    return next((line.strip() for line in reversed(launch.log_tail) if line.strip()), "it wrote nothing")


def worker_arguments(program: Program, folder: Path, worker: str = "refshard.measure.worker") -> tuple[str, ...]:
    """What follows the Python interpreter on a rank's command line. Its parent must be this process."""
    return ("-m", worker, program.name, str(folder), str(os.getpid()))


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


@contextmanager
def started(
    command: str, ranks: Sequence[tuple[tuple[str, ...], Mapping[str, str]]], folder: Path, first_rank: int = 0
) -> Iterator[Ranks]:
    """Start ``command`` once a rank from ``first_rank`` on, with the arguments and variables of each.

    Each is a session of its own, so that Ctrl-C reaches this process only. At the end, on every path, no child that
    has ``folder`` in its command line is left.
    """
    found = _Processes(folder)
    try:
        for rank, (arguments, variables) in enumerate(ranks, first_rank):
            logs = folder / "logs" / str(rank)
            logs.mkdir(parents=True)
            with ExitStack() as files:
                out, err = (files.enter_context((logs / f"{name}.log").open("wb")) for name in ("stdout", "stderr"))
                found.running[rank] = subprocess.Popen(
                    [command, *arguments], env=os.environ | variables, stdout=out, stderr=err, start_new_session=True
                )
        yield found
    finally:
        left = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if str(folder) in process.cmdline():
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=10)
        for child in found.running.values():
            child.poll()  # so that it is no zombie


class _Processes(Ranks):
    """Children of this process."""

    def __init__(self, folder: Path) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._folder, self._began, self._kills_before = folder, time.monotonic(), out_of_memory_kills()
        self._ends: list[RankEnd] = []
        self._stacks: dict[int, tuple[str, ...]] = {}

    def poll(self) -> tuple[RankEnd, ...] | None:
        if self._collect():
            return self.end(signal.SIGTERM)
        return None if self.running else tuple(self._ends)

    def _collect(self) -> bool:
        """Note which ranks have ended; whether any failed."""
        killed = out_of_memory_kills() > self._kills_before
        for rank, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[rank]
                self._ends.append(
                    RankEnd(
                        rank=rank,
                        exit_code=code,
                        out_of_memory=killed and code == -signal.SIGKILL,
                        log_tail=log_tail(self._folder, rank),
                        stack=self._stacks.get(rank, ()),
                    )
                )
        return any(end.exit_code for end in self._ends)

    def outcome(self, ends: tuple[RankEnd, ...]) -> LaunchOutcome:
        return launch_of(ends, self._folder)

    def ask(self) -> None:
        self._stacks = ask_for_stacks({rank: process.pid for rank, process in self.running.items()}, self._folder)

    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        for each in (number, signal.SIGKILL):
            for process in self.running.values():
                with suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, each)
            deadline = time.monotonic() + _END_S
            for process in self.running.values():
                with suppress(subprocess.TimeoutExpired):  # such as a rank in an uninterruptible sleep
                    process.wait(max(deadline - time.monotonic(), 0.0))
            self._collect()
        return tuple(self._ends)

    @property
    def ran_s(self) -> float:
        return time.monotonic() - self._began

    def progress(self) -> str:
        return _text(self._folder / PROGRESS_FILE)


def ask_for_stacks(pids: Mapping[int, int], folder: Path) -> dict[int, tuple[str, ...]]:
    """Each rank's stack of its main thread, innermost frame first; empty if a rank does not answer.

    The signal ends a rank that cannot write its stack yet: ask only ranks that are to be ended.
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
    """The stacks that ``ranks`` write on request; see :func:`ask_for_stacks`."""
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
        time.sleep(POLL_S)
    # faulthandler writes the main thread last.
    main = {rank: text.rpartition("(most recent call first):\n")[2].splitlines() for rank, text in before.items()}
    return {rank: tuple(line for line in lines if _FRAME.fullmatch(line)) for rank, lines in main.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # not there yet, or removed by another host
        return ""


def standing(stacks: Mapping[int, tuple[str, ...]]) -> str:
    """Where all ranks are; first the ranks that the others may be waiting for.

    >>> standing({0: ('  File "/torch/distributed/c.py", line 5 in barrier',), 1: ('  File "/a/b.py", line 7 in f',)})
    'rank 1 in f (b.py:7), rank 0 waiting in barrier (c.py:5)'
    """
    places: dict[tuple[int, str], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(_place(stack), []).append(rank)
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {text}"
        for (_, text), ranks in sorted(places.items())
    )


def _place(stack: tuple[str, ...]) -> tuple[int, str]:
    """The place, after a number that is higher the surer it is that nobody waits for a rank there."""
    innermost = _FRAME.fullmatch(stack[0]) if stack else None
    if innermost is None:
        return 0, "not answering (stopped or exiting)"
    file, text = innermost["file"], f"{innermost['function']} ({Path(innermost['file']).name}:{innermost['line']})"
    if any(place in file for place in _COLLECTIVES):
        return 2, f"waiting in {text}"
    if file.endswith(_BACKWARD):  # torch waits there for DDP's all-reduces
        return 1, "in backward or waiting for its collective"
    return 0, f"in {text}"


def timed_out(ends: Sequence[RankEnd]) -> LaunchOutcome:
    """A launch that reached its time limit, and where its ranks stood, as far as known."""
    ends = sorted(ends, key=lambda end: end.rank)
    stacks = {end.rank: end.stack for end in ends if end.exit_code}  # a rank that ended well stands nowhere
    return LaunchOutcome(
        timed_out=True, error=standing(stacks) if any(stacks.values()) else None, log_tail=_tails(ends)
    )


def launch_of(ends: Sequence[RankEnd], folder: Path) -> LaunchOutcome:
    """The outcome of a launch in ``folder``; its ranks ended in this order."""
    failed = {end.rank: end for end in ends if end.exit_code}
    if not failed:
        return LaunchOutcome()
    killed = {rank: end for rank, end in failed.items() if end.out_of_memory}  # the others then only lost a peer
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
    """Rank and exit code of the failure that caused the others; ``exit_codes`` are in the order of the ends.

    It is a rank that a signal ended, since the others only lost their peer; but not by SIGTERM, which ends the rest.

    >>> first_to_fail({1: 1, 0: -9})
    (0, -9)
    >>> first_to_fail({1: 1, 0: -15})
    (1, 1)
    >>> first_to_fail({1: -9, 0: -6})
    (1, -9)
    """
    killed = [(rank, code) for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    return next(iter(killed or exit_codes.items()))


def out_of_memory_kills() -> int:
    """How many processes the kernel's OOM killer has ended since boot; 0 if unknown."""
    lines = _text(Path("/proc/vmstat")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _tails(ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """The last lines and the innermost frames of each rank, under headings if there are several."""
    share = max(_TAIL_LINES // max(len(ends), 1), _LEAST_LINES)
    parts = {f"rank {end.rank} wrote:": end.log_tail[-share:] for end in ends}
    parts |= {f"rank {end.rank}, most recent call first:": end.stack[:share] for end in ends}
    parts = {head: lines for head, lines in parts.items() if lines}
    if len(parts) == 1 and not any(end.stack for end in ends):
        return next(iter(parts.values()))
    return tuple(line for head, lines in parts.items() for line in (head, *lines))


def log_tail(folder: Path, rank: int) -> tuple[str, ...]:
    """The last lines that a rank of a launch wrote, to its standard output and then to its standard error."""
    logs = [_text(folder / "logs" / str(rank) / f"{stream}.log") for stream in ("stdout", "stderr")]
    return tuple([line for log in logs for line in log.splitlines()][-_TAIL_LINES:])
