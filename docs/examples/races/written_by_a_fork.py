"""A forked process writes a checkpoint from page-locked memory, which the next checkpoint's copies use again.

Made after https://github.com/NVIDIA/Megatron-LM/pull/2288: such memory is not copied on write. ``--fixed``: it is
kept until that process has ended.
"""

import os
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
writers: list[int] = []
kept: list[torch.Tensor] = []
for _ in range(2):
    model(torch.ones(512, 1024, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    staged = model.weight.detach().to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    if FIXED:
        kept.append(staged)
    writer = os.fork()
    if writer == 0:
        staged.numpy().tobytes()  # to a disk
        os._exit(0)
    writers.append(writer)
    del staged
for writer in writers:
    os.waitpid(writer, 0)
