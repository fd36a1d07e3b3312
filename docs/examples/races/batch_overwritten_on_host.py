"""The host fills its page-locked batch again while the copy of the one before may still read it.

Made after https://github.com/pytorch/pytorch/issues/126946. ``--fixed``: the host waits for the copy first.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
host, copied = torch.empty(512, 1024, pin_memory=True), torch.cuda.Event()
for step in range(3):
    if FIXED:
        copied.synchronize()
    host.fill_(step)
    batch = host.to("cuda", non_blocking=True)
    copied.record()
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
