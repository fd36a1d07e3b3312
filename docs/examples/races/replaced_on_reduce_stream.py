"""A gradient buffer of the current stream is replaced while the reduce-scatter stream still reads the old one.

Made after https://github.com/NVIDIA/Megatron-LM/pull/6187. ``--fixed``: it is allocated on the reduce-scatter stream.
Needs two ranks.
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
current, reduce = torch.cuda.current_stream(), torch.cuda.Stream()
layers = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with torch.cuda.stream(reduce if FIXED else current):
    accumulated = {layer.weight: torch.zeros(1024, 1024, device="cuda") for layer in layers}
reduce.wait_stream(current)


def accumulate(weight: nn.Parameter) -> None:
    reduce.wait_stream(current)
    with torch.cuda.stream(reduce):
        accumulated[weight].add_(weight.grad)
        reduced = torch.empty(1024 // ranks, 1024, device="cuda")
        dist.reduce_scatter_tensor(reduced, accumulated[weight])
        accumulated[weight] = reduced


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(accumulate)
model(torch.ones(64, 1024, device="cuda")).mean().backward()
current.wait_stream(reduce)
optimizer.step()
