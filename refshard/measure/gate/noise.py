"""This machine's own noise: the same code against itself, launched again and again, and kept beside its baselines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from refshard.errors import SpecError, StoreError
from refshard.measure.gate.baseline import write_json
from refshard.measure.gate.rounds import PairedRounds, Side, log_ratios
from refshard.measure.launchers.base import Launcher
from refshard.measure.run import Observer
from refshard.measure.store import read_run
from refshard.records import Environment, RunRecord, timestamp
from refshard.specs.case import CaseSpec
from refshard.specs.gate import TimeLimits
from refshard.specs.suite import SuiteSpec
from refshard.stats.gate import LogRatios
from refshard.stats.rehearsal import Noise
from refshard.version import __version__

_SCHEMA = 1


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
    references: Sequence[CaseSpec],
    timed: Sequence[CaseSpec],
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
        launches += sum(len({(record.round, record.case.world_size) for record in side}) for side in sides)
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
        found = msgspec.json.decode(path.read_bytes(), type=RecordedNoise)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: damaged ({error}); restore it, or measure the noise again") from None
    if found.schema > _SCHEMA:
        raise StoreError(f"{path}: schema {found.schema} is newer than {_SCHEMA}; update refshard")
    return found
