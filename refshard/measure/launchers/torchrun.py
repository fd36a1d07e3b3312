"""Ranks that the user's own torchrun started, on one host or many.

Every process of torchrun runs the same command of refshard. Rank 0 measures; the others serve it: each starts its rank
of every program that rank 0 announces. They meet at torchrun's own store, where rank 0 leaves the port of a store that
it holds itself: that ends with rank 0, however it ends, and so no server outlives it. The ranks of each program meet at
one more store of rank 0, on a port that the kernel chose.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from refshard.errors import LaunchError, SpecError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import (
    POLL_S,
    Launcher,
    LaunchOutcome,
    Program,
    RankEnd,
    Ranks,
    check_fits_machine,
    environment_elsewhere,
    rank_environment,
    started,
    worker_arguments,
)
from refshard.measure.worker import ASK, STORE_IS_HELD, end_with_parent, request_file
from refshard.records import Environment
from refshard.specs.case import Case

_BEAT_S = 1.0
_IDLE_S = 0.5
_SEEN_S = 30.0
"""How long another host's new folder may take to appear."""


class Place(msgspec.Struct, frozen=True, kw_only=True, rename="upper"):
    """Where torchrun put this process, by its variables."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str = msgspec.field(name="MASTER_ADDR")


def place_of(variables: Mapping[str, str]) -> Place:
    """Read torchrun's variables.

    Raises:
        SpecError: torchrun did not start this process.
    """
    if "TORCHELASTIC_RUN_ID" not in variables:
        command = shlex.join(["refshard", *sys.argv[1:]])
        raise SpecError(
            "launcher 'torchrun' needs torchrun, which did not start this process; run: torchrun "
            f"--nproc-per-node G --no-python {command}"
        )
    return msgspec.convert(dict(variables), Place, strict=False)


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 announces; ``port`` is that of the store where the program's ranks meet."""

    program: Program
    folder: str
    port: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a server's rank ended; ``trouble`` is why it could not start."""

    end: RankEnd
    trouble: str = ""


PORT = "port"
"""Where the port of rank 0's store lies in torchrun's. In rank 0's store lie, for program N and each rank:

- ``job/N``: the program, announced; after the last, whether all went well
- ``job/N/call_off``: the signal for its ranks: to end them, or before that, to ask them for their stacks
- ``job/N/asked/RANK``: set when a server has asked its rank
- ``job/N/ends``, ``job/N/end/INDEX``: how many servers have reported their rank's end, and their reports in that order
- ``beat/RANK``, ``gone/RANK``: changed by a server as long as it lives, and set when it leaves
"""


def agents_store() -> Store:
    """Torchrun's own store. A restart by torchrun finds nothing there of what was before."""
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"refshard/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def start_rank(announced: Announced, place: Place) -> AbstractContextManager[Ranks]:
    """Start this process's rank of a program, which may have fewer ranks than torchrun."""
    folder, processes = Path(announced.folder), announced.program.processes
    environment = rank_environment(
        place.rank,
        place.local_rank,
        world_size=processes,
        local_world_size=min(place.local_world_size, processes - (place.rank - place.local_rank)),
        address=place.address,
        port=announced.port,
    )
    own = (worker_arguments(announced.program, folder), {**environment, **STORE_IS_HELD})
    return started(sys.executable, [own], folder, first_rank=place.rank)


def serve(place: Place) -> bool:
    """Start this process's rank of every program, until rank 0 or torchrun ends; return whether all went well."""
    end_with_parent(os.getppid(), signal.SIGTERM)
    with suppress(KeyboardInterrupt, DistError), Interruption() as interruption:
        agents = agents_store()
        while not agents.check([PORT]):
            if interruption.received:
                return False
            time.sleep(_IDLE_S)
        return Server(place, TCPStore(place.address, int(agents.get(PORT))), interruption).serve()
    return False


class Server:
    """Serves rank 0; ``interruption`` notes signals to this process."""

    def __init__(self, place: Place, store: Store, interruption: Interruption) -> None:
        self._place, self._store, self._interruption = place, store, interruption
        self._last_beat = float("-inf")

    def serve(self) -> bool:
        """See :func:`serve`."""
        number = 0
        while isinstance(announced := self._next(number), Announced):
            if self._place.rank < announced.program.processes:
                self._report(number, self._run(number, announced))
            number += 1
        self._store.set(f"gone/{self._place.rank}", "")
        return announced

    def _next(self, number: int) -> Announced | bool:
        while not self._store.check([f"job/{number}"]):
            if self._interruption.received:
                return False
            self._beat()
            time.sleep(_IDLE_S)
        return msgspec.json.decode(self._store.get(f"job/{number}"), type=Announced | bool)

    def _run(self, number: int, announced: Announced) -> Report:
        rank = self._place.rank
        called_off = Report(end=RankEnd(rank=rank, exit_code=-signal.SIGTERM))
        try:
            trouble = self._unseen(number, request_file(Path(announced.folder), announced.program.name))
            if trouble is not None:
                return msgspec.structs.replace(called_off, trouble=trouble)
            with start_rank(announced, self._place) as ranks:
                ends = self._watch(number, ranks)
        except OSError as error:  # of this process: what a rank meets is its result
            trouble = (
                f"rank {rank} on {os.uname().nodename} cannot be started ({error}); correct that and --resume the run"
            )
            return msgspec.structs.replace(called_off, trouble=trouble)
        return Report(end=ends[0]) if ends else called_off

    def _unseen(self, number: int, request: Path) -> str | None:
        """Wait for the request. Why the rank cannot start, if so; empty if it was called off."""
        deadline = time.monotonic() + _SEEN_S
        while not request.exists():
            if self._signal(number) is not None:
                return ""
            if time.monotonic() > deadline:
                return (
                    f"rank {self._place.rank} on {os.uname().nodename} does not see {request}; set --out to a folder "
                    "that all nodes share"
                )
            self._beat()
            time.sleep(POLL_S)
        return None

    def _watch(self, number: int, ranks: Ranks) -> tuple[RankEnd, ...]:
        """How the rank ended, by itself or by a signal."""
        requested = False
        while (ends := ranks.poll()) is None:
            number_of_signal = self._signal(number)
            if number_of_signal == ASK and not requested:
                requested = True
                ranks.ask()
                self._store.set(f"job/{number}/asked/{self._place.rank}", "")
            elif number_of_signal is not None and number_of_signal != ASK:
                return ranks.end(number_of_signal)
            self._beat()
            time.sleep(POLL_S)
        return ends

    def _signal(self, number: int) -> signal.Signals | None:
        """The signal for the rank, if there is one."""
        if self._interruption.received:
            return signal.SIGTERM
        if not self._store.check([f"job/{number}/call_off"]):
            return None
        return signal.Signals(int(self._store.get(f"job/{number}/call_off")))

    def _report(self, number: int, report: Report) -> None:
        self._store.set(f"job/{number}/asked/{self._place.rank}", "")  # no stack to wait for
        index = self._store.add(f"job/{number}/ends", 1) - 1
        self._store.set(f"job/{number}/end/{index}", msgspec.json.encode(report).decode())

    def _beat(self) -> None:
        now = time.monotonic()
        if now > self._last_beat + _BEAT_S:
            self._store.set(f"beat/{self._place.rank}", str(now))
            self._last_beat = now


_COME_S = 300.0
_LOST_S = 180.0
"""A server that is silent for so long is lost. It is silent while it ends a rank: 5 s for the stack, twice 30 s to end,
and 10 s for leftovers; longer on a busy host.
"""
_ANSWER_S = 15.0
"""How long servers may take to ask their ranks for stacks."""
_LEAVE_S = 5.0
_LOOK_S = 1.0


class TorchrunLauncher(Launcher):
    """Rank 0. Use it as a context: on entry it waits for the other ranks, and at the end it dismisses them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._others = range(1, place.world_size)
        self._jobs = 0
        self._dismissed = False

    def __enter__(self) -> "TorchrunLauncher":
        end_with_parent(os.getppid(), signal.SIGTERM)
        self._agents = agents_store()
        self._store = _open_store(self._place)
        self._agents.set(PORT, str(self._store.port))
        for rank in self._others:
            try:
                self._store.wait([f"beat/{rank}"], timedelta(seconds=_COME_S))
            except DistError:
                raise LaunchError(
                    f"rank {rank} of torchrun did not connect in {_COME_S:g} s; run the same command on all nodes"
                ) from None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._dismissed:
            self.dismiss(well=False)

    def dismiss(self, *, well: bool) -> None:
        """Dismiss the other ranks. They exit like this process: torchrun on a host that ended well waits for the
        others, and a host that failed does not tell them.
        """
        self._dismissed = True
        self._store.set(f"job/{self._jobs}", msgspec.json.encode(well).decode())
        gone, deadline = [f"gone/{rank}" for rank in self._others], time.monotonic() + _LEAVE_S
        while gone and not self._store.check(gone) and time.monotonic() < deadline:  # some may be lost
            time.sleep(POLL_S)

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        """See :meth:`Launcher.start`.

        Raises:
            LaunchError: a rank of torchrun is lost, or does not see the folder.
        """
        meeting = _open_store(self._place)
        announced = Announced(program=program, folder=str(folder), port=meeting.port)
        number, self._jobs = self._jobs, self._jobs + 1
        self._store.set(f"job/{number}", msgspec.json.encode(announced).decode())
        try:
            with start_rank(announced, self._place) as own:
                yield _Everywhere(own, self._store, number, program.processes)
        finally:
            self._store.set(f"job/{number}/call_off", str(int(signal.SIGTERM)))

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`. All hosts are of one kind."""
        place = self._place
        if case.processes > place.world_size:
            raise SpecError(
                f"gpus: {case.processes} ranks asked for, torchrun started {place.world_size}; lower it, or "
                "raise torchrun's --nproc-per-node or --nnodes"
            )
        check_fits_machine(case, min(case.processes, place.local_world_size), oversubscribe=oversubscribe)

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`. A rank of every host tells."""
        place = self._place
        hosts = -(-place.world_size // place.local_world_size)
        network = f"{hosts} hosts of {place.local_world_size} ranks (torchrun)" if hosts > 1 else ""
        return environment_elsewhere(self, place.world_size, threads, network, run, on_progress)


class _Everywhere(Ranks):
    """Rank 0, a child of this process, and the ranks of the servers."""

    def __init__(self, own: Ranks, store: Store, number: int, processes: int) -> None:
        self._own, self._store, self._number = own, store, number
        self._running = set(range(processes))
        self._ends: list[RankEnd] = []
        self._reports = 0
        self._heard = {rank: (b"", time.monotonic()) for rank in range(1, processes)}
        self._looked = time.monotonic()

    def poll(self) -> tuple[RankEnd, ...] | None:
        self._collect(self._own.poll() if 0 in self._running else None)
        if any(end.exit_code for end in self._ends):
            return self.end(signal.SIGTERM)
        return None if self._running else tuple(self._ends)

    def outcome(self, ends: tuple[RankEnd, ...]) -> LaunchOutcome:
        return self._own.outcome(ends)

    @property
    def ran_s(self) -> float:
        return self._own.ran_s

    def progress(self) -> str:
        return self._own.progress()

    def ask(self) -> None:
        """See :class:`Ranks`. All write stacks before any is ended: a rank without its peer shows another."""
        self._store.set(f"job/{self._number}/call_off", str(int(ASK)))
        if 0 in self._running:
            self._own.ask()
        awaited = [f"job/{self._number}/asked/{rank}" for rank in self._running - {0}]
        deadline = time.monotonic() + _ANSWER_S
        while awaited and not self._store.check(awaited) and time.monotonic() < deadline:  # some may be lost
            time.sleep(POLL_S)

    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        self._store.set(f"job/{self._number}/call_off", str(int(number)))
        self._collect(self._own.end(number) if 0 in self._running else None)
        while self._running:
            time.sleep(POLL_S)
            self._collect(None)
        return tuple(self._ends)

    def _collect(self, own: tuple[RankEnd, ...] | None) -> None:
        lost = self._lost()  # before its last report is looked for
        ends = list(own or ())
        if own is not None:
            self._running.discard(0)  # even if a signal kept it from starting
        while self._store.check([f"job/{self._number}/end/{self._reports}"]):
            report = msgspec.json.decode(self._store.get(f"job/{self._number}/end/{self._reports}"), type=Report)
            self._reports += 1
            if report.trouble:
                raise LaunchError(report.trouble)
            ends.append(report.end)
        self._running -= {end.rank for end in ends}
        self._ends += ends
        if lost & self._running:
            rank = min(lost & self._running)
            raise LaunchError(f"rank {rank} of torchrun exited; check torchrun's output and --resume the run")

    def _lost(self) -> set[int]:
        """Servers with running ranks that left, or are silent."""
        now, others = time.monotonic(), sorted(self._running - {0})
        if now < self._looked + _LOOK_S or not others:
            return set()
        self._looked, lost = now, set()
        for rank, beat in zip(others, self._store.multi_get([f"beat/{rank}" for rank in others])):
            before, since = self._heard[rank]
            if beat != before:
                self._heard[rank] = (beat, now)
            elif now > since + _LOST_S or self._store.check([f"gone/{rank}"]):
                lost.add(rank)
        return lost


def _open_store(place: Place) -> TCPStore:
    return TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
