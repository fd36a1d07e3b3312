"""Run a function on several gloo ranks, each a process, and collect what they return."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a fresh process group; return the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(world_size, folder, function, arguments), nprocs=world_size)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", world_size)
    # A rank that waits for one that went another way fails, and does not hang.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    try:
        result = function(*arguments)
        # Through the store: a rank that leaves a barrier of sockets closes them on those that are still within.
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(world_size)])
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
