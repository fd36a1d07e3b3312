"""Run functions on several ranks, each a process, and collect what they return; or run a script on them.

Ranks talk over gloo, or over NCCL with a GPU each. Where this process has fake GPUs, they have such too.
"""

import os
import pickle
import runpy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from refshard.fakecuda import is_active
from refshard.measure.launchers.base import rank_environment
from tests.fakecuda.devices import module_of_this_device

Backend = Literal["gloo", "nccl"]
_HOST = "127.0.0.1"
TORCH_MODULES = (
    "torch._dynamo",  # by an optimizer's first step
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
)
_IMPORTED_ONCE = (*TORCH_MODULES, "refshard.engine.checkpoint", "refshard.measure.launchers.base")


def rank_processes() -> ForkServerContext:
    """Starts fresh processes: forked from one that has imported torch, which takes seconds, and has run nothing."""
    context: ForkServerContext = get_context("forkserver")
    device = [module_of_this_device()] if is_active() else []  # before torch
    context.set_forkserver_preload([*device, *_IMPORTED_ONCE])
    return context


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, backend: Backend = "gloo") -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a fresh process group; return the results in rank order."""
    return [results[0] for results in run_each(world_size, function, [arguments], backend)]


def run_each(
    world_size: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], backend: Backend = "gloo"
) -> list[list[Any]]:
    """Call ``function`` with the arguments of each call on every rank of one launch; return each rank's results.

    Each call has a process group of its own. Groups that are made within end with it: they hold sockets and a thread.
    """
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, store.port, folder, function, calls, backend)
        method = rank_processes().get_start_method()
        start_processes(_rank, args=arguments, nprocs=world_size, start_method=method)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    backend: Backend,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store, results = TCPStore(_HOST, port), []
    for index, arguments in enumerate(calls):
        with _group(PrefixStore(str(index), store), rank, world_size, backend):
            results.append(function(*arguments))
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(results))


def run_script(world_size: int, script: Path) -> str:
    """Run a script on every rank in the script's folder, with torchrun's variables; return what they wrote to stderr.

    Raises:
        ProcessRaisedException: a rank raised, with its traceback.
    """
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    method = rank_processes().get_start_method()
    start_processes(_script, args=(world_size, store.port, script), nprocs=world_size, start_method=method)
    return "".join((script.parent / f"{rank}.stderr").read_text() for rank in range(world_size))


def _script(rank: int, world_size: int, port: int, script: Path) -> None:
    environment = rank_environment(
        rank, rank, world_size=world_size, local_world_size=world_size, address=_HOST, port=port
    )
    os.environ.update(environment, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    os.chdir(script.parent)
    with Path(f"{rank}.stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    runpy.run_path(str(script), run_name="__main__")


@contextmanager
def _group(store: Store, rank: int, world_size: int, backend: Backend) -> Iterator[None]:
    # A rank that waits for one that went another way fails, and does not hang.
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
    try:
        yield
        # Through the store: a rank that leaves a barrier of sockets closes them on those that are still within.
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(world_size)])
    finally:
        dist.destroy_process_group()
