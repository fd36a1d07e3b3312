"""A reduced gradient is copied to the host on another stream than it was allocated on, and freed before the copy ends.

Made after https://github.com/pytorch/pytorch/pull/180665. ``--fixed``: it is kept until the next gradient, whose stream
waits for the copy. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
ranks = dist.get_world_size()
layers = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(1024, 1, device="cuda"))
optimizer = torch.optim.SGD(model[-1].parameters(), lr=1e-3)
reduce, offload = torch.cuda.Stream(), torch.cuda.Stream()
on_host = [torch.empty(1024 // ranks, 1024, pin_memory=True) for _ in layers]
kept: list[tuple[torch.Tensor, torch.cuda.Event]] = []

for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    reduce.wait_stream(torch.cuda.current_stream())
    for layer, host in zip(reversed(layers), on_host):
        with torch.cuda.stream(reduce):
            for _, copied in kept:
                copied.wait()
            kept.clear()
            reduced = torch.empty(1024 // ranks, 1024, device="cuda")
            dist.reduce_scatter_tensor(reduced, layer.weight.grad)
        offload.wait_stream(reduce)
        with torch.cuda.stream(offload):
            host.copy_(reduced, non_blocking=True)
        if FIXED:
            kept.append((reduced, offload.record_event()))
        del reduced
    torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
