"""Dry runs before a suite is measured: which of its cases will not fit into the GPUs' memory.

They take place in a process of their own, and with a Python of their own where the installed torch is a CUDA build: the
fake device needs torch's CPU build. They leave a run like any other.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from refshard.errors import RefshardError
from refshard.fakecuda.build import check
from refshard.measure.store import holds_run, read_run
from refshard.records import Environment, Run
from refshard.specs.case import Case
from refshard.specs.cluster import cluster_of_device
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml

_PYTHON = Path(".dryrun/bin/python")
"""Python of the environment with torch's CPU build that the fake device's errors tell users to create."""
_LAUNCHED = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def folder_of_dry_runs(folder: Path) -> Path:
    """The folder of the dry runs that precede the run in ``folder``, which may be a link such as ``runs/latest``.

    >>> folder_of_dry_runs(Path("runs/gpu_8"))
    PosixPath('runs/gpu_8-dryrun')
    """
    run = folder.resolve() if folder.is_symlink() else folder
    return run.with_name(f"{run.name}-dryrun")


def cases_to_skip(
    suite: SuiteSpec, cluster: str, environment: Environment, folder: Path, tell: Callable[[str], None]
) -> dict[Case, str]:
    """Dry-run the measured cases of ``suite`` on ``cluster``; return the cases that will not fit, each with the reason.

    ``cluster`` may be ``"auto"``: the first with the GPUs of ``environment``. Without GPUs there is nothing to predict.
    If the dry runs cannot start, ``tell`` gets the reason and no case is skipped. ``folder`` is that of the measured
    run.
    """
    if not environment.gpus:
        return {}
    try:
        cluster = cluster_of_device(environment.gpus[0]) if cluster == "auto" else cluster
        tell(f"dry runs first, on {cluster}: {folder_of_dry_runs(folder)}")
        dry = dry_run_first(suite, cluster, folder)
    except RefshardError as error:
        tell(f"no dry runs, so every case is launched: {error}")
        return {}
    found = will_not_fit(suite, cluster, dry)
    tell(f"dry run says: {len(found)} of {len(dry.launches)} cases will not fit")
    return found


def dry_run_first(suite: SuiteSpec, cluster: str, folder: Path) -> Run:
    """Dry-run the measured cases of ``suite`` on ``cluster``; ``folder`` is that of the measured run.

    Dry runs that are already there are kept: those of another machine may be copied there.

    Raises:
        SpecError: see :meth:`SuiteSpec.as_dry_run`.
        RefshardError: no Python here has torch's CPU build, or cases were not dry-run; standard error says why.
    """
    dry, wanted = folder_of_dry_runs(folder), suite.as_dry_run(cluster)
    if not _missing(wanted, dry):
        return read_run(dry)
    command = [python_of_dry_runs(), "-m", "refshard", "run"]
    # Without those of a launcher: a dry run has no peers.
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHED) and k not in _RANK}
    with tempfile.TemporaryDirectory(prefix="refshard-dryrun-") as written:
        path = Path(written) / f"{suite.name}.toml"
        path.write_text(to_toml(wanted))
        into = ["--resume" if holds_run(dry) else "--out", str(dry)]
        subprocess.run([*command, str(path), *into], stdout=subprocess.DEVNULL, env=variables)
    if missing := _missing(wanted, dry):
        raise RefshardError(f"{dry}: {missing} of {len(wanted.cases())} cases were not dry-run; see the messages above")
    return read_run(dry)


def _missing(asked: SuiteSpec, dry: Path) -> int:
    """How many cases have no record yet in the run in ``dry``, if there is one."""
    found = {record.spec_hash for record in read_run(dry).launches} if holds_run(dry) else set()
    return len({case.hash for case in asked.cases()} - found)


def will_not_fit(suite: SuiteSpec, cluster: str, dry: Run) -> dict[Case, str]:
    """The measured cases of ``suite`` that ran out of memory in their dry run, each with the dry run's error."""
    errors = {record.spec_hash: record.error for record in dry.launches if record.state == "oom"}
    measured = [case for case in suite.cases() if case.protocol.fidelity == "measured"]
    reasons = {case: errors.get(case.as_dry_run(cluster).hash) for case in measured}
    return {case: f"dry run on {cluster}: {reason}" for case, reason in reasons.items() if reason}


def python_of_dry_runs() -> str:
    """The Python that can run the fake device: this one, or that of ``.dryrun`` in the current folder.

    Raises:
        RefshardError: neither can.
    """
    try:
        check()
    except RefshardError:
        if _PYTHON.is_file():
            return str(_PYTHON)
        raise
    return sys.executable
