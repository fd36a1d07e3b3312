"""Which collective a launch that hangs waits for: what torch's flight recorder holds on each rank when it is asked.

NCCL's and gloo's process groups keep their latest collectives by themselves. A rank leaves them in a file when it is
asked where it stands, also while its main thread waits for the device.
"""

import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

_GROUP = tuple[str, str]
"""A process group's name and description."""


def flight_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its latest collectives; there and empty as long as it could."""
    return folder / f"flight{rank}.json"


@contextmanager
def answering(folder: Path, group: dist.ProcessGroup, number: signal.Signals) -> Iterator[None]:
    """Within this, the signal has this rank leave its latest collectives. The signal must have a handler of Python's.

    Its wake-up reaches a thread that only waits, so that nothing runs beside what is measured.
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
            unfinished = file.with_suffix(".tmp")
            with suppress(OSError):  # a full disk
                unfinished.write_bytes(_recorded(backend))
                unfinished.replace(file)
            return


def _recorded(backend: str) -> bytes:
    """The flight recorder's content as JSON."""
    from torch._C import _distributed_c10d

    dump: Any = getattr(_distributed_c10d, f"_dump_{'nccl' if backend == 'nccl' else 'fr'}_trace_json", None)
    return b"{}" if dump is None else bytes(dump(includeCollectives=True, onlyActive=False))


def read_flights(folder: Path) -> dict[int, Any]:
    """What each rank left in a launch's folder, by rank."""
    found: dict[int, Any] = {}
    for file in sorted(folder.glob("flight*.json")):
        with suppress(ValueError, OSError):  # empty: the rank did not answer
            found[int(file.stem.removeprefix("flight"))] = json.loads(file.read_bytes())
    return found


def waited_for(flights: Mapping[int, Any]) -> str:
    """Which collective some ranks wait in, and which ranks are missing there, in words; empty where nothing tells.

    The first collective of a process group that one of its ranks has called and another has not is what the others wait
    for; if all have called the same, it is the first that is not complete.
    """
    groups: dict[_GROUP, dict[int, dict[int, Any]]] = defaultdict(dict)
    for rank, flight in flights.items():
        for entry in flight.get("entries", []):
            if not entry["is_p2p"]:
                name, description = entry["process_group"]
                groups[name, description].setdefault(rank, {})[entry["collective_seq_id"]] = entry
    found = (_waiting(description or name, ranks) for (name, description), ranks in groups.items())
    return "; ".join(filter(None, found))


def _waiting(group: str, ranks: Mapping[int, Mapping[int, Any]]) -> str:
    latest = {rank: max(entries) for rank, entries in ranks.items()}
    number = min(latest.values()) + 1
    inside = [rank for rank, last in latest.items() if last >= number]
    if inside:
        outside = [rank for rank in latest if rank not in inside]
        where = ranks[inside[0]].get(number)
        op = "a collective" if where is None else _named(where)
        return f"{op} (number {number} of {group}) was called by {_listed(inside)} and not by {_listed(outside)}"
    last = {rank: entries[number - 1] for rank, entries in ranks.items()}
    pending = [rank for rank, entry in last.items() if not entry["retired"] and entry["state"] != "completed"]
    if not pending:
        return ""
    return f"{_named(last[pending[0]])} (number {number - 1} of {group}) has not ended on {_listed(pending)}"


def _named(entry: Any) -> str:
    op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    sizes = " and ".join("x".join(map(str, size)) for size in entry["input_sizes"][:2])
    return f"{op} of {sizes} elements" if sizes else str(op)


def _listed(ranks: list[int]) -> str:
    words = ", ".join([*map(str, ranks[:8]), *(["..."] if len(ranks) > 8 else [])])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"
