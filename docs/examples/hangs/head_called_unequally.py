"""A sharded head runs once for each object of a sample, and samples have different numbers of objects.

Made after https://github.com/deepspeedai/DeepSpeed/issues/7998, which trains with ZeRO-3.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Detector(nn.Module):
    """A body, and a head for each object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256, device="cuda")
        self.head = nn.Linear(256, 16, device="cuda")

    def forward(self, image: torch.Tensor, objects: int) -> torch.Tensor:
        found = self.body(image)
        return torch.stack([self.head(found).sum() for _ in range(objects)]).sum()


model = Detector()
fully_shard(model.body)
fully_shard(model.head, reshard_after_forward=True)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.ones(8, 256, device="cuda"), objects=1 + 2 * (dist.get_rank() == 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
