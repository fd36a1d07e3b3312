"""What commands that launch a suite have in common: ``--launcher``, ``--sbatch``, the run folder, a gate's cases."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from refshard.commands.printing import tell
from refshard.errors import SpecError, nearest
from refshard.folders import new_run_folder
from refshard.measure.launchers.base import Launcher
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.launchers.netlab import NetlabLauncher
from refshard.measure.launchers.netlab import check as check_network
from refshard.measure.launchers.slurm import SlurmLauncher
from refshard.measure.launchers.torchrun import TorchrunLauncher, place_of, serve
from refshard.measure.run import check_suite
from refshard.specs.case import Case
from refshard.specs.suite import NetworkSpec, SuiteSpec

LAUNCHERS = ("local", "torchrun", "slurm")
"""The command line's choices; ``netlab`` comes with a suite's network."""


def serve_rank(launcher: str | None) -> int | None:
    """If this process is a rank of torchrun other than 0, serve rank 0 and return the exit status."""
    if launcher != "torchrun" or (place := place_of(os.environ)).rank == 0:
        return None
    return 0 if serve(place) else 1


def check_launcher(name: str | None, sbatch: str | None, otherwise: str = "local") -> None:
    """Refuse what the command line says of the launcher, if it cannot be; without a name it is the one ``otherwise``.

    Raises:
        SpecError: there is no such launcher, or options are for another.
    """
    if name is not None and name not in LAUNCHERS:
        raise SpecError(f"launcher: unknown '{name}'; {nearest(name, list(LAUNCHERS))}")
    if sbatch is not None and name != "slurm":
        raise SpecError(f"sbatch needs launcher 'slurm', got launcher '{name or otherwise}'; add --launcher slurm")


def make_launcher(
    name: str, sbatch: str | None = None, network: NetworkSpec | None = None
) -> AbstractContextManager[Launcher]:
    """The launcher of this name, once it is known to work here; with a ``network``, the one that makes that.

    Raises:
        RefshardError: it does not work here.
    """
    if name == "torchrun":
        return TorchrunLauncher(place_of(os.environ))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise SpecError(
            f"launcher: torchrun started this process, and with launcher '{name}' each of its processes would "
            "measure on its own; add --launcher torchrun, or start refshard without torchrun"
        )
    if name == "slurm":
        return nullcontext(SlurmLauncher(sbatch or ""))
    if network is None:
        return nullcontext(LocalLauncher())
    check_network(network)
    return nullcontext(NetlabLauncher(network))


def run_folder(name: str) -> Path:
    """A fresh folder name under ``runs/`` of the current directory, also printed."""
    folder = new_run_folder(name)
    tell(f"run folder: {folder}")
    return folder


def check_gated(suite: SuiteSpec, *, oversubscribe: bool) -> tuple[Case, ...]:
    """The cases of ``suite``.

    Raises:
        SpecError: a gate cannot launch them, or could not tell them apart.
    """
    if suite.network is not None:
        raise SpecError("suite: a gate launches ranks on this machine only; leave out 'network'")
    cases = check_suite(suite, LocalLauncher(), oversubscribe=oversubscribe)
    names = [case.name for case in cases]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"suite: two cases are named {twice}, but a gate needs unique names; move one to another suite")
    return cases
