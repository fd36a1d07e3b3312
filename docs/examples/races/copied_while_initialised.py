"""A wrapper copies parameters into one buffer on a stream of its own, which does not wait for their initialisation.

Made after https://github.com/NVIDIA/Megatron-LM/issues/2044 and https://github.com/NVIDIA/Megatron-LM/pull/2652.
``--fixed``: that stream waits for the current one, and the current one waits for it.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)))
current, side = torch.cuda.current_stream(), torch.cuda.Stream()
buffer = torch.empty(3, 1024, 1024, device="cuda")
if FIXED:
    side.wait_stream(current)
with torch.cuda.stream(side):
    for layer, part in zip(model, buffer):
        part.copy_(layer.weight.detach())
        layer.weight.data = part
if FIXED:
    current.wait_stream(side)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
