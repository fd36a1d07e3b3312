"""``refshard run``: measure a suite, show progress, print the table, draw the dashboard."""

import sys
from pathlib import Path

from refshard.commands.progress import observer
from refshard.commands.report import report
from refshard.errors import SpecError
from refshard.harness.environment import capture_environment
from refshard.harness.launchers import network
from refshard.harness.launchers.base import Launcher
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.launchers.netlab import NetlabLauncher
from refshard.harness.run import check_suite, mark_latest, new_run_folder, resume_run, run_suite
from refshard.harness.store import read_run
from refshard.records import Run
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
    launcher = make_launcher(spec)
    folder = resume or output or new_run_folder(spec)
    print(f"run folder: {folder}", file=sys.stderr, flush=True)
    environment = capture_environment(cases[0].threads_per_rank, network_words(spec))
    with observer() as shown:
        if resume is not None:
            finished = resume_run(folder, launcher, shown, environment, suite=given, oversubscribe=oversubscribe)
        else:
            if output is None:
                mark_latest(folder)  # before anything is launched: a run that is cut short can be found too
            finished = run_suite(spec, folder, launcher, shown, environment, oversubscribe=oversubscribe)
    return finished, report(folder, None)


def make_launcher(suite: SuiteSpec) -> Launcher:
    """The launcher that the suite names, once it is known to work here.

    Raises:
        LaunchError: it does not.
    """
    if suite.network is None:
        return LocalLauncher()
    network.check(suite.network)
    return NetlabLauncher(suite.network)


def network_words(suite: SuiteSpec) -> str:
    """What joins the hosts of the suite's ranks, in words; empty where all run on one."""
    return suite.network.description if suite.network is not None else ""
