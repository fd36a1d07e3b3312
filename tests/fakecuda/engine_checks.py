"""The engine on fake GPUs, for :mod:`tests.fakecuda.test_engine`: process groups, and memory that runs out."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

import refshard
from refshard.engine.comm_memory import CommMemory
from refshard.engine.local_part import LocalPart
from refshard.engine.placement import MODES
from refshard.errors import UnsupportedError
from refshard.measure.rank import describe, state_of
from refshard.measure.trainer import Trainer
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.strategies import make_strategy
from tests.fakecuda.child import check

DIM, BLOCKS = 1760, 3
"""12 MiB each: a segment of the caching allocator of their own, which goes back to the device as a whole."""
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl", "gloo")
MEMORIES: tuple[CommMemory, ...] = ("group", "symmetric")
CASES = [("fsdp", "forward"), ("fsdp", "backward"), ("zero2", "backward"), ("yafsdp", "backward")]
"""Who asks for memory: a gather, a gather in autograd's thread, a gradient slot, autograd for a gradient."""


def meet(name: str, backend: str) -> None:
    """Make the default process group, through keys of its own: a store keeps those of groups that are gone."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = PrefixStore(name, TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))


def count_groups(backend: str) -> dict[str, Any]:
    """How many process groups there are after each of three models, and once all groups are destroyed."""
    meet(f"groups of {backend}", backend)
    counts = []
    for _ in range(3):
        model = refshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda(), blocks=["0", "1"])
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()
    return {"counts": counts, "left": len(dist.distributed_c10d._world.pg_map)}


globals().update({f"groups of {backend}": check(partial(count_groups, backend)) for backend in BACKENDS})


@check
def memory_that_this_nccl_lacks() -> list[list[str]]:
    """What the engine and FSDP2 say of the process group's memory and of symmetric memory, in each mode or strategy."""
    meet("comm memory", "nccl")
    group = dist.group.WORLD
    assert group is not None
    said = [[_refused(partial(_shard_through, memory, mode)) for mode in MODES] for memory in MEMORIES]
    for memory, row in zip(MEMORIES, said):
        case = Case.of(strategy="fsdp2", model="llama-mini", gpus=2, global_batch=2, seq_len=8, comm_memory=memory)
        wrap = partial(Trainer, case, load_model("llama-mini"), make_strategy("fsdp2"), group, torch.device("cuda", 0))
        row.append(_refused(wrap))
    dist.destroy_process_group()
    return said


def _shard_through(memory: CommMemory, mode: str) -> nn.Module:
    return refshard.shard(nn.Sequential(nn.Linear(4, 4)).cuda(), blocks=["0"], mode=mode, comm_memory=memory)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return ""


@check
def init() -> str:
    meet("memory", "nccl")
    return dist.get_backend()


@contextmanager
def filled() -> Iterator[None]:
    """Hardly any memory is left, nor will more come free."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (4 << 20), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()  # else it would be split, and what is left of it found by later allocations


def make_model(mode: str) -> nn.Module:
    gc.collect()  # the last model: it and its hooks refer to each other
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh()) for _ in range(BLOCKS)))
    return refshard.shard(blocks.cuda(), mode=mode, blocks=[str(index) for index in range(BLOCKS)])


def make_rows(step: int) -> torch.Tensor:
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(step)).cuda()


def try_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, full_in: str) -> dict[str, Any]:
    """A step, whose forward or backward (``full_in``) finds no memory: its loss, or what it raises."""
    try:
        with filled() if full_in == "forward" else nullcontext():
            loss = model(make_rows(step)).square().mean()
        with filled() if full_in == "backward" else nullcontext():
            loss.backward()
    except BaseException as error:
        optimizer.zero_grad()
        return {"state": state_of(error), "error": describe(error)}
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.item()}


@check
def backwards_that_raise() -> dict[str, list[int]]:
    """How many parameters a model shows sharded right after each backward that raised, by mode.

    Autograd's thread may still hold the backward then.
    """
    found: dict[str, list[int]] = {}
    for mode in ("zero1", "fsdp", "yafsdp"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))).cuda()
        model.get_submodule("1.0").register_forward_hook(lambda _, __, out: out.register_hook(_fail) and None)
        refshard.shard(model, mode=mode, blocks=["0", "1", "2"])
        found[mode] = []
        for _ in range(40):
            with suppress(ValueError):
                model(torch.ones(2, 8, device="cuda")).sum().backward()
            found[mode].append(sum(isinstance(p, LocalPart) for p in model.parameters()))
    return found


def _fail(_: torch.Tensor) -> None:
    raise ValueError("told to")


def left_over(before: int) -> int:
    """Bytes allocated beyond ``before`` once autograd's threads, which may hold a backward that raised, let go."""
    for _ in range(100):
        gc.collect()
        if (left := torch.cuda.memory_allocated() - before) == 0:
            break
        time.sleep(0.1)
    return left


def runs_out(mode: str, full_in: str) -> dict[str, Any]:
    """Both ranks run out of memory in the third step, have it back, and do the step again."""
    model = make_model(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [try_step(model, optimizer, step, "").get("loss") for step in range(2)]
    before = torch.cuda.memory_allocated()
    failed = try_step(model, optimizer, 2, full_in)
    return {
        "failed": failed,
        "left": left_over(before),
        "losses": [*losses, try_step(model, optimizer, 2, "").get("loss")],
    }


@check
def never_runs_out() -> list[float]:
    """The losses of the same steps where nothing fails."""
    model = make_model("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [try_step(model, optimizer, step, "")["loss"] for step in range(3)]


globals().update({f"{mode} {where}": check(partial(runs_out, mode, where)) for mode, where in CASES})


@check
def one_rank_runs_out() -> dict[str, Any]:
    """The second rank runs out of memory, and its process ends. Last, because no group survives it."""
    model = make_model("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        try_step(model, optimizer, step, "")
    return try_step(model, optimizer, 2, "forward" if dist.get_rank() == 1 else "")
