"""A norm of gradients returns early on a rank that has none, before the reduction that the others are in.

Made after a review in https://github.com/NVIDIA/Model-Optimizer/pull/1621.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return torch.zeros((), device="cuda")
    total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(total)
    return total.sqrt()


dense, expert = nn.Linear(64, 64, device="cuda"), nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD([*dense.parameters(), *expert.parameters()], lr=1e-3)
for _ in range(3):
    found = dense(torch.ones(8, 64, device="cuda"))
    tokens = 8 if dist.get_rank() else 0  # the expert of rank 0 has none
    if tokens:
        found = expert(found[:tokens])
    found.mean().backward()
    total_norm(expert.parameters())
    optimizer.step()
    dist.barrier()
