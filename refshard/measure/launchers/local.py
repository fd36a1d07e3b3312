"""All ranks on this machine, as plain processes: what ``torchrun`` starts, without its agent."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.measure.environment import capture_environment
from refshard.measure.launchers.base import (
    Launcher,
    Program,
    Ranks,
    check_fits_machine,
    rank_environment,
    started,
    worker_arguments,
)
from refshard.measure.worker import STORE_IS_HELD
from refshard.records import Environment
from refshard.specs.case import Case

ADDRESS = "127.0.0.1"


class LocalLauncher(Launcher):
    """One worker process a rank; they meet at a store of this process, on a port that the kernel chose.

    With ``source``, a checkout, ranks run the refshard that is in it instead of this one.
    """

    def __init__(self, source: Path | None = None) -> None:
        self._worker = worker_of(source)
        # Without the last, Python looks in the current folder first.
        self._source = {} if source is None else {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        arguments = worker_arguments(program, folder, self._worker)
        own = [(arguments, {**place, **self._source}) for place in local_places(program.processes, store.port)]
        with started(sys.executable, own, folder) as ranks:
            yield ranks

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        check_fits_machine(case, case.processes, oversubscribe=oversubscribe)

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        return capture_environment(threads)


def local_places(ranks: int, port: int) -> list[dict[str, str]]:
    """The variables of each rank if all are here and meet at a store of this process at ``port``."""
    sizes = {"world_size": ranks, "local_world_size": ranks}
    return [{**rank_environment(r, r, address=ADDRESS, port=port, **sizes), **STORE_IS_HELD} for r in range(ranks)]


def worker_of(source: Path | None) -> str:
    """The module that ranks run. The package was called ``harness``, and a gate still compares such revisions."""
    old = source is not None and (source / "refshard" / "harness" / "worker.py").is_file()
    return f"refshard.{'harness' if old else 'measure'}.worker"
