"""A suite becomes a run: every case launched in processes of its own, every result written as it ends."""

import hashlib
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from refshard.errors import LaunchError, SpecError
from refshard.measure.assemble import assemble
from refshard.measure.dry.rank import ranks_of
from refshard.measure.dry.record import check_dry, launch_dry, record_dry
from refshard.measure.environment import changes
from refshard.measure.launchers.base import Job, Launcher
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.proof import Peers
from refshard.measure.rank import CASE_FILE, trace_file
from refshard.measure.reduced import REDUCED_FILE, reduced_for
from refshard.measure.store import RunWriter, check_unused, read_run
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
    """Told of a run's progress, to show it."""

    @abstractmethod
    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        """The launch number ``index`` (from 0) of ``total`` starts."""

    @abstractmethod
    def case_progressed(self, text: str) -> None:
        """Rank 0 of the running case is at ``text``."""

    @abstractmethod
    def case_ended(self, record: LaunchRecord) -> None:
        """A launch ended and its record is written."""


def check_suite(suite: SuiteSpec, launcher: Launcher | None, *, oversubscribe: bool) -> tuple[Case, ...]:
    """Expand a suite and check what can be known before anything is launched. Without a ``launcher``, whether this
    machine can run the cases is not checked.

    Raises:
        SpecError: a strategy, preset, cluster or data file does not exist, or a case has no room or a fidelity that
            earlier versions had.
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
        _check_model(case)
        if case.job.cluster:
            load_cluster(case.job.cluster)
        if launcher is not None:
            if case.protocol.fidelity == "dryrun":
                check_dry(case)
                continue
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
    ``cases`` are those that :func:`check_suite` returned, if it was called before.

    A case that does not end well becomes a record in its state, and the run goes on. Those ``skipped`` are not
    launched, and their records have the reason given. On KeyboardInterrupt the ranks are ended, the closing record says
    so, and the exception passes through.

    Raises:
        SpecError: see :func:`check_suite`.
        StoreError: the folder cannot hold a run.
        LaunchError: the launcher cannot make what the ranks are to run on, or the disk is full.
    """
    cases = cases or check_suite(suite, launcher, oversubscribe=oversubscribe)
    plan = _plan(suite, environment)
    with RunWriter(folder) as writer:
        header = RunRecord(
            run_id=folder.name,
            refshard=__version__,
            started_at=timestamp(),
            suite=suite,
            environment=environment,
            planned=len(plan),
            files=named_files(cases),
            models={
                name: load_model(name) for name in {case.job.model for case in cases} if model_file(name) is not None
            },
        )
        writer.append(header)
        _run_missing(Run(header=header, launches=()), plan, folder, writer, launcher, observer, skipped or {})
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
    """Run what the run in ``folder`` lacks: launches that never ended, those that failed, and those that were skipped
    and are not ``skipped`` now; and return all of it.

    Out of memory, out of time and unsupported are results, which are kept. ``suite`` and ``environment`` are what the
    launches would be of; if ``suite`` is not given, that of the run. See :func:`run_suite` for ``cases``.

    Raises:
        SpecError: they are not those of the run; the message says what changed. Or see :func:`check_suite`.
        StoreError: there is no run, it is damaged, or another process writes it.
        LaunchError: the launcher cannot make what the ranks are to run on.
    """
    header = read_run(folder).header
    check_resumable(header, environment, suite)
    if cases is None:
        check_suite(header.suite, launcher, oversubscribe=oversubscribe)
    plan = _plan(header.suite, header.environment)
    with RunWriter(folder, reopen=True) as writer:
        _run_missing(read_run(folder), plan, folder, writer, launcher, observer, skipped or {})
    return read_run(folder)


def check_folder(folder: Path, suite: SuiteSpec | None, *, resume: bool) -> None:
    """Refuse early, before anything is launched to learn the environment, what would be refused later.

    Raises:
        SpecError: the run in ``folder`` is to be resumed, and ``suite`` or this refshard is not its.
        StoreError: the folder is to hold a new run and holds something; or there is no run, or another process writes
            it.
    """
    if not resume:
        check_unused(folder)
        return
    check_resumable(read_run(folder).header, None, suite)
    with RunWriter(folder, reopen=True):
        """Nothing is written: it could be."""


def check_resumable(header: RunRecord, environment: Environment | None, suite: SuiteSpec | None) -> None:
    """Refuse to mix what cannot be compared; ``environment`` is None while it is not known.

    Raises:
        SpecError: the suite, the environment, or what is in a file that cases name, is not the run's.
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
    """SHA-256 of every file that a case names, by that name: of a factory, that of its module."""
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
    """Round and case of every launch, in their order. References that are too large are left out, unless the suite
    itself names them.
    """
    named = suite.named_references
    return [
        (round_, case)
        for round_ in range(suite.most_rounds)
        for case in round_order(suite.cases(round_), round_)
        if case != case.reference() or case in named or reduced_for(case, environment) is None
    ]


def _run_missing(
    run: Run, planned: list[tuple[int, Case]], folder: Path, writer: RunWriter, launcher: Launcher,
    observer: Observer, skipped: Mapping[Case, str],
) -> None:  # fmt: skip
    """Launch what ``run`` lacks of the ``planned`` launches, and close it; a closed run that lacks nothing stays."""
    kept = {
        (record.spec_hash, record.round)
        for record in run.launches
        if record.state not in ("failed", "skipped") or record.case in skipped
    }
    plan = [(round_, case) for round_, case in planned if (case.hash, round_) not in kept]
    if not plan and run.end is not None and not run.end.interrupted:
        return
    header, named = run.header, run.header.suite.named_references
    # The latest ok record of each spec serves as a peer.
    ended = {record.spec_hash: record for record in sorted(run.launches, key=lambda record: record.state == "ok")}
    interrupted = True
    try:
        for index, (round_, case) in enumerate(plan):
            observer.case_started(case, round_, index, len(plan))
            peers = Peers(reference=None, ddp=None)
            if case.protocol.fidelity == "measured":
                alone, ddp = case.reference(), case.changed(strategy="ddp")
                peers = Peers(
                    reduced=None if alone in named else reduced_for(case, header.environment),
                    reference=ended.get(alone.hash),
                    ddp=ended.get(ddp.hash) if case.job.gpus > 1 else None,
                )
            if case in skipped:
                blank = blank_record(case, round_, header, datetime.now(UTC))
                record = msgspec.structs.replace(blank, state="skipped", error=skipped[case])
            else:
                with launching(case.name, folder):
                    record = launch_case(case, round_, header, folder, launcher, observer.case_progressed, peers)
            if record.state == "ok" or case.hash not in ended:
                ended[case.hash] = record
            writer.append(record)
            observer.case_ended(record)
        interrupted = False
    finally:
        writer.close(header.run_id, interrupted=interrupted)


def round_order(cases: tuple[Case, ...], round_: int) -> list[Case]:
    """The order of one round, shuffled by its number; in round 0 those come first that others are held against, whose
    records later rounds find there.
    """
    shuffled = list(cases)
    random.Random(round_).shuffle(shuffled)
    if round_ == 0:  # every strategy is compared with the reference, some with ddp
        shuffled.sort(key=lambda case: 0 if case == case.reference() else 1 if case.job.strategy == "ddp" else 2)
    return shuffled


def new_run_folder(name: str) -> Path:
    """A fresh folder name for a run of what is called ``name``, under ``runs/`` of the current directory."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{stamp}-{name}"


def mark_latest(folder: Path) -> None:
    """Let ``latest`` beside the run's folder point to it."""
    unfinished = folder.parent / f".latest-{os.getpid()}"
    with suppress(OSError), ExitStack() as made:  # full, or something else is called so: the run matters more
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.callback(unfinished.unlink, missing_ok=True)
        unfinished.symlink_to(folder.name)
        unfinished.replace(folder.parent / "latest")


@contextmanager
def launching(what: str, folder: Path) -> Iterator[None]:
    """An error of this process's, such as a full disk, is no result: what a rank met is.

    Raises:
        LaunchError: the system refuses.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{what} cannot be launched ({error}); correct that and resume {folder}") from None


def launch_case(
    case: Case,
    round_: int,
    header: RunRecord,
    folder: Path,
    launcher: Launcher,
    on_progress: Callable[[str], None],
    peers: Peers,
) -> LaunchRecord:
    """Run one case in processes of its own, in a folder of its own under ``folder``, and return its record."""
    name = launch_name(case, round_)
    work = fresh_folder(folder / "cases" / name)
    started = datetime.now(UTC)
    if case.protocol.fidelity == "dryrun":
        # Its one process needs neither GPUs nor a network: it runs on this machine.
        here = launcher if isinstance(launcher, LocalLauncher) else LocalLauncher()
        launched = launch_dry(case, here, work, on_progress)
        record = record_dry(blank_record(case, round_, header, started), launched)
    else:
        (work / CASE_FILE).write_bytes(msgspec.json.encode(case))
        if peers.reduced is not None:
            (work / REDUCED_FILE).write_bytes(msgspec.json.encode(peers.reduced))
        job = Job(program="case", processes=case.processes, time_limit_s=case.protocol.time_limit_s)
        launch = launcher.launch(job, work, on_progress)
        record = assemble(blank_record(case, round_, header, started), launch, work, header.environment, peers)
    return msgspec.structs.replace(record, traces=_keep_traces(case, name, work, folder))


def launch_name(case: Case, round_: int) -> str:
    """What a launch's folder and its traces are called."""
    return f"{case.name}-{case.hash}-round{round_}"


def fresh_folder(work: Path) -> Path:
    """Make a launch's folder, in place of that of a launch that did not end, or failed; return its absolute path."""
    aside = work.with_name(f".{work.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if work.exists():
        work.rename(aside)  # who still writes to the one that is removed cannot hold that up
        shutil.rmtree(aside)
    work.mkdir(parents=True)
    return work.absolute()


def blank_record(case: Case, round_: int, header: RunRecord, started: datetime) -> LaunchRecord:
    """The record of a launch that has just ended, without what came of it; its state is preset to ok."""
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


def _keep_traces(case: Case, name: str, work: Path, folder: Path) -> tuple[str, ...]:
    """Move the traces of the ranks, or of those that were dry-run, to the run's ``traces`` folder.

    Returns their paths, relative to the run's folder.
    """
    kept = []
    for rank in ranks_of(case) if case.protocol.fidelity == "dryrun" else range(case.processes):
        source = trace_file(work, rank)
        if source.exists():
            target = folder / "traces" / f"{name}-rank{rank}.json.gz"
            target.parent.mkdir(exist_ok=True)
            shutil.move(source, target)
            kept.append(str(target.relative_to(folder)))
    return tuple(kept)


def _check_model(case: Case) -> None:
    job = case.job
    if (model := known_dimensions(job.model)) is not None:
        check_trainable(model)
        open_source(case.protocol.data, model.vocab, case.protocol.seed)
        job.checkpointed(model.n_layers)
        return
    find_factory(job.model)
    if case.protocol.data != SYNTHETIC:
        raise SpecError(
            f"data: the factory '{job.model}' makes its own batches, got '{case.protocol.data}'; leave data out"
        )
