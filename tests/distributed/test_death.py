"""A rank that dies: the others end with an error that names what they were waiting for, and no process is left."""

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import refshard
from refshard.engine.placement import MODES
from refshard.errors import EngineError
from tests.distributed.ranks import rank_processes
from tests.engine.fakes import Net, loss_of, make_batch, make_net

pytestmark = pytest.mark.processes

TIMEOUT_S = 20
VICTIM = 1
UNITS = r"(embed|layers\.\d|norm\+head)"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def stall() -> None:
    """Live on, and take no part: the group's timeout must end the others."""
    time.sleep(600)


def die_in_forward(model: Net, die: Callable[[], None]) -> None:
    model.layers[1].register_forward_pre_hook(lambda *_: die())


def die_in_backward(model: Net, die: Callable[[], None]) -> None:
    def watch(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: die())

    model.layers[1].register_forward_hook(watch)


def die_between_steps(model: Net, die: Callable[[], None]) -> None:
    die()


def work(
    rank: int,
    world_size: int,
    folder: Path,
    mode: str,
    steps: int,
    when: Callable[[Net, Callable[[], None]], None],
    die: Callable[[], None],
    timeout_s: int,
) -> None:
    """Train ``steps`` steps on every rank; then one dies, and the others write down what they are told."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    model = make_net()
    refshard.shard(model, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(steps + 3):
            if step == steps and rank == VICTIM:
                when(model, die)
            loss_of(model, make_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except EngineError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    # Gloo's threads may still be waiting for the dead rank; there is nothing left to close in order.
    os._exit(0)


def told(
    folder: Path,
    world_size: int,
    mode: str,
    steps: int,
    when: Callable[[Net, Callable[[], None]], None],
    die: Callable[[], None],
    timeout_s: int = TIMEOUT_S,
) -> dict[int, str]:
    """What each survivor was told; every process has ended by then."""
    context = rank_processes()
    arguments = (world_size, folder, mode, steps, when, die, timeout_s)
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world_size)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank != VICTIM:
                process.join(3 * TIMEOUT_S)  # the start of a process is not the group's time
                assert process.exitcode == 0, f"rank {rank} waits for the dead one"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {r: (folder / f"{r}.txt").read_text() for r in range(world_size) if r != VICTIM}


@pytest.mark.parametrize(
    ("mode", "when", "die"),
    [
        ("fsdp", die_in_forward, kill),
        ("yafsdp", die_in_backward, leave),
        ("replicate", die_in_backward, kill),  # its ranks are all the first of their shard axis
    ],
)
def test_survivors_name_the_unit_and_the_collective(
    tmp_path: Path, mode: str, when: Callable[[Net, Callable[[], None]], None], die: Callable[[], None]
) -> None:
    messages = told(tmp_path, 3, mode, 2, when, die)
    assert messages.keys() == {0, 2}
    kinds = "all_gather|reduce_scatter" if MODES[mode].optimizer == "shard" else "all_reduce"
    for rank, message in messages.items():
        expected = rf"^({kinds}) of unit '{UNITS}' failed on rank {rank}; another rank has probably ended: "
        assert re.search(expected, message), message


def test_a_death_between_steps_is_told_by_the_check_of_the_order(tmp_path: Path) -> None:
    """The order that step 0 observed is compared before step 1 gathers anything."""
    messages = told(tmp_path, 2, "zero1", 1, die_between_steps, kill)
    assert messages[0].startswith(
        "all_reduce that checks agreement failed on rank 0; another rank has probably ended: "
    )


def test_a_rank_that_stalls_is_given_up_after_the_groups_timeout(tmp_path: Path) -> None:
    messages = told(tmp_path, 2, "zero2", 2, die_in_forward, stall, timeout_s=3)
    assert " of unit '" in messages[0]
    assert "failed on rank 0; another rank has probably ended: " in messages[0]
