"""The microbatch that reduces gradients is chosen by a condition that one rank never meets.

Made after https://github.com/huggingface/picotron/pull/5, where a pipeline stage never synchronised.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
warm_up = dist.get_rank()  # microbatches before the steady state, by stage
for _ in range(2):
    for microbatch in range(2):
        last = microbatch == 1 - warm_up
        with nullcontext() if last and not warm_up else model.no_sync():
            model(torch.ones(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
