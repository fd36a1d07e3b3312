"""Paired rounds: both sides launched one right after the other, in random order, each in fresh processes.

A round's launch takes all cases of one world size through the same processes, since starting them costs more than a
case does; both sides take them in the same order, which is another one in each round. Each side is a run of its own in
a folder of its own, which every other command reads.
"""

import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from refshard.analysis.gate import LogRatios
from refshard.measure.assemble import assemble
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.proof import Peers
from refshard.measure.rank import SERIES_FILE, rank_file, series_folder
from refshard.measure.run import Observer, blank_record, fresh_folder, launch_case, launch_name, launching
from refshard.measure.store import RunWriter
from refshard.measure.timing import RankResult
from refshard.records import Environment, LaunchRecord, RunRecord, timestamp
from refshard.specs.case import Case
from refshard.specs.suite import SuiteSpec
from refshard.version import __version__


def launch_series(
    cases: Sequence[Case],
    round_: int,
    header: RunRecord,
    folder: Path,
    launcher: Launcher,
    on_progress: Callable[[str], None],
    peers_of: Callable[[Case], Peers],
) -> list[LaunchRecord]:
    """Run cases that are alike (see :func:`kind`) in one launch, and return their records; only records are kept.

    One that does not end well is the last: those after it have none.
    """
    assert len({kind(case) for case in cases}) == 1
    assert all(serial(case) for case in cases)
    work = fresh_folder(folder / "cases" / f"series-round{round_}")
    for index in range(len(cases)):
        series_folder(work, index).mkdir()
    (work / SERIES_FILE).write_bytes(msgspec.json.encode(cases))
    started = datetime.now(UTC)
    limit_s = sum(case.protocol.time_limit_s for case in cases)
    job = Job(program="series", processes=cases[0].processes, time_limit_s=limit_s)
    launch = launcher.launch(job, work, on_progress)
    records: list[LaunchRecord] = []
    for index, case in enumerate(cases):
        blank = blank_record(case, round_, header, started)
        own = series_folder(work, index)
        records.append(assemble(blank, launch, own, header.environment, peers_of(case)))
        if records[-1].state != "ok" and launch != LaunchOutcome():
            break
    shutil.rmtree(work)
    return records


def serial(case: Case) -> bool:
    """Whether a case can be part of a series: it is measured, and needs no limit of its own on its processes."""
    return case.protocol.fidelity == "measured" and case.protocol.memory_limit_gib is None


def kind(case: Case) -> tuple[int, int, str, bool]:
    """What the processes of a series have in common: the last is NCCL's policy for symmetric memory."""
    return case.job.gpus, case.protocol.threads_per_rank, case.protocol.device, case.job.comm_memory == "symmetric"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: what launches it, and in which environment; with ``strategy``, every case's."""

    name: str
    launcher: Launcher
    environment: Environment
    strategy: str | None = None

    def case(self, case: Case) -> Case:
        """What this side launches for a case of the suite; the reference stays what it is."""
        return case if self.strategy is None or case == case.reference() else of_strategy(case, self.strategy)


def of_strategy(case: Case, strategy: str) -> Case:
    """The same case under another strategy."""
    return case.changed(strategy=strategy)


@dataclass(slots=True)
class _Held:
    """One side's run so far."""

    side: Side
    header: RunRecord
    writer: RunWriter
    records: list[LaunchRecord] = field(default_factory=list)

    def latest_ok(self, case: Case) -> LaunchRecord | None:
        return next((r for r in reversed(self.records) if r.spec_hash == case.hash and r.state == "ok"), None)

    def peers(self, case: Case) -> Peers:
        """What this side's case is held against."""
        return Peers(
            reference=self.latest_ok(case.reference()),
            ddp=self.latest_ok(case.changed(strategy="ddp")) if case.job.gpus > 1 else None,
        )

    def keep(self, record: LaunchRecord) -> None:
        """Write a record, and remember it."""
        self.writer.append(record)
        self.records.append(record)


class PairedRounds:
    """Holds rounds and keeps every record, baseline first. Use it as a context: both runs are closed on every path."""

    def __init__(
        self,
        suite: SuiteSpec,
        folder: Path,
        sides: tuple[Side, Side],
        observer: Observer,
        tell: Callable[[str], None],
        *,
        seed: int | None = None,
    ) -> None:
        """``tell`` is told of each round in a line, ``observer`` of every launch of a single case. Orders are drawn
        anew each time, unless there is a ``seed``.
        """
        self._suite, self._folder, self._sides, self._observer, self._tell = suite, folder, sides, observer, tell
        self._drawn = random.Random(seed)
        self._round = 0
        self._held: list[_Held] = []
        self._open = ExitStack()

    def __enter__(self) -> "PairedRounds":
        for side in self._sides:
            folder = self._folder / side.name
            writer = self._open.enter_context(RunWriter(folder))
            header = RunRecord(
                run_id=f"{self._folder.name}-{side.name}",
                refshard=__version__,
                started_at=timestamp(),
                suite=self._suite,
                environment=side.environment,
                planned=0,
            )
            writer.append(header)
            self._held.append(_Held(side, header, writer))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            for held in self._held:
                held.writer.close(held.header.run_id, interrupted=kind is not None)

    def apart(self, cases: Sequence[Case]) -> None:
        """Launch each case once on each side, in processes of its own: for what is exact, or what others need.

        Raises:
            LaunchError: this process cannot launch it.
        """
        launches = [(case, held) for case in cases for held in self._held]
        for index, (case, held) in enumerate(launches):
            mine = held.side.case(case)
            self._observer.case_started(mine, self._round, index, len(launches))
            with launching(mine.name, self._folder):
                record = launch_case(
                    mine, self._round, held.header, self._folder / held.side.name, held.side.launcher,
                    self._observer.case_progressed, held.peers(mine),
                )  # fmt: skip
            held.keep(record)
            self._observer.case_ended(record)
        self._round += 1

    def hold(self, cases: Sequence[Case], rounds: int) -> None:
        """Hold ``rounds`` more rounds of ``cases``. Which side is first is drawn for every other round; the one after
        it has the other order, so that each side comes first as often.

        Raises:
            LaunchError: this process cannot launch them.
        """
        if not cases:
            return
        started, order = time.monotonic(), self._held
        for index in range(rounds):
            order = order[::-1] if index % 2 else self._drawn.sample(self._held, len(self._held))
            for alike in sorted({kind(case) for case in cases}):
                together = [case for case in cases if kind(case) == alike]
                self._hold_one(self._drawn.sample(together, len(together)), order)
            self._round += 1
            left_s = (time.monotonic() - started) / (index + 1) * (rounds - index - 1)
            self._tell(f"round {index + 1}/{rounds} of {len(cases)} cases; {left_s / 60:.0f} min left")

    def _hold_one(self, cases: Sequence[Case], order: Sequence[_Held]) -> None:
        for held in order:
            with launching(f"a round of {len(cases)} cases", self._folder):
                records = launch_series(
                    [held.side.case(case) for case in cases], self._round, held.header, self._folder / held.side.name,
                    held.side.launcher, self._observer.case_progressed, held.peers,
                )  # fmt: skip
            for record in records:
                held.keep(record)

    def failures(self, case: Case, first_round: int) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
        """Records of each side from ``first_round`` on that did not end ok, baseline first."""
        before, after = ([r for r in side if r.state != "ok"] for side in self._since(case, first_round))
        return before, after

    def _since(self, case: Case, first_round: int) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
        before, after = (
            [r for r in held.records if r.spec_hash == held.side.case(case).hash and r.round >= first_round]
            for held in self._held
        )
        return before, after

    def last(self, case: Case) -> tuple[LaunchRecord, LaunchRecord]:
        """The last record of each side, baseline first."""
        found = [
            next(r for r in reversed(held.records) if r.spec_hash == held.side.case(case).hash) for held in self._held
        ]
        return found[0], found[1]

    def operators(self, case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What rank 0 of each side asked of torch in a step, baseline first; of the launch of ``case`` alone."""
        found = []
        for held in self._held:
            mine = held.side.case(case)
            record = next(r for r in held.records if r.spec_hash == mine.hash)
            work = self._folder / held.side.name / "cases" / launch_name(mine, record.round)
            found.append(msgspec.json.decode(rank_file(work, 0).read_bytes(), type=RankResult).operators)
        return found[0], found[1]

    def log_ratios(self, case: Case, first_round: int = 0) -> LogRatios:
        """ln(candidate / baseline) of each round from ``first_round`` on in which both sides ended ok, [rounds]."""
        return log_ratios(*self._since(case, first_round))

    @property
    def rounds(self) -> int:
        """How many rounds were held."""
        return self._round


def log_ratios(before: Sequence[LaunchRecord], after: Sequence[LaunchRecord]) -> LogRatios:
    """ln(after / before) of the step time of each round in which both ended ok, [rounds]."""
    a, b = (
        {r.round: r.metrics["step_time_s"] or math.nan for r in side if r.state == "ok"} for side in (before, after)
    )
    return np.log([b[r] / a[r] for r in sorted(a.keys() & b.keys())], dtype=np.float64)
