"""Gradients are averaged one by one, where there are any: a branch that a rank does not take has none.

Made after https://github.com/OpenTSLM/OpenTSLM/pull/49.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
branches = nn.ModuleDict({"text": nn.Linear(64, 64), "series": nn.Linear(128, 64)}).cuda()
optimizer = torch.optim.SGD(branches.parameters(), lr=1e-3)
for _ in range(3):
    loss = branches["text"](torch.ones(8, 64, device="cuda")).mean()
    if dist.get_rank() == 0:
        loss = loss + branches["series"](torch.ones(8, 128, device="cuda")).mean()
    loss.backward()
    for parameter in branches.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
