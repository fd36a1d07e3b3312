"""Cases that end badly on purpose, to test what runs the cases. They are no part of the corpus."""

import os
import signal
import time

import torch
import torch.distributed as dist

from refshard.errors import EngineError
from tests.distributed.cases.case import PLAIN, case
from tests.distributed.cases.models import Stack, train
from tests.distributed.cases.sides import Side


@case(variants=PLAIN)
def is_right(side: Side) -> None:
    train(side, side.shard(Stack()))


@case(variants=PLAIN)
def is_wrong_on_one_rank(side: Side) -> None:
    side.log("rank", float(side.rank == 1))


@case(variants=PLAIN)
def dies_on_one_rank(side: Side) -> None:
    if side.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if side.world_size > 1:
        dist.barrier()


@case(variants=PLAIN)
def waits_for_nobody_on_one_rank(side: Side) -> None:
    if side.world_size > 1 and side.rank == 0:
        dist.barrier()


@case(variants=PLAIN)
def raises_on_one_rank(side: Side) -> None:
    """The other waits for it, and fails for its own reason, later."""
    if side.rank == 1:
        raise KeyError("the cause")
    if side.world_size > 1:
        dist.barrier()


@case(variants=PLAIN, refuses="a reason")
def is_refused(side: Side) -> None:
    if side.world_size > 1:
        raise EngineError("for a reason")


@case(variants=PLAIN)
def never_ends(side: Side) -> None:
    """Without any collective, so that no time limit of theirs helps."""
    while side.rank == 1:
        time.sleep(0.1)


@case(variants=PLAIN)
def races(side: Side) -> None:
    """On a GPU: one stream writes what another reads, and neither waits. The values are right, by luck."""
    x = torch.zeros(4, device=side.device)
    if side.device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
    else:
        x.add_(1)
    side.log("sum", x.sum())


CASES = {
    found.name: found
    for found in (
        is_right,
        is_wrong_on_one_rank,
        dies_on_one_rank,
        waits_for_nobody_on_one_rank,
        raises_on_one_rank,
        is_refused,
        never_ends,
        races,
    )
}
