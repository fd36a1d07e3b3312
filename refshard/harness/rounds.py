"""Paired rounds: both sides of a case launched one right after the other, in random order, each in fresh processes.

Each side is a run of its own in a folder of its own, which every other command reads.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from refshard.harness.assemble import Peers
from refshard.harness.launchers.base import Launcher
from refshard.harness.run import Observer, launch_case
from refshard.harness.store import RunWriter
from refshard.records import CaseRecord, Environment, RunRecord
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec
from refshard.stats.gate import LogRatios


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: what launches it, and in which environment; with ``strategy``, every case's."""

    name: str
    launcher: Launcher
    environment: Environment
    strategy: str | None = None

    def case(self, case: CaseSpec) -> CaseSpec:
        """What this side launches for a case of the suite; the reference stays what it is."""
        if self.strategy is None or case == case.reference():
            return case
        return msgspec.structs.replace(case, strategy=self.strategy)


@dataclass(slots=True)
class _Held:
    """One side's run so far."""

    side: Side
    header: RunRecord
    writer: RunWriter
    records: list[CaseRecord] = field(default_factory=list)

    def latest_ok(self, case: CaseSpec) -> CaseRecord | None:
        return next((r for r in reversed(self.records) if r.spec_hash == case.hash and r.state == "ok"), None)


class PairedRounds:
    """Holds rounds and keeps every record, baseline first. Use it as a context: both runs are closed on every path."""

    def __init__(
        self, suite: SuiteSpec, folder: Path, sides: tuple[Side, Side], observer: Observer, *, seed: int = 0
    ) -> None:
        self._suite, self._folder, self._sides, self._observer = suite, folder, sides, observer
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
                refshard=version("refshard"),
                started_at=_now(),
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

    def hold(self, cases: Sequence[CaseSpec], rounds: int) -> None:
        """Hold ``rounds`` more rounds of ``cases``, in an order of its own each."""
        for _ in range(rounds):
            for index, case in enumerate(self._drawn.sample(cases, len(cases))):
                for held in self._drawn.sample(self._held, len(self._held)):
                    self._launch(held, case, index, len(cases))
            self._round += 1

    def references(self, cases: Sequence[CaseSpec]) -> None:
        """Launch once what the others are held against."""
        for held in self._held:
            for index, case in enumerate(cases):
                self._launch(held, case, index, len(cases))

    def _launch(self, held: _Held, case: CaseSpec, index: int, total: int) -> None:
        mine = held.side.case(case)
        self._observer.case_started(mine, self._round, index, total)
        peers = Peers(
            reference=held.latest_ok(mine.reference()),
            ddp=held.latest_ok(msgspec.structs.replace(mine, strategy="ddp")) if mine.world_size > 1 else None,
        )
        record = launch_case(
            mine,
            self._round,
            held.header,
            self._folder / held.side.name,
            held.side.launcher,
            self._observer.case_progressed,
            peers,
        )
        held.writer.append(record)
        held.records.append(record)
        self._observer.case_ended(record)

    def last(self, case: CaseSpec) -> tuple[CaseRecord, CaseRecord]:
        """The last record of each side, baseline first."""
        found = [
            next(r for r in reversed(held.records) if r.spec_hash == held.side.case(case).hash) for held in self._held
        ]
        return found[0], found[1]

    def log_ratios(self, case: CaseSpec, first_round: int = 0) -> LogRatios:
        """ln(candidate / baseline) of each round from ``first_round`` on in which both sides ended ok, [rounds]."""
        times = [
            {
                r.round: r.metrics["step_time_s"]
                for r in held.records
                if r.spec_hash == held.side.case(case).hash and r.round >= first_round and r.state == "ok"
            }
            for held in self._held
        ]
        common = sorted(times[0].keys() & times[1].keys())
        return np.log([(times[1][r] or 0) / (times[0][r] or 1) for r in common], dtype=np.float64)

    @property
    def rounds(self) -> int:
        """How many rounds were held."""
        return self._round


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
