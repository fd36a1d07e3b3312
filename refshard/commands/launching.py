"""What the command line says of where ranks run: ``--launcher`` and ``--sbatch``."""

import os
from contextlib import AbstractContextManager, nullcontext

from refshard.errors import SpecError, nearest
from refshard.measure.launchers.base import Launcher
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.launchers.netlab import network as networks
from refshard.measure.launchers.netlab.launcher import NetlabLauncher
from refshard.measure.launchers.slurm.launcher import SlurmLauncher
from refshard.measure.launchers.torchrun.launcher import TorchrunLauncher
from refshard.measure.launchers.torchrun.server import place_of, serve
from refshard.specs.suite import NetworkSpec

LAUNCHERS = ("local", "torchrun", "slurm")
"""Those that the command line chooses from; ``netlab`` comes with what is said of its network."""


def serve_harness(launcher: str | None) -> int | None:
    """If rank 0 of torchrun is the harness and this process another rank, serve it and return the exit status."""
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
    networks.check(network)
    return nullcontext(NetlabLauncher(network))
