"""An offloaded activation is brought back on a copy stream and freed by backward. The next copy takes its memory.

Made after https://github.com/meta-pytorch/torchtune/issues/1867. ``--fixed``: ``record_stream`` tells the allocator
that backward uses it.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
copies = torch.cuda.Stream()
parameters = {weight.data_ptr() for weight in model.parameters()}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.data_ptr() in parameters or tensor.dim() != 2 or tensor.shape != (256, 1024):
        return tensor
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        host = torch.empty(tensor.shape, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(copies)
    return host


def unpack(saved: torch.Tensor) -> torch.Tensor:
    if saved.is_cuda:
        return saved
    with torch.cuda.stream(copies):
        tensor = saved.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    if FIXED:
        tensor.record_stream(torch.cuda.current_stream())
    return tensor


for _ in range(2):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(torch.ones(256, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
