"""A tensor of one stream is reduced and freed on a second. Its own stream, which has not waited, uses its memory again.

Made after https://github.com/pytorch/pytorch/issues/188655: torch's NCCL group keeps a tensor until the stream that
called it has waited. ``--fixed``: the tensor's own stream waits too. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layers = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
current, side = torch.cuda.current_stream(), torch.cuda.Stream()
averaged = {layer.weight: torch.empty(1024, 1024, device="cuda") for layer in layers}


def average(weight: nn.Parameter) -> None:
    scaled = weight.grad / dist.get_world_size()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work = dist.all_reduce(scaled, async_op=True)
        work.wait()
        averaged[weight].copy_(scaled)
    if FIXED:
        current.wait_stream(side)


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(average)
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    current.wait_stream(side)
    for layer in layers:
        layer.weight.grad.copy_(averaged[layer.weight])
    optimizer.step()
    optimizer.zero_grad()
