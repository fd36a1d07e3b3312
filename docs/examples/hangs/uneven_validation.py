"""Ranks have different numbers of validation batches, and each forward gathers sharded parameters.

Made after https://github.com/pytorch/torchtitan/pull/1617.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(2)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
documents = [f"document {number}" for number in range(dist.get_rank(), 9, dist.get_world_size())]
for step in range(3):
    model(torch.ones(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        with torch.no_grad():
            losses = [model(torch.ones(8, 256, device="cuda")).mean() for _ in documents]
        dist.all_reduce(torch.stack(losses).sum())
