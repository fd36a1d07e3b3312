"""Parameters are copied from the host on a stream of their own and freed by backward. The next copy takes their memory.

Made after https://github.com/pytorch/pytorch/pull/194519. ``--fixed``: ``record_stream`` tells the allocator that the
current stream uses them.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
current, before = torch.cuda.current_stream(), torch.cuda.Stream()
on_host = [torch.randn(1024, 1024).pin_memory() for _ in range(4)]
head = nn.Linear(1024, 1, device="cuda")
optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
for _ in range(2):
    hidden = torch.ones(64, 1024, device="cuda", requires_grad=True)
    for host in on_host:
        with torch.cuda.stream(before):
            weight = host.to("cuda", non_blocking=True)
        current.wait_stream(before)
        hidden = hidden @ weight
        if FIXED:
            weight.record_stream(current)
        del weight
    head(hidden).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
