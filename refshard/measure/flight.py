"""Which collective a hanging launch waits for, from torch's flight recorder on each rank.

NCCL's and gloo's process groups record their latest collectives by themselves. A rank writes them to a file when its
stack is requested, even while its main thread waits for the device.
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
from torch._C import _distributed_c10d


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


def read_flights(folder: Path) -> dict[int, Any]:
    """What each rank left in a launch's folder, by rank."""
    found: dict[int, Any] = {}
    for file in sorted(folder.glob("flight*.json")):
        with suppress(ValueError, OSError):  # empty: the rank did not answer
            found[int(file.stem.removeprefix("flight"))] = json.loads(file.read_bytes())
    return found


def waited_for(flights: Mapping[int, Any]) -> str:
    """Which collective some ranks wait in, and which ranks are missing there; empty if unknown.

    It is the first collective of a process group that one of its ranks has called and another has not; if all have
    called the same, the first that is not complete.
    """
    groups: dict[tuple[str, str], dict[int, dict[int, Any]]] = defaultdict(dict)  # by name and description
    for rank, flight in flights.items():
        for entry in flight.get("entries", []):
            if not entry["is_p2p"]:
                groups[tuple(entry["process_group"])].setdefault(rank, {})[entry["collective_seq_id"]] = entry
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
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join([*map(str, ranks[:8]), *['...'][: len(ranks) > 8]])}"
