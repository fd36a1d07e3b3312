"""A pipeline of two ranks: each sends the next microbatch's activations before it takes what the other one sends.

Made after https://github.com/pytorch/pytorch/issues/172668, an interleaved schedule. Needs two ranks.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
stages = nn.ModuleList(nn.Linear(256, 256, device="cuda") for _ in range(2))


def take() -> torch.Tensor:
    arrived = torch.empty(8, 256, device="cuda")
    dist.recv(arrived, 1 - rank)
    return arrived


with torch.no_grad():
    if rank == 0:
        for _ in range(2):
            dist.send(stages[0](torch.ones(8, 256, device="cuda")), 1)
        results = [stages[1](take()) for _ in range(2)]
    else:
        for _ in range(2):
            dist.send(stages[0](take()), 0)
torch.cuda.synchronize()
