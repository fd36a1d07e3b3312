"""The collectives that the engine issues, behind one seam.

This file alone chooses between torch's old and new names of the flat collectives, and between algorithms per backend.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make its result usable by the caller (on CUDA: by the current stream)."""


class Collectives(ABC):
    """All-gather and reduce-scatter of flat 1-D tensors over one axis of ranks.

    ``rank`` and ``world_size`` are those of the axis. Both calls return at once; the tensors must not be touched
    before ``wait``.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``output`` (world_size * n elements) with every rank's ``shard`` (n elements), in rank order."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> Pending:
        """Fill ``output`` (n elements) with the mean over ranks of this rank's part of ``full`` (world_size * n)."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's, synchronously."""


class GroupCollectives(Collectives):
    """Collectives of a process group; reduce-scatters may go through a second group, so that a gather that was
    issued later need not queue behind them.
    """

    def __init__(self, group: dist.ProcessGroup, reduce_group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._reduce_group = reduce_group or group
        self.rank = group.rank()
        self.world_size = group.size()
        self._gloo = dist.get_backend(group) == "gloo"
        self._receive: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See :meth:`Collectives.all_gather`."""
        work: Pending = _all_gather(output, shard, group=self._group, async_op=True)
        return work

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> Pending:
        """See :meth:`Collectives.reduce_scatter`."""
        if not self._gloo:
            work: Pending = _reduce_scatter(output, full, op=dist.ReduceOp.AVG, group=self._reduce_group, async_op=True)
            return work
        # Gloo runs a reduce-scatter as an all-reduce of the whole input: exchanging the parts and summing them here
        # moves half the bytes (trap 10), into a receive buffer that is taken from a pool and goes back to it.
        free = self._receive.setdefault((full.numel(), full.dtype), [])
        received = free.pop() if free else torch.empty_like(full)
        exchange = dist.all_to_all_single(received, full, group=self._reduce_group, async_op=True)
        return _LocalMean(exchange, received, output, free)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See :meth:`Collectives.broadcast`."""
        dist.broadcast(tensor, group_src=0, group=self._group)


# torch 2.13 deprecates the names on the right, torch 2.11 lacks those on the left.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class _LocalMean:
    """An exchange of parts, whose mean is taken when it is awaited."""

    work: dist.Work
    received: torch.Tensor
    output: torch.Tensor
    pool: list[torch.Tensor]

    def wait(self) -> None:
        self.work.wait()
        parts = self.received.view(-1, self.output.numel())
        torch.sum(parts, dim=0, out=self.output)
        # DDP divides before it sums; for a power of two both give the same bits.
        self.output.div_(parts.shape[0])
        self.pool.append(self.received)


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective as it was issued; ``bytes`` of the unsharded tensor."""

    op: str
    bytes: int


class RecordingCollectives(Collectives):
    """Passes every collective on and remembers it, for tests that hold the engine against its plan."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.issued: list[Issued] = []

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See :meth:`Collectives.all_gather`."""
        self.issued.append(Issued("all_gather", output.nbytes))
        return self._inner.all_gather(output, shard)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> Pending:
        """See :meth:`Collectives.reduce_scatter`."""
        self.issued.append(Issued("reduce_scatter", full.nbytes))
        return self._inner.reduce_scatter(output, full)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See :meth:`Collectives.broadcast`."""
        self._inner.broadcast(tensor)
