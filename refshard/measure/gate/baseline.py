"""Accepted baselines: what exact metrics are meant to be, one file for each fingerprint and suite, made for diffs."""

import json
from pathlib import Path

import msgspec

from refshard.errors import SpecError, StoreError
from refshard.folders import replace_file
from refshard.measure.environment import COMPARABLE
from refshard.records import Environment, Run, timestamp
from refshard.stats.exact import Value, changes, exact_metrics

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
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: damaged baseline ({error}); restore it, or accept a new one") from None
    if found.schema > _SCHEMA:
        raise StoreError(f"{path}: schema {found.schema} is newer than {_SCHEMA}; update refshard")
    return found
