"""The engine's exchanges over gloo: what they are announced as, and its reduce-scatter as FSDP2 takes one."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from refshard.engine.collectives import GroupCollectives, piece_length


def announce_exchange(part: int, itemsize: int, world_size: int) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of the calls that exchange a part of ``part`` elements with each other rank."""
    length = piece_length(part, itemsize)
    for _ in range(world_size - 1):
        yield from (("all_to_all", itemsize * min(length, part - at)) for at in range(0, part, length))


class ExchangeAndSum(ReduceScatter):
    """The engine's reduce-scatter over gloo, awaited where it is issued."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._collectives = GroupCollectives(group)

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
        self._collectives.reduce_scatter(output_tensor, input_tensor).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
