"""The main rank saves for longer than the others wait for it.

Made after https://github.com/meta-pytorch/torchtune/issues/2093. The calls fit together: only time is short.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", timeout=timedelta(seconds=1))
model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        time.sleep(2)  # the state dict goes to a slow disk
    dist.barrier()
