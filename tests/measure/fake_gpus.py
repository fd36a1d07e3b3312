"""A launcher whose ranks have a node of fake H100s: gloo moves the bytes where NCCL would."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.launchers.ranks import rank_environment, run_ranks, worker_arguments
from refshard.measure.meeting import STORE_IS_HELD
from refshard.records import Environment
from refshard.specs.case import CaseSpec

ROOT = Path(__file__).parents[2]


class FakeGpus(Launcher):
    """As :class:`~refshard.measure.launchers.local.LocalLauncher`, with the fake device in each worker; each GPU has
    ``memory_bytes``, or an H100's.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = [] if memory_bytes is None else [str(memory_bytes)]

    def launch(self, job: Job, folder: Path, on_progress: Callable[[str], None]) -> LaunchOutcome:
        """See :meth:`Launcher.launch`."""
        ranks = job.processes
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environments = [
            {
                **rank_environment(
                    rank, rank, world_size=ranks, local_world_size=ranks, address="127.0.0.1", port=store.port
                ),
                **STORE_IS_HELD,
                "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
            }
            for rank in range(ranks)
        ]
        own = ["-m", "tests.measure.fake_gpu_worker", *worker_arguments(job, folder)[2:], *self._memory]
        with Interruption() as interruption:
            return run_ranks(sys.executable, [tuple(own)] * ranks, environments, job, folder, on_progress, interruption)

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`; a node has eight."""
        assert case.processes <= 8

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`."""
        raise NotImplementedError
