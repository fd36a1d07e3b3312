"""All ranks on this machine, as plain processes: what ``torchrun`` starts, without its agent."""

import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.measure.environment import capture_environment
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome, check_fits_machine
from refshard.measure.launchers.ranks import rank_environment, run_ranks, worker_arguments
from refshard.measure.meeting import STORE_IS_HELD
from refshard.records import Environment
from refshard.specs.case import CaseSpec

_ADDRESS = "127.0.0.1"


class LocalLauncher(Launcher):
    """One worker process a rank; they meet at a store of this process, on a port that the kernel chose.

    With ``source``, a checkout, ranks run the refshard that is in it instead of this one.
    """

    def __init__(self, source: Path | None = None) -> None:
        # Without the last, Python looks in the current folder first.
        self._source = {} if source is None else {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}

    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`."""
        ranks = job.processes
        store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        environments = [
            {
                **rank_environment(
                    rank, rank, world_size=ranks, local_world_size=ranks, address=_ADDRESS, port=store.port
                ),
                **STORE_IS_HELD,
                **self._source,
            }
            for rank in range(ranks)
        ]
        arguments = [worker_arguments(job, folder)] * ranks
        with Interruption() as interruption:
            return run_ranks(sys.executable, arguments, environments, job, folder, on_progress, interruption)

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`."""
        check_fits_machine(case, case.processes, oversubscribe=oversubscribe)

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`."""
        return capture_environment(threads)
