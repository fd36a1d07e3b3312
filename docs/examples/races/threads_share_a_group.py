"""Ranks are threads of one process. Rank 0's thread copies for all of them, on its own stream, without events.

Made after https://github.com/ROCm/pytorch/pull/3605 and https://github.com/ROCm/pytorch/pull/3612. ``--fixed``: rank
0's copies wait for the streams of the other ranks, and those wait for the copies.
"""

import sys
from threading import Barrier, Thread

import torch

FIXED = "--fixed" in sys.argv
RANKS = 2
barrier = Barrier(RANKS)
shared: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = [None] * RANKS
copied = torch.cuda.Event()


def all_gather(rank: int, gathered: torch.Tensor, shard: torch.Tensor) -> None:
    shared[rank] = gathered, shard, torch.cuda.current_stream().record_event()
    barrier.wait()
    if rank == 0:
        if FIXED:
            for _, _, issued in shared:
                issued.wait()
        for out, _, _ in shared:
            for place, (_, part, _) in enumerate(shared):
                out[place].copy_(part)
        copied.record()
    barrier.wait()
    if FIXED:
        copied.wait()


def train(rank: int) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    gather = torch.cuda.Stream()
    for _ in range(2):
        gather.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(gather):
            gathered = torch.empty(RANKS, 512, 1024, device="cuda")
            all_gather(rank, gathered, weight.detach() * 2)
            mean = gathered.mean(0)
        torch.cuda.synchronize()
        barrier.wait()
        weight.grad = mean
        optimizer.step()


threads = [Thread(target=train, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
