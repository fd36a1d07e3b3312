"""The main rank evaluates alone, with the model that DDP wraps: its forward broadcasts buffers.

Made after https://github.com/huggingface/accelerate/issues/157.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(16, 64, device="cuda")).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(16, 64, device="cuda"))
    dist.barrier()
