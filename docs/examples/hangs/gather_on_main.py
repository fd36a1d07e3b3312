"""Predictions of all ranks are gathered under ``if main``, so only one rank gathers.

Made after https://github.com/huggingface/accelerate/issues/2785.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(64, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(2):
    predicted = model(torch.ones(16, 64, device="cuda"))
    predicted.mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        everywhere = torch.empty(16 * dist.get_world_size(), 8, device="cuda")
        dist.all_gather_into_tensor(everywhere, predicted.detach())
        print(epoch, everywhere.shape)
