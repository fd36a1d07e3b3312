"""A hook updates parameters on the host, with a gradient whose copy to the host may still be running.

Made after https://github.com/pytorch/pytorch/pull/180666. ``--fixed``: the copy blocks the host.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
layers = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(1024, 1, device="cuda"))
optimizer = torch.optim.SGD(model[-1].parameters(), lr=1e-3)
on_host = {layer.weight: torch.zeros(1024, 1024, pin_memory=True) for layer in layers}


def update(weight: nn.Parameter) -> None:
    gradient = weight.grad.to("cpu", non_blocking=not FIXED)
    on_host[weight].add_(gradient, alpha=-1e-3)
    weight.grad = None


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(update)
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    for weight, host in on_host.items():
        weight.data.copy_(host, non_blocking=True)
    optimizer.zero_grad()
