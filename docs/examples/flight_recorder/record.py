"""Make real hangs with gloo on this machine, and keep the flight recorder dumps of their ranks.

    python docs/examples/flight_recorder/record.py FOLDER [CASE]...

Each rank writes its dump after some seconds, as NCCL's watchdog does after the timeout, and ends. Paths in the dumps
are made relative, so that they are the same on every machine. A job on GPUs needs none of this: set
TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and read the files nccl_trace_rank_* that it leaves.
"""

import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.multiprocessing.spawn import start_processes

HERE = Path(__file__).parent
SECONDS = 6
WIDTH = 1024


def step(gradients: torch.Tensor) -> None:
    dist.all_reduce(gradients)


def validate(loss: torch.Tensor) -> None:
    dist.broadcast(loss, 0)


def save_checkpoint() -> None:
    time.sleep(60)


def leaves_early(rank: int) -> None:
    """Rank 3 has a batch less than the others."""
    for _ in range(3 if rank == 3 else 4):
        step(torch.ones(WIDTH))
    save_checkpoint()


def batches(rank: int) -> Iterator[torch.Tensor]:
    for number in range(100):
        if rank == 1 and number == 5:
            time.sleep(60)  # a file system that does not answer
        yield torch.ones(WIDTH)


def data_loader(rank: int) -> None:
    """Rank 1 waits for its data; the ring keeps the latest four calls."""
    for batch in batches(rank):
        step(batch)


def other_order(rank: int) -> None:
    """Rank 0 validates before the step, the others after it."""
    step(torch.ones(WIDTH))
    if rank == 0:
        validate(torch.ones(1))
        step(torch.ones(WIDTH))
    else:
        step(torch.ones(WIDTH))
        validate(torch.ones(1))


def circle(rank: int) -> None:
    """Two ranks use two groups of the same ranks in opposite orders."""
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for groups in ((one, other), (one, other) if rank == 0 else (other, one)):
        for group in groups:
            dist.all_reduce(torch.ones(WIDTH), group=group)


def chain(rank: int) -> None:
    """Rank 3 holds up rank 2, its partner in one group, and through it rank 0, in another."""
    columns, rows = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    tp = [dist.new_group(ranks) for ranks in columns][rank // 2]
    dp = [dist.new_group(ranks) for ranks in rows][rank % 2]
    for number in range(3):
        if rank == 3 and number == 2:
            save_checkpoint()
        dist.all_reduce(torch.ones(WIDTH), group=tp)
        dist.all_reduce(torch.ones(2 * WIDTH), group=dp)


def older_dump(rank: int) -> None:
    """Rank 2 wrote its dump three seconds before the others, and they went on."""
    for number in range(12):
        time.sleep(0.5)
        step(torch.ones(WIDTH))
        if rank == 0 and number == 8:
            save_checkpoint()


CASES: dict[str, tuple[Callable[[int], None], int, int]] = {
    "leaves_early": (leaves_early, 4, 2000), "data_loader": (data_loader, 3, 4), "other_order": (other_order, 3, 2000),
    "circle": (circle, 2, 2000), "chain": (chain, 4, 2000), "older_dump": (older_dump, 3, 2000),
}  # fmt: skip
"""By name: what ranks do, how many they are, and the entries that a ring keeps."""


def run(rank: int, case: str, folder: str, rendezvous: str) -> None:
    """One rank: writes its dump and ends, whatever it waits for."""
    _, ranks, _ = CASES[case]
    early = 3 if case == "older_dump" and rank == 2 else 0
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    threading.Timer(SECONDS - early, write, (Path(folder) / f"nccl_trace_rank_{rank}", bool(early))).start()
    CASES[case][0](rank)
    time.sleep(60)


def write(file: Path, goes_on: bool) -> None:
    dump = pickle.loads(
        _distributed_c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    )
    for entry in dump["entries"]:
        entry["thread_id"] = ""
        for frame in entry["frames"]:
            frame["filename"] = portable(frame["filename"])
    file.write_bytes(pickle.dumps(dump, protocol=2))
    if goes_on:
        time.sleep(SECONDS)
    os._exit(0)


def portable(path: str) -> str:
    """A file's path without the folders that differ from machine to machine."""
    library = Path(os.__file__).parent
    for folder, name in ((HERE.parent, ""), (Path(torch.__file__).parents[2], ""), (library, "/usr/lib/python3")):
        if Path(path).is_relative_to(folder):
            return str(name / Path(path).relative_to(folder))
    return path


def main(folder: Path, *cases: str) -> None:
    for case in cases or CASES:
        _, ranks, entries = CASES[case]
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(entries)
        (folder / case).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            arguments: tuple[Any, ...] = (case, str(folder / case), f"{place}/rendezvous")
            start_processes(run, arguments, nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
