"""A pipeline stage frees its output after it has begun to send it, and the allocator gives the memory away.

Made after https://github.com/NVIDIA/Megatron-LM/pull/4047. ``--fixed``: it waits for the send first. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layer = nn.Linear(1024, 1024, bias=False, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
for _ in range(2):
    sent = []
    for _ in range(3):
        output = layer(torch.ones(256, 1024, device="cuda"))
        send = dist.isend(output, 1)
        if FIXED:
            send.wait()
        output.untyped_storage().resize_(0)
        sent.append((output, send))
    for output, send in sent:
        send.wait()
        torch.autograd.backward(output, torch.ones(256, 1024, device="cuda"))
    optimizer.step()
    optimizer.zero_grad()
