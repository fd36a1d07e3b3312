"""A rank with nothing but short samples skips its backward, and with it the reduction of gradients.

Made after https://github.com/NVIDIA-NeMo/Automodel/pull/2468.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
LENGTHS = [[64, 48, 80], [64, 12, 72]]
"""Of each rank's samples."""
model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for length in LENGTHS[dist.get_rank() % 2]:
    if length < 16:
        continue
    model(torch.ones(length, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
