"""A saved tensor is cloned after the copy stream has waited for the compute stream, so its copy may come too early.

Made after https://github.com/huggingface/trl/pull/7195. ``--fixed``: it is cloned before the wait.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compute, copies = torch.cuda.current_stream(), torch.cuda.Stream()
parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.untyped_storage().data_ptr() in parameters:
        return tensor
    if FIXED:
        tensor = tensor.clone()
    copies.wait_stream(compute)
    if not FIXED:
        tensor = tensor.clone()
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
    compute.wait_stream(copies)
    tensor.record_stream(compute)
    return tensor


for _ in range(2):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(torch.ones(2048, 256, device="cuda").view(512, 1024)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
