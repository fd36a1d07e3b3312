"""Ranks that the user's own torchrun started, on one host or many: each starts a rank of every job, as rank 0 says.

Every process of torchrun runs the same command of refshard. Rank 0 is the harness; the others serve it (``server.py``).
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from refshard.errors import LaunchError, SpecError
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.launchers.elsewhere import environment_elsewhere
from refshard.measure.launchers.machine import check_fits_machine
from refshard.measure.launchers.ranks import POLL_S, RankEnd, Ranks, watch
from refshard.measure.launchers.torchrun.server import Announced, Key, Place, Report, agents_store, start_rank
from refshard.measure.worker import ASK, end_with_parent
from refshard.records import Environment
from refshard.specs.case import CaseSpec

_COME_S = 300.0
_LOST_S = 180.0
"""A server that says nothing for so long is lost. It says nothing while it ends a rank: 5 s to be asked, twice 30 s to
end, and 10 s for what it left; on a busy host that takes longer.
"""
_ANSWER_S = 15.0
"""How long servers may take to ask their ranks where they stand."""
_LEAVE_S = 5.0
_LOOK_S = 1.0


class TorchrunLauncher(Launcher):
    """Rank 0. Use it as a context: on entry the other ranks have come, and at the end they are sent home."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._others = range(1, place.world_size)
        self._jobs = 0
        self._dismissed = False

    def __enter__(self) -> "TorchrunLauncher":
        end_with_parent(os.getppid(), signal.SIGTERM)
        self._agents = agents_store()
        self._store = _open_store(self._place)
        self._agents.set(Key.PORT, str(self._store.port))
        for rank in self._others:
            try:
                self._store.wait([Key.beat(rank)], timedelta(seconds=_COME_S))
            except DistError:
                raise LaunchError(
                    f"rank {rank} of torchrun did not connect in {_COME_S:g} s; run the same command on all nodes"
                ) from None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._dismissed:
            self.dismiss(well=False)

    def dismiss(self, *, well: bool) -> None:
        """Send the other ranks home. They end as this process will: a host where all ended well waits for the others,
        which torchrun lets a host that failed not tell.
        """
        self._dismissed = True
        self._store.set(Key.job(self._jobs), msgspec.json.encode(well).decode())
        gone, deadline = [Key.gone(rank) for rank in self._others], time.monotonic() + _LEAVE_S
        while gone and not self._store.check(gone) and time.monotonic() < deadline:  # some may be lost
            time.sleep(POLL_S)

    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`.

        Raises:
            LaunchError: a rank of torchrun is lost, or does not see the folder.
        """
        meeting = _open_store(self._place)
        announced = Announced(job=job, folder=str(folder), port=meeting.port)
        number, self._jobs = self._jobs, self._jobs + 1
        with Interruption() as interruption:
            self._store.set(Key.job(number), msgspec.json.encode(announced).decode())
            try:
                with start_rank(announced, self._place) as own:
                    ranks = _Everywhere(own, self._store, number, job.processes)
                    return watch(ranks, job, folder, on_progress, interruption)
            finally:
                self._store.set(Key.call_off(number), str(int(signal.SIGTERM)))

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`. All hosts are of one kind."""
        place = self._place
        if case.processes > place.world_size:
            raise SpecError(
                f"world_size: {case.processes} ranks asked for, torchrun started {place.world_size}; lower it, or "
                "raise torchrun's --nproc-per-node or --nnodes"
            )
        check_fits_machine(case, min(case.processes, place.local_world_size), oversubscribe=oversubscribe)

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`. A rank of every host tells."""
        place = self._place
        hosts = -(-place.world_size // place.local_world_size)
        network = f"{hosts} hosts of {place.local_world_size} ranks (torchrun)" if hosts > 1 else ""
        return environment_elsewhere(self, place.world_size, threads, network, beside, on_progress)


class _Everywhere(Ranks):
    """Rank 0, which is a child of this process, and the ranks of the servers."""

    def __init__(self, own: Ranks, store: Store, number: int, processes: int) -> None:
        self._own, self._store, self._number = own, store, number
        self._running = set(range(processes))
        self._ends: list[RankEnd] = []
        self._reports = 0
        self._heard = {rank: (b"", time.monotonic()) for rank in range(1, processes)}
        self._looked = time.monotonic()

    def poll(self) -> tuple[RankEnd, ...] | None:
        """See :class:`Ranks`."""
        self._collect(self._own.poll() if 0 in self._running else None)
        if any(end.exit_code for end in self._ends):
            return self.end(signal.SIGTERM)
        return None if self._running else tuple(self._ends)

    def ask(self) -> None:
        """See :class:`Ranks`. None is ended before all were asked: a rank that lost its peer stands elsewhere."""
        self._store.set(Key.call_off(self._number), str(int(ASK)))
        if 0 in self._running:
            self._own.ask()
        asked = [Key.asked(self._number, rank) for rank in self._running - {0}]
        deadline = time.monotonic() + _ANSWER_S
        while asked and not self._store.check(asked) and time.monotonic() < deadline:  # some may be lost
            time.sleep(POLL_S)

    def end(self, number: signal.Signals) -> tuple[RankEnd, ...]:
        """See :class:`Ranks`."""
        self._store.set(Key.call_off(self._number), str(int(number)))
        self._collect(self._own.end(number) if 0 in self._running else None)
        while self._running:
            time.sleep(POLL_S)
            self._collect(None)
        return tuple(self._ends)

    def _collect(self, own: tuple[RankEnd, ...] | None) -> None:
        lost = self._lost()  # before its last report is looked for
        ends = list(own or ())
        if own is not None:
            self._running.discard(0)  # even if it never started, for a signal
        while self._store.check([Key.end(self._number, self._reports)]):
            report = msgspec.json.decode(self._store.get(Key.end(self._number, self._reports)), type=Report)
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
        """Servers that left, or say nothing any more, of those whose ranks run."""
        now, others = time.monotonic(), sorted(self._running - {0})
        if now < self._looked + _LOOK_S or not others:
            return set()
        self._looked, lost = now, set()
        for rank, beat in zip(others, self._store.multi_get([Key.beat(rank) for rank in others])):
            before, since = self._heard[rank]
            if beat != before:
                self._heard[rank] = (beat, now)
            elif now > since + _LOST_S or self._store.check([Key.gone(rank)]):
                lost.add(rank)
        return lost


def _open_store(place: Place) -> TCPStore:
    return TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
