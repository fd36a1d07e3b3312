"""``refshard run``: measure a suite, show progress, draw the dashboard, answer with the tables."""

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from refshard.analysis.evidence import gather
from refshard.commands.folders import find_run
from refshard.commands.launching import LAUNCHERS, check_launcher, make_launcher
from refshard.commands.printing import tell
from refshard.commands.progress import observer
from refshard.commands.report import report
from refshard.errors import SpecError, StoreError
from refshard.folders import new_run_folder
from refshard.measure.dry.first import cases_to_skip
from refshard.measure.duration import earlier_launches, expected, recorded_folders
from refshard.measure.interruption import ignore_more
from refshard.measure.launchers.base import Launcher
from refshard.measure.launchers.torchrun import TorchrunLauncher
from refshard.measure.run import check_folder, check_suite, mark_latest, resume_run, run_suite
from refshard.measure.store import read_run
from refshard.records import Environment, Run
from refshard.report.blocks import Answer
from refshard.report.run.answer import planned_answer, run_answer
from refshard.specs.case import Case
from refshard.specs.suite import SuiteSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure, and where.

    ``suite`` is None to resume the run in the folder ``resume``: only what is missing is measured; a suite given with
    it must be the run's. ``launcher`` replaces the suite's; ``sbatch`` are options for the launcher ``slurm``. ``only``
    names the cases of the suite to measure, by name or hash; references come along. ``cluster`` names a cluster on
    which the measured cases are dry-run instead. ``dry_run_first`` names a cluster to dry-run them on before launching;
    ``"auto"`` is the first with this machine's GPUs, ``"no"`` skips it, and by default the suite decides. With
    ``launch_all``, cases are launched even if their dry run says that they will not fit.
    """

    suite: SuiteSpec | None
    output: Path | None = None
    resume: Path | None = None
    oversubscribe: bool = False
    launcher: str | None = None
    sbatch: str | None = None
    only: tuple[str, ...] = ()
    cluster: str | None = None
    dry_run_first: str | None = None
    launch_all: bool = False


def run(options: Options) -> Answer:
    """Measure; the status is 1 if a case did not end well.

    Raises:
        RefshardError: the suite, the folder or the launcher cannot be used, and nothing was launched; or the disk is
            full.
        KeyboardInterrupt: the run was cut short; finished launches are saved, and the message says how to resume.
    """
    if options.output is not None and str(options.output) == "-":
        raise SpecError("out: a run is a folder, so it cannot go to standard output; name a folder")
    if options.resume is not None and options.output is not None:
        raise SpecError("out: a resumed run stays in its folder; leave out --out")
    given = chosen(options)
    if given is None and options.resume is None:
        raise SpecError("suite: none given; name one (`refshard list suites`), add --strategy, or --resume a run")
    suite = read_run(find_run(options.resume)).header.suite if options.resume is not None else given
    assert suite is not None
    with launcher_of(suite, options) as launcher:
        finished, dashboard = _run(suite, given, options, launcher)
        if isinstance(launcher, TorchrunLauncher):
            launcher.dismiss(well=finished.well)
    return run_answer(gather(finished), more=f"dashboard: {dashboard}", status=0 if finished.well else 1)


def chosen(options: Options) -> SuiteSpec | None:
    """The suite with the options applied: some of its cases only, or dry runs in place of measurements.

    Raises:
        SpecError: the run is resumed, so its cases are already chosen.
    """
    given = options.suite
    for option, is_given in (("only", bool(options.only)), ("cluster", options.cluster is not None)):
        if is_given and options.resume is not None:
            raise SpecError(f"{option}: a resumed run has its cases already; leave out --{option}, or --resume")
        if is_given and given is None:
            raise SpecError(f"{option}: there is no suite; name one (`refshard list suites`), or add --strategy")
    if given is not None and options.only:
        given = msgspec.structs.replace(given, only=options.only)
    if given is not None and options.cluster is not None:
        given = given.as_dry_run(options.cluster)
    return given


def listed(options: Options) -> Answer:
    """What ``run`` would launch, and how long that would take; nothing is launched.

    Raises:
        SpecError: no suite is given, or it is wrong.
    """
    import torch

    suite = chosen(options)
    if suite is None:
        raise SpecError("list: no suite given; name one, or add --strategy")
    cases = check_suite(suite, None, oversubscribe=True)
    earlier = earlier_launches([*recorded_folders(), Path("runs")])
    found = expected(suite, earlier, gpus=torch.cuda.is_available())
    return planned_answer(suite, cases, **asdict(found))


def _run(suite: SuiteSpec, given: SuiteSpec | None, options: Options, launcher: Launcher) -> tuple[Run, Path]:
    cases = check_suite(suite, launcher, oversubscribe=options.oversubscribe)
    folder = options.resume or options.output or new_run_folder(suite.name)
    check_folder(folder, given, resume=options.resume is not None)
    tell(f"run folder: {folder}")
    try:
        environment = launcher.environment(cases[0].protocol.threads_per_rank, folder, lambda text: tell(f"  {text}"))
        skipped = _to_skip(suite, options, environment, folder)
        with observer() as shown:
            if options.resume is not None:
                finished = resume_run(folder, launcher, shown, environment, suite=given, cases=cases, skipped=skipped)
            else:
                if options.output is None:
                    mark_latest(folder)  # before anything is launched: a run that is cut short can be found too
                finished = run_suite(suite, folder, launcher, shown, environment, cases=cases, skipped=skipped)
        return finished, report([folder], None)
    except KeyboardInterrupt:
        ignore_more()
        raise KeyboardInterrupt(_cut_short(folder)) from None


def _to_skip(suite: SuiteSpec, options: Options, environment: Environment, folder: Path) -> Mapping[Case, str]:
    """Cases that do not fit by their dry run, and why; empty if they are to be launched anyway."""
    cluster = options.dry_run_first or ("auto" if suite.dry_run_first else "no")
    found = {} if cluster == "no" else cases_to_skip(suite, cluster, environment, folder, tell)
    if found:
        tell("they are launched anyway" if options.launch_all else "they are skipped; --launch-all launches them")
    return {} if options.launch_all else found


def _cut_short(folder: Path) -> str:
    """What is saved of the run, and the command that goes on with it."""
    try:
        kept = read_run(folder)
    except StoreError:  # there is no run yet, or only an empty file
        return "nothing was launched yet"
    of = f" of {kept.header.planned}" if kept.header.planned else ""
    resume = shlex.join(["refshard", "run", "--resume", str(folder)])
    return f"{len(kept.launches)}{of} launches saved. Resume with: {resume}"


def launcher_of(suite: SuiteSpec, options: Options) -> AbstractContextManager[Launcher]:
    """The requested launcher, or the suite's, once it is known to work here.

    Raises:
        RefshardError: there is no such launcher, or it does not work here.
    """
    name = options.launcher or suite.launcher
    if suite.network is not None and options.launcher in LAUNCHERS:
        raise SpecError(
            f"launcher: got '{name}', but this suite creates its own hosts (launcher = \"netlab\"); leave out "
            "--launcher, or measure a suite without [network]"
        )
    check_launcher(options.launcher, options.sbatch, suite.launcher)
    return make_launcher(name, options.sbatch, suite.network)
