"""Ranks as threads that share one device, and collectives between them that are as late as NCCL's.

torch's threaded process group copies on the first rank's stream, whichever that is, and orders no other: races between
streams would show at random, or not at all. Here each rank copies on its own current stream, ordered by events with
those of its peers, and may be made to sleep before and after. Nothing waits on the host, on a GPU.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from refshard.engine.collectives import Collectives, Pending, Together

Pause = Callable[[], None]


def no_pause() -> None:
    """Take no time."""


def pause_of(device: torch.device) -> Pause:
    """Takes a while: about a millisecond of the current stream's time, or a moment of the host's."""
    if device.type == "cuda":
        return lambda: torch.cuda._sleep(2_000_000)
    return lambda: time.sleep(1e-4)


def hold() -> None:
    """Keep the current stream of a GPU busy for much longer than the host takes for a unit: some 50 ms."""
    torch.cuda._sleep(100_000_000)


class Table:
    """Where the ranks of one axis meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=600)
        self.brought: list[Any] = [None] * size


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place at a table."""

    table: Table
    place: int

    def share(self, value: object) -> list[Any]:
        """What every rank brings, in rank order; all must call."""
        self.table.brought[self.place] = value
        self.table.barrier.wait()
        everything = list(self.table.brought)
        self.table.barrier.wait()
        return everything


class ThreadCollectives(Collectives):
    """Collectives between threads. A seat that is None is that of an axis of one rank. ``pause`` slows each down."""

    def __init__(self, shards: Seat | None, replicas: Seat | None, device: torch.device, pause: Pause) -> None:
        self._shards, self._replicas, self.device, self._pause = shards, replicas, device, pause
        self.rank = shards.place if shards else 0
        self.world_size = shards.table.size if shards else 1
        self.replicas = replicas.table.size if replicas else 1

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._exchange(self._shards, output, shard, torch.cat)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        own = slice(self.rank * output.numel(), (self.rank + 1) * output.numel())
        seat = self._shards or self._replicas
        return self._exchange(seat, output, full, lambda parts: _sum([part[own] for part in parts]))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._exchange(self._replicas, tensor, tensor, _sum)

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        assert self._shards is not None
        splits = self._shards.share(list(sent))
        return self._exchange(
            self._shards,
            output,
            given,
            lambda all_given: torch.cat([t.split(split)[self.rank] for t, split in zip(all_given, splits)]),
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        for seat in (self._replicas, self._shards):
            self._exchange(seat, tensor, tensor, lambda tensors: tensors[0])

    def reduce_over_shards(self, tensor: torch.Tensor, op: str) -> None:
        combine = _sum if op == "sum" else lambda tensors: torch.stack(tensors).amax(0)
        self._exchange(self._shards, tensor, tensor, combine)

    def all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        for seat in (self._shards, self._replicas):
            self._exchange(seat, tensor, tensor, lambda tensors: torch.stack(tensors).amax(0))
        return Together(())

    def _exchange(
        self,
        seat: Seat | None,
        target: torch.Tensor,
        source: torch.Tensor,
        combine: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> Pending:
        """Write into ``target`` what ``combine`` makes of all ranks' sources, once all have read them."""
        self._pause()
        sources = self._meet(seat, source)
        result = combine(sources)
        if any(result.data_ptr() == one.data_ptr() for one in sources):
            result = result.clone()  # which its rank writes over once all have met
        self._meet(seat, None)
        target.copy_(result)
        self._pause()
        return Together(())

    def _meet(self, seat: Seat | None, value: Any) -> list[Any]:
        """What all ranks bring; the current stream goes on after those that they brought it on."""
        if seat is None:
            return [value]
        event = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        everything = seat.share((value, event))
        for _, other in everything:
            if other is not None:
                torch.cuda.current_stream().wait_event(other)
        return [brought for brought, _ in everything]


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def run_threads(size: int, function: Callable[[int], Any], device: torch.device, tables: list[Table]) -> list[Any]:
    """Call ``function(rank)`` in a thread for each rank, on a stream of its own; return the results in rank order."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        own_stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        # A device has but one backward thread: the ranks would wait for each other in it for ever.
        with torch.autograd.set_multithreading_enabled(False), own_stream:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                failures.append(error)
                for table in tables:
                    table.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results
