"""``refshard run``: measure a suite, show progress, print the table, draw the dashboard."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from refshard.commands.report import report
from refshard.errors import SpecError
from refshard.harness.environment import capture_environment
from refshard.harness.launchers import network
from refshard.harness.launchers.base import Launcher
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.launchers.netlab import NetlabLauncher
from refshard.harness.run import Observer, check_suite, mark_latest, new_run_folder, resume_run, run_suite
from refshard.harness.store import read_run
from refshard.quantities import format_seconds
from refshard.records import CaseRecord, Run
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec, find_suite, load_suite


def run(suite: str | None, output: Path | None, *, oversubscribe: bool, resume: Path | None = None) -> tuple[Run, Path]:
    """Measure ``suite`` (a path, or the name of one that ships) and return the run and its dashboard's path.

    With ``resume``, a run's folder, only what is missing there is measured; the suite, if given, must be the run's.

    Raises:
        RefshardError: the suite or the folder cannot be used, and nothing was launched; or the disk is full.
        KeyboardInterrupt: the run was cut short; what had ended is written.
    """
    given = load_suite(find_suite(suite)) if suite is not None else None
    if resume is not None and output is not None:
        raise SpecError("out: a resumed run stays in its folder; leave out --out")
    if given is None and resume is None:
        raise SpecError("suite: none given; name one, or a run to --resume")
    spec = read_run(resume).header.suite if resume is not None else given
    assert spec is not None
    cases = check_suite(spec, oversubscribe=oversubscribe)
    launcher = _launcher(spec)
    folder = resume or output or new_run_folder(spec)
    print(f"run folder: {folder}", file=sys.stderr, flush=True)
    environment = capture_environment(
        cases[0].threads_per_rank, spec.network.description if spec.network is not None else ""
    )
    with observer() as shown:
        if resume is not None:
            finished = resume_run(folder, launcher, shown, environment, suite=given, oversubscribe=oversubscribe)
        else:
            if output is None:
                mark_latest(folder)  # before anything is launched: a run that is cut short can be found too
            finished = run_suite(spec, folder, launcher, shown, environment, oversubscribe=oversubscribe)
    return finished, report(folder, None)


def _launcher(suite: SuiteSpec) -> Launcher:
    """The launcher that the suite names, once it is known to work here."""
    if suite.network is None:
        return LocalLauncher()
    network.check(suite.network)
    return NetlabLauncher(suite.network)


def observer() -> "_Bars | _Lines":
    """What shows progress: bars on a terminal, lines elsewhere. Use it as a context."""
    return _Bars() if sys.stderr.isatty() else _Lines()


def _label(case: CaseSpec, round_: int) -> str:
    ranks = "1 rank" if case.world_size == 1 else f"{case.world_size} ranks"
    return ", ".join([case.strategy, case.model, ranks, *case.axes, f"round {round_ + 1}"])


def _outcome(record: CaseRecord) -> str:
    label = _label(record.case, record.round)
    if record.state != "ok":
        return f"{record.state:<8} {label}: {record.error}"
    return f"ok       {label}: step time {format_seconds(record.metrics['step_time_s'])}"


class _Lines(Observer):
    """One line a case, for logs and pipes."""

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held."""

    def case_started(self, case: CaseSpec, round_: int, index: int, total: int) -> None:
        """See :class:`Observer`."""
        self._prefix, self._started = f"[{index + 1}/{total}]", time.monotonic()

    def case_progressed(self, text: str) -> None:
        """A log needs no steps."""

    def case_ended(self, record: CaseRecord) -> None:
        """See :class:`Observer`."""
        took = format_seconds(time.monotonic() - self._started)
        print(f"{self._prefix} {_outcome(record)}  (took {took})", file=sys.stderr, flush=True)


class _Bars(Observer):
    """A bar over the run's launches, with what the running case is at."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[at]}"),
            console=Console(stderr=True),
            refresh_per_second=2,  # the ranks need the cores
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def case_started(self, case: CaseSpec, round_: int, index: int, total: int) -> None:
        """See :class:`Observer`."""
        if self._task is None:
            self._task = self._progress.add_task("", total=total, at="")
        self._progress.update(self._task, description=_label(case, round_), completed=index, at="starting")

    def case_progressed(self, text: str) -> None:
        """See :class:`Observer`."""
        assert self._task is not None
        self._progress.update(self._task, at=text)

    def case_ended(self, record: CaseRecord) -> None:
        """See :class:`Observer`."""
        assert self._task is not None
        self._progress.console.print(_outcome(record), highlight=False, markup=False)
        self._progress.update(self._task, advance=1, at="")
