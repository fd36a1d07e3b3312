"""Each rank stops by its own validation loss, so one stops earlier than the others.

Made after https://github.com/Lightning-AI/pytorch-lightning/issues/379. A dry run computes no loss, so all ranks stop
together there.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(1024, 1024).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
best = float("inf")
for _ in range(100):
    model(torch.rand(64, 1024, device="cuda")).mean().backward()
    optimizer.step()
    with torch.no_grad():
        loss = model.module(torch.rand(64, 1024, device="cuda")).mean().item()
    if loss > best:
        break
    best = loss
