"""Which collective a hanging launch waits for, from torch's flight recorder on each rank.

NCCL's and gloo's process groups record their latest collectives by themselves. A rank writes them to a file when its
stack is requested, even while its main thread waits for the device.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from refshard.analysis.hang import find_hang
from refshard.events.flight import Flight, flight_of


def flight_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its latest collectives; empty while it can still answer."""
    return folder / f"flight{rank}.json"


@contextmanager
def answering(folder: Path, group: dist.ProcessGroup, number: signal.Signals) -> Iterator[None]:
    """Let the signal, which must have a Python handler, make this rank leave its latest collectives.

    Its wake-up reaches a thread that only waits, so that nothing disturbs the measurement.
    """
    file = flight_file(folder, group.rank())
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_answer, args=(reader, number, file, dist.get_backend(group)), daemon=True)
    file.touch()
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
        file.unlink(missing_ok=True)


def _answer(reader: int, number: signal.Signals, file: Path, backend: str) -> None:
    while received := os.read(reader, 1):
        if received[0] == number:
            dump: Any = getattr(_distributed_c10d, f"_dump_{'nccl' if backend == 'nccl' else 'fr'}_trace_json", None)
            with suppress(OSError):  # a full disk
                recorded = b"{}" if dump is None else bytes(dump(includeCollectives=True, onlyActive=False))
                file.with_suffix(".tmp").write_bytes(recorded)
                file.with_suffix(".tmp").replace(file)
            return


def waited_for(folder: Path) -> str:
    """Why a launch hangs, from what its ranks left in its folder; empty if unknown."""
    found: dict[int, Flight] = {}
    for file in sorted(folder.glob("flight*.json")):
        with suppress(ValueError, OSError):  # empty: the rank did not answer
            rank = int(file.stem.removeprefix("flight"))
            found[rank] = flight_of(rank, json.loads(file.read_bytes()))
    return "; ".join(map(str, find_hang(found).mismatches))
