"""``refshard run``: measure a suite, show progress, print the table, draw the dashboard."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.commands.asked import tell
from refshard.commands.launching import LAUNCHERS, check_launcher, make_launcher
from refshard.commands.progress import observer
from refshard.commands.report import report
from refshard.errors import SpecError
from refshard.harness.dry.first import cases_to_skip
from refshard.harness.launchers.base import Launcher
from refshard.harness.launchers.torchrun.launcher import TorchrunLauncher
from refshard.harness.run import check_folder, check_suite, mark_latest, new_run_folder, resume_run, run_suite
from refshard.harness.store import read_run
from refshard.records import Run
from refshard.specs.suite import SuiteSpec, find_suite, load_suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure, and where.

    ``suite`` is a path, or the name of one that ships; ``resume`` a run's folder, of which only what is missing is
    measured; then the suite, if given, must be the run's. ``launcher`` replaces the suite's; ``sbatch`` are options for
    the launcher ``slurm``. ``only`` names the cases of the suite to measure, by name or hash; references come along.
    ``dry_run_on`` names a cluster on which the measured cases are dry-run instead. ``dry_run_first`` names the one on
    which they are dry-run before; ``"auto"`` is the first with this machine's GPUs, ``"no"`` is none, and by default
    the suite decides. With ``launch_all``, cases are launched even if their dry run says that they will not fit.
    """

    suite: str | None
    output: Path | None = None
    resume: Path | None = None
    oversubscribe: bool = False
    launcher: str | None = None
    sbatch: str | None = None
    only: tuple[str, ...] = ()
    dry_run_on: str | None = None
    dry_run_first: str | None = None
    launch_all: bool = False


def run(asked: Asked) -> tuple[Run, Path]:
    """Measure, and return the run and its dashboard's path.

    Raises:
        RefshardError: the suite, the folder or the launcher cannot be used, and nothing was launched; or the disk is
            full.
        KeyboardInterrupt: the run was cut short; what had ended is written.
    """
    given = load_suite(find_suite(asked.suite)) if asked.suite is not None else None
    if asked.only:
        if asked.resume is not None or given is None:
            raise SpecError("only: a resumed run has its cases already; leave out --only, or --resume")
        given = msgspec.structs.replace(given, only=asked.only)
    if asked.dry_run_on is not None:
        if asked.resume is not None or given is None:
            raise SpecError("dry_run_on: a resumed run has its cases already; leave out --dry-run-on, or --resume")
        given = given.as_dry_run(asked.dry_run_on)
    if asked.resume is not None and asked.output is not None:
        raise SpecError("out: a resumed run stays in its folder; leave out --out")
    if given is None and asked.resume is None:
        raise SpecError("suite: none given; name one, or a run to --resume")
    suite = read_run(asked.resume).header.suite if asked.resume is not None else given
    assert suite is not None
    with launcher_of(suite, asked) as launcher:
        finished, dashboard = _run(suite, given, asked, launcher)
        if isinstance(launcher, TorchrunLauncher):
            launcher.dismiss(well=finished.well)
        return finished, dashboard


def _run(suite: SuiteSpec, given: SuiteSpec | None, asked: Asked, launcher: Launcher) -> tuple[Run, Path]:
    cases = check_suite(suite, launcher, oversubscribe=asked.oversubscribe)
    folder = asked.resume or asked.output or new_run_folder(suite.name)
    tell(f"run folder: {folder}")
    check_folder(folder, given, resume=asked.resume is not None)
    environment = launcher.environment(cases[0].threads_per_rank, folder, lambda text: tell(f"  {text}"))
    cluster = asked.dry_run_first or ("auto" if suite.dry_run_first else "no")
    skipped = {} if cluster == "no" else cases_to_skip(suite, cluster, environment, folder, tell)
    if skipped:
        tell("they are launched all the same" if asked.launch_all else "they are skipped; --launch-all launches them")
    skipped = {} if asked.launch_all else skipped
    with observer() as shown:
        if asked.resume is not None:
            finished = resume_run(
                folder, launcher, shown, environment, suite=given, oversubscribe=asked.oversubscribe, skipped=skipped
            )
        else:
            if asked.output is None:
                mark_latest(folder)  # before anything is launched: a run that is cut short can be found too
            finished = run_suite(
                suite, folder, launcher, shown, environment, oversubscribe=asked.oversubscribe, skipped=skipped
            )
    return finished, report([folder], None)


def launcher_of(suite: SuiteSpec, asked: Asked) -> AbstractContextManager[Launcher]:
    """The launcher that is asked for, or the suite's, once it is known to work here.

    Raises:
        RefshardError: there is no such launcher, or it does not work here.
    """
    name = asked.launcher or suite.launcher
    if suite.network is not None and asked.launcher in LAUNCHERS:
        raise SpecError(
            f"launcher: '{name}' asked for, but this suite makes its own hosts (launcher = \"netlab\"); leave out "
            "--launcher, or measure a suite without [network]"
        )
    check_launcher(asked.launcher, asked.sbatch, suite.launcher)
    return make_launcher(name, asked.sbatch, suite.network)
