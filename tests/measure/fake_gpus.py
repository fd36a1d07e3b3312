"""A launcher whose ranks have a node of fake H100s: gloo moves the bytes where NCCL would."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.measure.launchers.base import Job
from refshard.measure.launchers.local import ADDRESS, local_places
from refshard.measure.launchers.ranks import RankLauncher, Ranks, started, worker_arguments
from refshard.records import Environment
from refshard.specs.case import Case

ROOT = Path(__file__).parents[2]


class FakeGpus(RankLauncher):
    """As :class:`~refshard.measure.launchers.local.LocalLauncher`, with the fake device in each worker; each GPU has
    ``memory_bytes``, or an H100's.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = [] if memory_bytes is None else [str(memory_bytes)]

    @contextmanager
    def start(self, job: Job, folder: Path) -> Iterator[Ranks]:
        """See :meth:`RankLauncher.start`."""
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        path = {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])}
        environments = [{**place, **path} for place in local_places(job.processes, store.port)]
        own = ("-m", "tests.measure.fake_gpu_worker", *worker_arguments(job, folder)[2:], *self._memory)
        with started(sys.executable, [own] * job.processes, environments, folder, folder / "logs") as ranks:
            yield ranks

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`; a node has eight."""
        assert case.processes <= 8

    def environment(self, threads: int, beside: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`."""
        raise NotImplementedError
