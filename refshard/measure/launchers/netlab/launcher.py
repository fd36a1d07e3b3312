"""Ranks on several hosts that this machine makes of itself, joined by a real network of a limited rate."""

import sys
from collections.abc import Callable
from pathlib import Path

from refshard.measure.environment import capture_environment
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.launchers.machine import check_fits_machine
from refshard.measure.launchers.netlab.network import INTERFACE, Network
from refshard.measure.launchers.ranks import rank_environment, run_ranks, worker_arguments
from refshard.records import Environment
from refshard.specs.case import CaseSpec
from refshard.specs.suite import NetworkSpec

_PORT = 29500
"""Rank 0's store. Each launch makes hosts of its own, so the port is always free there."""


class NetlabLauncher(Launcher):
    """Makes the network anew for each launch, and spreads the ranks evenly over its hosts, in order.

    A single rank runs on host 0.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        self._spec = spec

    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`.

        Raises:
            SpecError: the ranks cannot be spread evenly over the hosts.
            LaunchError: the network cannot be made.
        """
        network = Network(self._spec)
        program, arguments, environments = placed(job, folder, network, self._spec.ranks_per_host(job.processes))
        with Interruption() as interruption, network:
            return run_ranks(program, arguments, environments, job, folder, on_progress, interruption)

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`."""
        check_fits_machine(case, case.processes, oversubscribe=oversubscribe)

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`."""
        return capture_environment(threads, self._spec.description)


def placed(
    job: Job, folder: Path, network: Network, per_host: int
) -> tuple[str, list[tuple[str, ...]], list[dict[str, str]]]:
    """The program that all ranks begin with, and each rank's arguments and variables, ``per_host`` ranks to a host."""
    arguments, environments = [], []
    for rank in range(job.processes):
        host, local_rank = divmod(rank, per_host)
        arguments.append((*network.inside(host), sys.executable, *worker_arguments(job, folder)))
        place = rank_environment(
            rank,
            local_rank,
            world_size=job.processes,
            local_world_size=per_host,
            address=network.address(0),
            port=_PORT,
        )
        # Gloo must be told: the machine's name, which it would look up, leads to no address of this network.
        environments.append({**place, "GLOO_SOCKET_IFNAME": INTERFACE})
    return network.program, arguments, environments
