"""A suite becomes a run: each case is launched in processes of its own, and each result written as it ends."""

import hashlib
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from refshard.errors import LaunchError, SpecError
from refshard.measure.assemble import Peers, assemble
from refshard.measure.dry.rank import ranks_of
from refshard.measure.dry.record import check_dry, launch_dry, record_dry
from refshard.measure.environment import changes
from refshard.measure.launchers.base import Launcher, LaunchOutcome, Program
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.rank import series_folder, trace_file
from refshard.measure.reduced import Reduced, reduced_file, reduced_for
from refshard.measure.store import RunWriter, check_unused, read_run
from refshard.measure.worker import request_file
from refshard.models.data import SYNTHETIC, open_source
from refshard.models.own import factory_file, find_factory
from refshard.records import Environment, LaunchRecord, Run, RunRecord, timestamp
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.model import check_trainable, is_factory, known_dimensions, load_model, model_file
from refshard.specs.suite import SuiteSpec
from refshard.strategies import check_name
from refshard.version import __version__


class Observer(ABC):
    """Shows a run's progress."""

    @abstractmethod
    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        """The launch number ``index`` (from 0) of ``total`` starts."""

    @abstractmethod
    def case_progressed(self, text: str) -> None:
        """Rank 0 of the running case reports ``text``."""

    @abstractmethod
    def case_ended(self, record: LaunchRecord) -> None:
        """A launch ended and its record is written."""


def check_suite(suite: SuiteSpec, launcher: Launcher | None, *, oversubscribe: bool) -> tuple[Case, ...]:
    """Expand a suite and check it before anything is launched. Without a ``launcher``, whether this machine can run the
    cases is not checked.

    Raises:
        SpecError: a strategy, preset, cluster or data file does not exist, or a case does not fit or has a fidelity of
            earlier versions.
        RefshardError: a case is to be dry-run, and the fake device cannot be made.
    """
    cases = suite.cases()
    for case in cases:
        if case.protocol.fidelity == "simulated":
            raise SpecError(
                f"fidelity must be measured, emulated or dryrun, got 'simulated' for {case.name}; use fidelity = "
                "'dryrun' (closed forms: refshard plan)"
            )
        check_name(case.job.strategy)
        if (model := known_dimensions(case.job.model)) is not None:
            check_trainable(model)
            open_source(case.protocol.data, model.vocab, case.protocol.seed)
            case.job.checkpointed(model.n_layers)
        else:
            find_factory(case.job.model)
            if case.protocol.data != SYNTHETIC:
                raise SpecError(
                    f"data: the factory '{case.job.model}' makes its own batches, got "
                    f"'{case.protocol.data}'; leave data out"
                )
        if case.job.cluster:
            load_cluster(case.job.cluster)
        if launcher is not None and case.protocol.fidelity == "dryrun":
            check_dry(case)
        elif launcher is not None:
            if case.protocol.fidelity == "emulated":
                load_cluster(case.job.cluster).of_world_size(case.job.gpus)
            launcher.check(case, oversubscribe=oversubscribe)
    return cases


def run_suite(
    suite: SuiteSpec,
    folder: Path,
    launcher: Launcher,
    observer: Observer,
    environment: Environment,
    *,
    oversubscribe: bool = False,
    cases: tuple[Case, ...] | None = None,
    skipped: Mapping[Case, str] | None = None,
) -> Run:
    """Run every case of ``suite`` in every round, in ``environment``, and return what was written to ``folder``.

    ``cases`` is the result of :func:`check_suite`, if it was called before. A case that does not end well becomes a
    record in its state, and the run goes on. The ``skipped`` cases are not launched; their records hold the reason
    given. On KeyboardInterrupt the ranks are ended, the closing record says so, and the exception passes through.

    Raises:
        SpecError: see :func:`check_suite`.
        StoreError: the folder cannot hold a run.
        LaunchError: the launcher cannot start ranks, or the disk is full.
    """
    cases = cases or check_suite(suite, launcher, oversubscribe=oversubscribe)
    header = RunRecord(
        run_id=folder.name,
        refshard=__version__,
        started_at=timestamp(),
        suite=suite,
        environment=environment,
        planned=len(_plan(suite, environment)),
        files=named_files(cases),
        models={name: load_model(name) for name in {case.job.model for case in cases} if model_file(name) is not None},
    )
    with open_run(header, folder, launcher, observer) as run:
        _launch_all(run, _plan(suite, environment), skipped or {})
    return read_run(folder)


def resume_run(
    folder: Path,
    launcher: Launcher,
    observer: Observer,
    environment: Environment,
    *,
    suite: SuiteSpec | None = None,
    oversubscribe: bool = False,
    cases: tuple[Case, ...] | None = None,
    skipped: Mapping[Case, str] | None = None,
) -> Run:
    """Run what the run in ``folder`` lacks, and return all of it: launches that never ended, that failed, and that were
    skipped and are not in ``skipped`` now.

    Out of memory, timeout and unsupported are results, which are kept. ``suite`` and ``environment`` must be those of
    the run; the suite may be left out. See :func:`run_suite` for ``cases``.

    Raises:
        SpecError: they are not those of the run; the message says what changed. Or see :func:`check_suite`.
        StoreError: there is no run, it is damaged, or another process writes it.
        LaunchError: the launcher cannot start ranks.
    """
    before, skipped = read_run(folder), skipped or {}
    check_resumable(before.header, environment, suite)
    if cases is None:
        check_suite(before.header.suite, launcher, oversubscribe=oversubscribe)
    kept = {
        (record.spec_hash, record.round)
        for record in before.launches
        if record.state not in ("failed", "skipped") or record.case in skipped
    }
    planned = _plan(before.header.suite, before.header.environment)
    plan = [(round_, case) for round_, case in planned if (case.hash, round_) not in kept]
    if plan or before.end is None or before.end.interrupted:
        with open_run(before.header, folder, launcher, observer, before.launches) as run:
            _launch_all(run, plan, skipped)
    return read_run(folder)


def check_folder(folder: Path, suite: SuiteSpec | None, *, resume: bool) -> None:
    """Refuse early, before a launch to learn the environment, what would be refused later.

    Raises:
        SpecError: the run in ``folder`` is to be resumed, and was started with another suite or refshard.
        StoreError: the folder of a new run is not empty; or the run to resume is missing, or another process writes it.
    """
    if not resume:
        check_unused(folder)
        return
    check_resumable(read_run(folder).header, None, suite)
    with RunWriter(folder, reopen=True):
        """It can be written."""


def check_resumable(header: RunRecord, environment: Environment | None, suite: SuiteSpec | None) -> None:
    """Refuse to mix what cannot be compared; ``environment`` is None while it is unknown.

    Raises:
        SpecError: the suite, the environment, or the content of a file that cases name has changed.
    """
    changed = [] if environment is None else changes(header.environment, environment)
    if header.refshard != __version__:
        changed.append(f"refshard was {header.refshard} and is {__version__}")
    if header.files:
        now = named_files(header.suite.cases())
        changed += [
            f"{name} has changed" if name in now else f"the file of {name} is missing"
            for name, was in header.files.items()
            if now.get(name) != was
        ]
    if suite is not None and suite != header.suite:
        given, kept = msgspec.structs.asdict(suite), msgspec.structs.asdict(header.suite)
        changed += [
            f"the suite's {field} was {msgspec.to_builtins(kept[field])!r} and is {msgspec.to_builtins(value)!r}"
            for field, value in given.items()
            if value != kept[field]
        ]
    if changed:
        raise SpecError(f"run {header.run_id} cannot be resumed: {'; '.join(changed)}; start a new run")


def named_files(cases: Sequence[Case]) -> dict[str, str]:
    """SHA-256 of every file that a case names, by that name; for a factory, its module's."""
    paths = {name: Path(name) for case in cases for name in (case.job.cluster, case.protocol.data) if name}
    for name in {case.job.model for case in cases}:
        if (path := factory_file(name) if is_factory(name) else model_file(name)) is not None:
            paths[name] = path
    found = {}
    for name, path in sorted(paths.items()):
        if path.is_file():
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _plan(suite: SuiteSpec, environment: Environment) -> list[tuple[int, Case]]:
    """Round and case of every launch, in order, without references that are too large, unless the suite names them."""
    named = suite.named_references
    return [
        (round_, case)
        for round_ in range(suite.most_rounds)
        for case in round_order(suite.cases(round_), round_)
        if case != case.reference() or case in named or reduced_for(case, environment) is None
    ]


def _launch_all(run: "OpenRun", plan: Sequence[tuple[int, Case]], skipped: Mapping[Case, str]) -> None:
    named = run.header.suite.named_references
    for index, (round_, case) in enumerate(plan):
        reduced = None
        if case.protocol.fidelity == "measured" and case.reference() not in named:
            reduced = reduced_for(case, run.header.environment)
        run.launch(case, round_, index, len(plan), reduced=reduced, skip=skipped.get(case))


def round_order(cases: tuple[Case, ...], round_: int) -> list[Case]:
    """The order of one round, shuffled by its number; round 0 begins with the cases that others are compared with."""
    shuffled = list(cases)
    random.Random(round_).shuffle(shuffled)
    if round_ == 0:  # every strategy is compared with the reference, some with ddp
        shuffled.sort(key=lambda case: 0 if case == case.reference() else 1 if case.job.strategy == "ddp" else 2)
    return shuffled


def mark_latest(folder: Path) -> None:
    """Let ``latest`` next to the run's folder point to it."""
    unfinished = folder.parent / f".latest-{os.getpid()}"
    with suppress(OSError), ExitStack() as made:  # the disk is full, or another file has the name: the run matters more
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.callback(unfinished.unlink, missing_ok=True)
        unfinished.symlink_to(folder.name)
        unfinished.replace(folder.parent / "latest")


@contextmanager
def open_run(
    header: RunRecord,
    folder: Path,
    launcher: Launcher,
    observer: Observer,
    before: Sequence[LaunchRecord] | None = None,
) -> Iterator["OpenRun"]:
    """Open a new run in ``folder``, or the one with the launches ``before``; close it on every path."""
    with RunWriter(folder, reopen=before is not None) as writer:
        if before is None:
            writer.append(header)
        interrupted = True
        try:
            yield OpenRun(header, folder, launcher, observer, writer, before or ())
            interrupted = False
        finally:
            writer.close(header.run_id, interrupted=interrupted)


class OpenRun:
    """A run that is being written; ``records`` are all so far."""

    def __init__(
        self, header: RunRecord, folder: Path, launcher: Launcher, observer: Observer, writer: RunWriter,
        before: Sequence[LaunchRecord],
    ) -> None:  # fmt: skip
        self.header, self.records = header, list(before)
        self._folder, self._launcher, self._observer, self._writer = folder, launcher, observer, writer

    def launch(
        self, case: Case, round_: int, index: int, total: int, *, reduced: Reduced | None = None,
        skip: str | None = None,
    ) -> None:  # fmt: skip
        """Launch one case, the number ``index`` of ``total``, and keep its record; or ``skip`` it for this reason.

        Raises:
            LaunchError: this process cannot launch it.
        """
        self._observer.case_started(case, round_, index, total)
        if skip is not None:
            blank = blank_record(case, round_, self.header, datetime.now(UTC))
            record = msgspec.structs.replace(blank, state="skipped", error=skip)
        else:
            with self._launching(case.name):
                record = self._launched(case, round_, reduced)
        self._keep(record)
        self._observer.case_ended(record)

    def _launched(self, case: Case, round_: int, reduced: Reduced | None) -> LaunchRecord:
        name, launcher = launch_name(case, round_), self._launcher
        work, started = fresh_folder(self._folder / "cases" / name), datetime.now(UTC)
        if case.protocol.fidelity == "dryrun":
            # Its one process needs neither GPUs nor a network: it runs on this machine.
            here = launcher if isinstance(launcher, LocalLauncher) else LocalLauncher()
            outcome = launch_dry(case, here, work, self._observer.case_progressed)
            record = record_dry(blank_record(case, round_, self.header, started), outcome)
        else:
            request_file(work, "case").write_bytes(msgspec.json.encode(case))
            if reduced is not None:
                reduced_file(work).write_bytes(msgspec.json.encode(reduced))
            program = Program(name="case", processes=case.processes, time_limit_s=case.protocol.time_limit_s)
            launch = launcher.launch(program, work, self._observer.case_progressed)
            blank = blank_record(case, round_, self.header, started)
            record = assemble(blank, launch, work, self.header.environment, self._peers(case, reduced))
        traces = []
        for rank in ranks_of(case) if case.protocol.fidelity == "dryrun" else range(case.processes):
            if (source := trace_file(work, rank)).exists():
                target = self._folder / "traces" / f"{name}-rank{rank}.json.gz"
                target.parent.mkdir(exist_ok=True)
                shutil.move(source, target)
                traces.append(str(target.relative_to(self._folder)))
        return msgspec.structs.replace(record, traces=tuple(traces))

    def launch_series(self, cases: Sequence[Case], round_: int) -> None:
        """Run cases that are alike (see :func:`kind`) in one launch, and keep their records, and nothing else.

        A case that does not end well is the last: those after it have no record.

        Raises:
            LaunchError: this process cannot launch them.
        """
        assert len({kind(case) for case in cases}) == 1
        assert all(serial(case) for case in cases)
        with self._launching(f"a round of {len(cases)} cases"):
            work, started = fresh_folder(self._folder / "cases" / f"series-round{round_}"), datetime.now(UTC)
            for index in range(len(cases)):
                series_folder(work, index).mkdir()
            request_file(work, "series").write_bytes(msgspec.json.encode(cases))
            limit_s = sum(case.protocol.time_limit_s for case in cases)
            program = Program(name="series", processes=cases[0].processes, time_limit_s=limit_s)
            launch = self._launcher.launch(program, work, self._observer.case_progressed)
            for index, case in enumerate(cases):
                blank, own = blank_record(case, round_, self.header, started), series_folder(work, index)
                record = assemble(blank, launch, own, self.header.environment, self._peers(case))
                self._keep(record)
                if record.state != "ok" and launch != LaunchOutcome():
                    break
            shutil.rmtree(work)

    def _peers(self, case: Case, reduced: Reduced | None = None) -> Peers:
        def latest(peer: Case) -> LaunchRecord | None:
            found = [record for record in self.records if record.spec_hash == peer.hash]
            return next((record for record in reversed(found) if record.state == "ok"), found[-1] if found else None)

        ddp = latest(case.changed(strategy="ddp")) if case.job.gpus > 1 else None
        return Peers(reference=latest(case.reference()), ddp=ddp, reduced=reduced)

    def _keep(self, record: LaunchRecord) -> None:
        self._writer.append(record)
        self.records.append(record)

    @contextmanager
    def _launching(self, what: str) -> Iterator[None]:
        """An error of this process, such as a full disk, ends the run; an error of a rank is a result."""
        try:
            yield
        except OSError as error:
            raise LaunchError(f"{what} cannot be launched ({error}); correct that and resume {self._folder}") from None


def serial(case: Case) -> bool:
    """Whether a case can be part of a series: it is measured, and its processes have no limit of their own."""
    return case.protocol.fidelity == "measured" and case.protocol.memory_limit_gib is None


def kind(case: Case) -> tuple[int, int, str, bool]:
    """What the processes of a series share; the last is NCCL's policy for symmetric memory."""
    return case.job.gpus, case.protocol.threads_per_rank, case.protocol.device, case.job.comm_memory == "symmetric"


def launch_name(case: Case, round_: int) -> str:
    """The name of a launch's folder and its traces."""
    return f"{case.name}-{case.hash}-round{round_}"


def fresh_folder(work: Path) -> Path:
    """Make a launch's folder, in place of that of a launch that did not end, or failed; return its absolute path."""
    aside = work.with_name(f".{work.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if work.exists():
        work.rename(aside)  # a process that still writes there cannot delay the removal
        shutil.rmtree(aside)
    work.mkdir(parents=True)
    return work.absolute()


def blank_record(case: Case, round_: int, header: RunRecord, started: datetime) -> LaunchRecord:
    """The record of a launch that has just ended, without its results, in state ok."""
    return LaunchRecord(
        run_id=header.run_id,
        environment=header.environment.id,
        case=case,
        spec_hash=case.hash,
        round=round_,
        fidelity=case.protocol.fidelity,
        state="ok",
        started_at=started.isoformat(timespec="seconds"),
        duration_s=(datetime.now(UTC) - started).total_seconds(),
    )
