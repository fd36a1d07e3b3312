"""What a gate keeps for each machine and suite: accepted exact metrics, made for diffs, and the machine's own noise.

Noise is that of the same code against itself, launched again and again.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from refshard.analysis.exact import Value, changes, exact_metrics
from refshard.analysis.gate import LogRatios
from refshard.analysis.rehearsal import Noise
from refshard.errors import SpecError, StoreError
from refshard.folders import replace_file
from refshard.measure.environment import COMPARABLE
from refshard.measure.gate.rounds import PairedRounds, Side, log_ratios
from refshard.measure.launchers.base import Launcher
from refshard.measure.run import Observer
from refshard.measure.store import read_run
from refshard.records import Environment, Run, RunRecord, timestamp
from refshard.specs.case import Case
from refshard.specs.gate import TimeLimits
from refshard.specs.suite import SuiteSpec
from refshard.version import __version__

_SCHEMA = 1


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Exact metrics of a suite's cases by name, who made them (machine, software, code), and why they were accepted."""

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
    """Where the baseline of ``suite`` lies for machines of this fingerprint."""
    return folder / environment.id / f"{suite}.json"


def machine_of(environment: Environment) -> dict[str, str]:
    """The machine in words, by the fields that its fingerprint is made of."""
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
    """Write a file that is kept under version control: a field a line.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(msgspec.to_builtins(content), indent=1), "\n"])
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); make room, or name another folder") from None


def read_others(folder: Path, suite: str) -> tuple[Baseline, ...]:
    """What was accepted for ``suite`` on any machine.

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
    """The noise of a suite on the machine with this fingerprint, and who measured it when."""

    schema: int = _SCHEMA
    suite: str
    fingerprint: str
    refshard: str
    git_commit: str | None
    measured_at: str
    limits: TimeLimits
    noise: Noise


def noise_file(folder: Path, environment: Environment, suite: str) -> Path:
    """Where the noise of ``suite`` lies for machines of this fingerprint."""
    return folder / environment.id / f"{suite}.noise.json"


A, B = "a", "b"
"""The two sides, as their folders are called."""


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
    sides = (
        Side(name=A, launcher=launcher, environment=environment),
        Side(name=B, launcher=launcher, environment=environment),
    )
    with PairedRounds(suite, folder, sides, observer, tell) as held:
        held.apart(references)
        held.hold(timed, rounds)


def read_rounds(folders: Sequence[Path]) -> tuple[RunRecord, dict[str, LogRatios], int]:
    """What :func:`record_rounds` kept in each of ``folders``, ended or cut short: the header of the last, ln(B / A) of
    each case by name, and how many launches they were.

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
    """Write what was found; return the file.

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
    """The last that was measured on machines of this fingerprint, of whichever suite; None if none was.

    Raises:
        StoreError: as :func:`read_noise`.
    """
    found = [noise for path in sorted((folder / fingerprint).glob("*.noise.json")) if (noise := read_noise(path))]
    return max(found, key=lambda noise: noise.measured_at, default=None)


def read_noise(path: Path) -> RecordedNoise | None:
    """Read it back; None if there is none.

    Raises:
        StoreError: it is damaged, or a newer refshard wrote it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(path, data, RecordedNoise, "damaged ({}); restore it, or measure the noise again")
