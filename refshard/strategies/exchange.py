"""Exchanges over gloo: what they are announced as, and a reduce-scatter for FSDP2 made of them.

Gloo itself runs a reduce-scatter as a full all-reduce.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from refshard.engine.collectives import exchange, piece_length


def announce_exchange(part: int, itemsize: int, world_size: int) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of the calls that exchange a part of ``part`` elements with each other rank."""
    length = piece_length(part, itemsize)
    for _ in range(world_size - 1):
        yield from (("all_to_all", itemsize * min(length, part - at)) for at in range(0, part, length))


class ExchangeAndSum(ReduceScatter):
    """A reduce-scatter as exchanges of parts and a local sum, for gloo; one receive buffer per size is kept."""

    def __init__(self) -> None:
        self._received: dict[int, torch.Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for FSDP2 to communicate through."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (world_size * n elements) into ``output_tensor`` (n elements)."""
        numel, size, rank = output_tensor.numel(), group.size(), group.rank()
        received = self._received.get(numel)
        if received is None:
            received = self._received[numel] = input_tensor.new_empty(size - 1, numel)
        parts = input_tensor.view(size, numel)
        works = [
            piece
            for step in range(1, size)
            for piece in exchange(parts[(rank + step) % size], received[step - 1], step, group)
        ]
        for work in works:
            work.wait()
        total = parts[rank]
        for part in received:
            total = torch.add(total, part, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)
        return None
