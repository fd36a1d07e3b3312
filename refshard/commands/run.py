"""``refshard run``: measure a suite, show progress, print the table, draw the dashboard."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.commands.asked import tell
from refshard.commands.progress import observer
from refshard.commands.report import report
from refshard.errors import SpecError, nearest
from refshard.harness.dry.first import cases_to_skip
from refshard.harness.launchers.base import Launcher
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.launchers.netlab import network
from refshard.harness.launchers.netlab.launcher import NetlabLauncher
from refshard.harness.launchers.slurm.launcher import SlurmLauncher
from refshard.harness.launchers.torchrun.launcher import TorchrunLauncher
from refshard.harness.launchers.torchrun.server import place_of, serve
from refshard.harness.run import check_folder, check_suite, mark_latest, new_run_folder, resume_run, run_suite
from refshard.harness.store import read_run
from refshard.records import Run
from refshard.specs.suite import SuiteSpec, find_suite, load_suite

LAUNCHERS = ("local", "torchrun", "slurm")
"""Those that the command line chooses from; ``netlab`` comes with what a suite says of its network."""


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


def serve_harness(launcher: str | None) -> int | None:
    """If rank 0 of torchrun is the harness and this process another rank, serve it and return the exit status."""
    if launcher != "torchrun" or (place := place_of(os.environ)).rank == 0:
        return None
    return 0 if serve(place) else 1


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
    with make_launcher(suite, asked) as launcher:
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


def make_launcher(suite: SuiteSpec, asked: Asked) -> AbstractContextManager[Launcher]:
    """The launcher that is asked for, or the suite's, once it is known to work here.

    Raises:
        RefshardError: there is no such launcher, or it does not work here.
    """
    name = asked.launcher or suite.launcher
    if name not in LAUNCHERS and asked.launcher is not None:
        raise SpecError(f"launcher: none is called '{name}'; {nearest(name, list(LAUNCHERS))}")
    if suite.network is not None and asked.launcher is not None:
        raise SpecError(
            f"launcher: '{name}' asked for, but this suite makes its own hosts (launcher = \"netlab\"); leave out "
            "--launcher, or measure a suite without [network]"
        )
    if asked.sbatch is not None and name != "slurm":
        raise SpecError(f"sbatch: options for launcher 'slurm', got launcher '{name}'; add --launcher slurm")
    if name == "torchrun":
        return TorchrunLauncher(place_of(os.environ))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise SpecError(
            f"launcher: torchrun started this process, and with launcher '{name}' each of its processes would "
            "measure on its own; add --launcher torchrun, or start refshard without torchrun"
        )
    if name == "slurm":
        return nullcontext(SlurmLauncher(asked.sbatch or ""))
    if suite.network is None:
        return nullcontext(LocalLauncher())
    network.check(suite.network)
    return nullcontext(NetlabLauncher(suite.network))
