"""Metrics are reduced one by one, and ranks have different ones.

Made after https://github.com/Lightning-AI/pytorch-lightning/issues/19106.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
classes = ["cat", "dog"] if dist.get_rank() == 0 else ["cat"]  # those in this rank's samples
for _ in range(3):
    loss = model(torch.ones(8, 64, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    metrics = {f"loss of {name}": loss.detach().clone() for name in classes}
    for value in metrics.values():
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
