"""Rank 0 reduces twice as many elements as the others.

Made after https://github.com/pytorch/pytorch/issues/97191.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
elements = 100 * 2**20
if dist.get_rank() == 0:
    elements *= 2
values = torch.ones(elements, device="cuda")
dist.all_reduce(values)
torch.cuda.synchronize()
