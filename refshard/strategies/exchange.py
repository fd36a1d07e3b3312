"""A reduce-scatter for FSDP2 over gloo, which itself runs one as a full all-reduce."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class ExchangeAndSum(ReduceScatter):
    """A reduce-scatter as ``all_to_all_single`` and a local sum, for gloo; one receive buffer per size is kept."""

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
        received = self._received.get(input_tensor.numel())
        if received is None:
            received = self._received[input_tensor.numel()] = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
