"""Activations go to a pool on the host and come back. A stream waits for itself, and overwrites the pool too early.

Made after https://github.com/pytorch/torchtitan/pull/2581: within ``torch.cuda.stream`` the current stream is that
stream, so the wait does nothing. ``--fixed``: it waits for the stream that was current before.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compute, to_host, to_device = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
pool = torch.empty(3, 256, 1024, pin_memory=True)
packed = 0


def pack(tensor: torch.Tensor) -> torch.Tensor | int:
    global packed
    if tensor.shape != pool[0].shape:
        return tensor
    place, packed = packed % len(pool), packed + 1
    with torch.cuda.stream(to_host):
        to_host.wait_stream(compute if FIXED else torch.cuda.current_stream())
        pool[place].copy_(tensor, non_blocking=True)
    tensor.record_stream(to_host)
    return place


def unpack(saved: torch.Tensor | int) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    to_device.wait_stream(to_host)
    with torch.cuda.stream(to_device):
        tensor = pool[saved].to("cuda", non_blocking=True)
    compute.wait_stream(to_device)
    tensor.record_stream(compute)
    return tensor


for _ in range(2):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(torch.ones(256, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
