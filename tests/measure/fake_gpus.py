"""A launcher whose ranks have a node of fake H100s: gloo moves the bytes where NCCL would."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.measure.launchers.base import Launcher, Program, Ranks, started, worker_arguments
from refshard.measure.launchers.local import ADDRESS, local_places
from refshard.records import Environment
from refshard.specs.case import Case

ROOT = Path(__file__).parents[2]


class FakeGpus(Launcher):
    """As :class:`~refshard.measure.launchers.local.LocalLauncher`, with the fake device in each worker; each GPU has
    ``memory_bytes``, or an H100's.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = [] if memory_bytes is None else [str(memory_bytes)]

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        """See :meth:`Launcher.start`."""
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        path = {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])}
        own = ("-m", "tests.measure.fake_gpu_worker", *worker_arguments(program, folder)[2:], *self._memory)
        places = local_places(program.processes, store.port)
        with started(sys.executable, [(own, {**place, **path}) for place in places], folder) as ranks:
            yield ranks

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        """See :meth:`Launcher.check`; a node has eight."""
        assert case.processes <= 8

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        """See :meth:`Launcher.environment`."""
        raise NotImplementedError
