"""Rank 0 averages its loss over all ranks, which no other rank does: the classic ``if rank == 0``.

Made after https://github.com/pytorch/pytorch/issues/88000, where one rank alone broadcasts.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def log(step: int, loss: torch.Tensor) -> None:
    if dist.get_rank() == 0 and step % 10 == 1:
        dist.all_reduce(loss)
        print(step, loss / dist.get_world_size())


for step in range(100):
    loss = model(torch.ones(512, 1024, device="cuda")).mean()
    loss.backward()
    log(step, loss.detach())
    optimizer.step()
    optimizer.zero_grad()
