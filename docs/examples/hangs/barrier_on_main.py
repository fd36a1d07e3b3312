"""The main rank waits for everyone before it saves, but nobody else gets there.

Made after https://github.com/bytedance/UNO/issues/71, a script that uses Accelerate.
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
for step in range(1, 5):
    model(torch.ones(16, 64, device="cuda")).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 2 == 0:
        dist.barrier()
        torch.save(model.module.state_dict(), "/dev/null")
