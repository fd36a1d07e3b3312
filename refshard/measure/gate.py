"""What a gate runs and keeps: both sides in paired rounds, accepted baselines, and the noise of this machine.

A round launches both sides one right after the other, in random order, each in fresh processes. A launch takes all
cases of one world size through the same processes, since starting them costs more than a case; both sides take them in
the same order, which changes from round to round. Each side is a run in a folder of its own, which every other command
reads. For each machine and suite are kept: accepted exact metrics, in a form made for diffs, and the noise of the same
code against itself.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np

from refshard.analysis.exact import Value, changes, exact_metrics
from refshard.analysis.gate import LogRatios
from refshard.analysis.rehearsal import Noise
from refshard.errors import SpecError, StoreError
from refshard.folders import replace_file
from refshard.measure.environment import COMPARABLE, code_sha256, git_state
from refshard.measure.launchers.base import Launcher
from refshard.measure.launchers.local import worker_of
from refshard.measure.rank import RankResult, rank_file
from refshard.measure.run import Observer, OpenRun, kind, launch_name, open_run
from refshard.measure.store import read_run
from refshard.records import Environment, LaunchRecord, Run, RunRecord, timestamp
from refshard.specs.case import Case
from refshard.specs.gate import TimeLimits
from refshard.specs.suite import SuiteSpec
from refshard.version import __version__

_SCHEMA = 1
A, B = "a", "b"
"""The two sides of a comparison of the code with itself, as their folders are called."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder that holds a refshard."""

    folder: Path

    def of(self, environment: Environment) -> Environment:
        """This machine's environment for ranks that run the code here."""
        commit, dirty = git_state(self.folder)
        return msgspec.structs.replace(
            environment, git_commit=commit, git_dirty=dirty, code_sha256=code_sha256(self.folder / "refshard")
        )


@contextmanager
def checked_out(revision: str, repository: Path) -> Iterator[Checkout]:
    """The folder ``revision``, or a temporary worktree of the revision that git has under that name.

    Raises:
        SpecError: it is neither, or holds no refshard that can be imported.
    """
    with folder_of(revision, repository) as source:
        _check_importable(revision, source)
        yield Checkout(source)


@contextmanager
def folder_of(revision: str, repository: Path) -> Iterator[Path]:
    """The folder ``revision``, or a temporary worktree of the revision that git has under that name.

    Raises:
        SpecError: it is neither.
    """
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    commit = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").stdout.strip()
    if not commit:
        raise SpecError(f"'{revision}' is neither a folder nor a revision of {repository}; name one that git log shows")
    with tempfile.TemporaryDirectory(prefix="refshard-checkout-") as folder:
        source = Path(folder) / "source"
        made = _git(repository, "worktree", "add", "--detach", str(source), commit)
        if made.returncode:
            raise SpecError(f"'{revision}' cannot be checked out ({made.stderr.strip()}); correct that")
        try:
            yield source
        finally:
            _git(repository, "worktree", "remove", "--force", str(source))


def root_of(folder: Path) -> Path | None:
    """The top folder of the git repository that ``folder`` is in; None if it is in none."""
    top = _git(folder, "rev-parse", "--show-toplevel").stdout.strip()
    return Path(top) if top else None


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SpecError(f"git cannot be started ({error.strerror}); install it, or name folders") from None


def _check_importable(revision: str, source: Path) -> None:
    """What ranks import must lie there, and not be the installed package."""
    code = f"import {worker_of(source)} as worker; print(worker.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=source
    )
    if not Path(found.stdout.strip() or "/").is_relative_to(source):
        last = found.stderr.strip().rpartition("\n")[2] or f"it is imported from {found.stdout.strip()}"
        raise SpecError(f"'{revision}' has no refshard that can run ({last}); name a refshard checkout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: its launcher and environment; with ``strategy``, every case's."""

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
        """``tell`` gets a line for each round, ``observer`` every launch of a single case. Orders are drawn anew each
        time, unless there is a ``seed``.
        """
        self._suite, self._folder, self._sides, self._observer, self._tell = suite, folder, sides, observer, tell
        self._drawn = random.Random(seed)
        self.rounds = 0
        self._runs: list[tuple[Side, OpenRun]] = []
        self._open = ExitStack()

    def __enter__(self) -> "PairedRounds":
        for side in self._sides:
            header = RunRecord(
                run_id=f"{self._folder.name}-{side.name}",
                refshard=__version__,
                started_at=timestamp(),
                suite=self._suite,
                environment=side.environment,
                planned=0,
            )
            opened = open_run(header, self._folder / side.name, side.launcher, self._observer)
            self._runs.append((side, self._open.enter_context(opened)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def apart(self, cases: Sequence[Case]) -> None:
        """Launch each case once on each side, in processes of its own: for exact metrics, or as a reference.

        Raises:
            LaunchError: this process cannot launch it.
        """
        launches = [(case, side, run) for case in cases for side, run in self._runs]
        for index, (case, side, run) in enumerate(launches):
            run.launch(side.case(case), self.rounds, index, len(launches))
        self.rounds += 1

    def hold(self, cases: Sequence[Case], rounds: int) -> None:
        """Hold ``rounds`` more rounds of ``cases``. Which side is first is drawn for every other round; the one after
        it has the other order, so that each side comes first as often.

        Raises:
            LaunchError: this process cannot launch them.
        """
        if not cases:
            return
        started, order = time.monotonic(), self._runs
        for index in range(rounds):
            order = order[::-1] if index % 2 else self._drawn.sample(self._runs, len(self._runs))
            for alike in sorted({kind(case) for case in cases}):
                together = [case for case in cases if kind(case) == alike]
                shuffled = self._drawn.sample(together, len(together))
                for side, run in order:
                    run.launch_series([side.case(case) for case in shuffled], self.rounds)
            self.rounds += 1
            left_s = (time.monotonic() - started) / (index + 1) * (rounds - index - 1)
            self._tell(f"round {index + 1}/{rounds} of {len(cases)} cases; {left_s / 60:.0f} min left")

    def _of(self, case: Case, first_round: int = 0) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
        """Records of each side from ``first_round`` on, baseline first."""
        before, after = (
            [r for r in run.records if r.spec_hash == side.case(case).hash and r.round >= first_round]
            for side, run in self._runs
        )
        return before, after

    def failures(self, case: Case, first_round: int) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
        """Records of each side from ``first_round`` on that did not end ok, baseline first."""
        before, after = ([r for r in side if r.state != "ok"] for side in self._of(case, first_round))
        return before, after

    def last(self, case: Case) -> tuple[LaunchRecord, LaunchRecord]:
        """The last record of each side, baseline first."""
        before, after = self._of(case)
        return before[-1], after[-1]

    def operators(self, case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Rank 0's operators of a step on each side, baseline first, from the launch of ``case`` alone."""
        found = []
        for (side, _), records in zip(self._runs, self._of(case)):
            work = self._folder / side.name / "cases" / launch_name(side.case(case), records[0].round)
            found.append(msgspec.json.decode(rank_file(work, 0).read_bytes(), type=RankResult).operators)
        return found[0], found[1]

    def log_ratios(self, case: Case, first_round: int = 0) -> LogRatios:
        """ln(candidate / baseline) of each round from ``first_round`` on in which both sides ended ok, [rounds]."""
        return log_ratios(*self._of(case, first_round))


def log_ratios(before: Sequence[LaunchRecord], after: Sequence[LaunchRecord]) -> LogRatios:
    """ln(after / before) of the step time of each round in which both ended ok, [rounds]."""
    a, b = (
        {r.round: r.metrics["step_time_s"] or math.nan for r in side if r.state == "ok"} for side in (before, after)
    )
    return np.log([b[r] / a[r] for r in sorted(a.keys() & b.keys())], dtype=np.float64)


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Exact metrics of a suite's cases by name; their machine, software and code; and why they were accepted."""

    schema: int = _SCHEMA
    suite: str
    fingerprint: str
    machine: dict[str, str]
    refshard: str
    git_commit: str | None
    accepted_at: str
    reason: str
    cases: dict[str, dict[str, Value]]


def baseline_file(folder: Path, environment: Environment, suite: str) -> Path:
    """The baseline of ``suite`` for machines of this fingerprint."""
    return folder / environment.id / f"{suite}.json"


def machine_of(environment: Environment) -> dict[str, str]:
    """The machine as text, by the fields of its fingerprint."""
    return {
        field: ", ".join(value) if isinstance(value := getattr(environment, field), tuple) else str(value)
        for field in (*COMPARABLE, "network")
    }


def accept(run: Run, folder: Path, reason: str) -> tuple[Path, Baseline | None]:
    """Make the run's exact metrics the baseline of its suite; return the file, and the baseline that it replaces.

    Raises:
        SpecError: no reason is given, or a run that did not end well cannot be a baseline.
        StoreError: the file cannot be written.
    """
    if not reason.strip():
        raise SpecError("reason: none given; say briefly why these metrics are correct")
    if run.end is None or run.end.interrupted:
        raise SpecError(f"run {run.header.run_id} did not finish, so it cannot be a baseline; finish it with --resume")
    if bad := [record for record in run.launches if record.state != "ok"]:
        raise SpecError(f"run {run.header.run_id}: {bad[0].case.name} ended in state {bad[0].state}; all must be ok")
    environment = run.header.environment
    cases: dict[str, dict[str, Value]] = {}
    for record in run.launches:
        if record.proof is None:
            continue  # a simulated case of an earlier version
        found = exact_metrics(record)
        first = cases.setdefault(record.case.name, found)
        if differing := changes({"": first}, {"": found}, run.header.suite.gate.rules):
            change = differing[0]
            raise SpecError(
                f"run {run.header.run_id}: {record.case.name} has {change.metric} {change.before} and, in another "
                f"round, {change.after}, so it is not exact; find out why, or leave the case out"
            )
    path = baseline_file(folder, environment, run.header.suite.name)
    before = read_baseline(path) if path.exists() else None
    made = Baseline(
        suite=run.header.suite.name,
        fingerprint=environment.id,
        machine=machine_of(environment),
        refshard=run.header.refshard,
        git_commit=environment.git_commit,
        accepted_at=timestamp(),
        reason=reason.strip(),
        cases=dict(sorted(cases.items())),
    )
    write_json(path, made)
    return path, before


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Write a file for version control: a field a line.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(msgspec.to_builtins(content), indent=1), "\n"])
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); make room, or name another folder") from None


def read_others(folder: Path, suite: str) -> tuple[Baseline, ...]:
    """The baselines of ``suite`` on all machines.

    Raises:
        StoreError: see :func:`read_baseline`.
    """
    return tuple(read_baseline(path) for path in sorted(folder.glob(f"*/{suite}.json")))


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        StoreError: it is damaged, or a newer refshard wrote it.
    """
    return _decoded(path, path.read_bytes(), Baseline, "damaged baseline ({}); restore it, or accept a new one")


K = TypeVar("K", "Baseline", "RecordedNoise")


def _decoded(path: Path, data: bytes, kind: type[K], damaged: str) -> K:
    try:
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: {damaged.format(error)}") from None
    if found.schema > _SCHEMA:
        raise StoreError(f"{path}: schema {found.schema} is newer than {_SCHEMA}; update refshard")
    return found


class RecordedNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of a suite on the machine with this fingerprint, and when it was measured by which refshard."""

    schema: int = _SCHEMA
    suite: str
    fingerprint: str
    refshard: str
    git_commit: str | None
    measured_at: str
    limits: TimeLimits
    noise: Noise


def noise_file(folder: Path, environment: Environment, suite: str) -> Path:
    """The noise of ``suite`` on machines of this fingerprint."""
    return folder / environment.id / f"{suite}.noise.json"


def record_rounds(
    suite: SuiteSpec,
    references: Sequence[Case],
    timed: Sequence[Case],
    folder: Path,
    launcher: Launcher,
    environment: Environment,
    observer: Observer,
    tell: Callable[[str], None],
    *,
    rounds: int,
) -> None:
    """Hold ``rounds`` rounds of the same code against itself, and keep them in ``folder``."""
    a, b = (Side(name=name, launcher=launcher, environment=environment) for name in (A, B))
    with PairedRounds(suite, folder, (a, b), observer, tell) as held:
        held.apart(references)
        held.hold(timed, rounds)


def read_rounds(folders: Sequence[Path]) -> tuple[RunRecord, dict[str, LogRatios], int]:
    """What :func:`record_rounds` kept in each of ``folders``, complete or not.

    Returns the header of the last, ln(B / A) of each case by name, and the number of launches.

    Raises:
        StoreError: there are no such rounds in a folder, or they are damaged.
        SpecError: they are not of one suite and one machine.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SpecError("from: a folder is given twice; give each folder once")
    rounds: dict[str, list[LogRatios]] = {}
    launches = 0
    headers = [read_run(folder / A).header for folder in folders]
    for folder, header in zip(folders, headers):
        if (header.suite, header.environment.id) != (headers[-1].suite, headers[-1].environment.id):
            raise SpecError(f"from: {folder} and {folders[-1]} differ in suite or machine; give folders that match")
        sides = [
            [record for record in read_run(folder / side).launches if record.case != record.case.reference()]
            for side in (A, B)
        ]
        launches += sum(len({(record.round, record.case.job.gpus) for record in side}) for side in sides)
        for name in dict.fromkeys(record.case.name for record in sides[0]):
            before, after = ([record for record in side if record.case.name == name] for side in sides)
            rounds.setdefault(name, []).append(log_ratios(before, after))
    return headers[-1], {name: np.concatenate(parts) for name, parts in rounds.items()}, launches


def keep_noise(noise: Noise, suite: SuiteSpec, environment: Environment, folder: Path) -> Path:
    """Write the noise of a suite on this machine; return the file.

    Raises:
        StoreError: it cannot be written.
    """
    made = RecordedNoise(
        suite=suite.name,
        fingerprint=environment.id,
        refshard=__version__,
        git_commit=environment.git_commit,
        measured_at=timestamp(),
        limits=suite.gate.times,
        noise=noise,
    )
    path = noise_file(folder, environment, suite.name)
    write_json(path, made)
    return path


def newest_noise(folder: Path, fingerprint: str) -> RecordedNoise | None:
    """The last noise that was measured on machines of this fingerprint, of any suite; None if none was.

    Raises:
        StoreError: as :func:`read_noise`.
    """
    found = [noise for path in sorted((folder / fingerprint).glob("*.noise.json")) if (noise := read_noise(path))]
    return max(found, key=lambda noise: noise.measured_at, default=None)


def read_noise(path: Path) -> RecordedNoise | None:
    """Read it back; None if it does not exist.

    Raises:
        StoreError: it is damaged, or a newer refshard wrote it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(path, data, RecordedNoise, "damaged ({}); restore it, or measure the noise again")
