"""This machine's own noise: the same code against itself, launched again and again, and kept beside its baselines."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from refshard.errors import StoreError
from refshard.folders import replace_file
from refshard.harness.launchers.base import Launcher
from refshard.harness.rounds import PairedRounds, Side
from refshard.harness.run import Observer
from refshard.records import Environment
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec
from refshard.stats.gate import LogRatios
from refshard.stats.rehearsal import Noise

_SCHEMA = 1


class RecordedNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of a suite on the machine with this fingerprint, and who measured it when."""

    schema: int = _SCHEMA
    suite: str
    fingerprint: str
    refshard: str
    git_commit: str | None
    measured_at: str
    noise: Noise


def noise_file(folder: Path, environment: Environment, suite: str) -> Path:
    """Where the noise of ``suite`` lies for machines of this fingerprint."""
    return folder / environment.id / f"{suite}.noise.json"


def record_rounds(
    suite: SuiteSpec,
    cases: Sequence[CaseSpec],
    folder: Path,
    launcher: Launcher,
    environment: Environment,
    observer: Observer,
    tell: Callable[[str], None],
    *,
    rounds: int,
) -> dict[str, LogRatios]:
    """Hold ``rounds`` rounds of the same code against itself; ln(B / A) of each case, by name, [rounds]."""
    a, b = (Side(name=name, launcher=launcher, environment=environment) for name in ("a", "b"))
    references = [case for case in cases if case == case.reference()]
    timed = [case for case in cases if case not in references]
    with PairedRounds(suite, folder, (a, b), observer, tell) as held:
        held.apart(references)
        held.hold(timed, rounds)
        return {case.name: held.log_ratios(case) for case in timed}


def keep_noise(noise: Noise, suite: SuiteSpec, environment: Environment, folder: Path) -> Path:
    """Write what was found; return the file.

    Raises:
        OSError: it cannot be written.
    """
    made = RecordedNoise(
        suite=suite.name,
        fingerprint=environment.id,
        refshard=version("refshard"),
        git_commit=environment.git_commit,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        noise=noise,
    )
    path = noise_file(folder, environment, suite.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [json.dumps(msgspec.to_builtins(made), indent=1), "\n"])
    return path


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
