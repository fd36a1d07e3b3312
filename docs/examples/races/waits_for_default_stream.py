"""Gradients are reduced once the default stream is done with them, but backward made them on another stream.

Made after https://github.com/deepspeedai/DeepSpeed/pull/7898. ``--fixed``: the reduction waits for the stream that
backward runs on. Needs two ranks.
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
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compute, reduce = torch.cuda.Stream(), torch.cuda.Stream()
buckets = [torch.empty(1024, 1024, device="cuda") for _ in layers]
partitions = [torch.empty(1024 // ranks, 1024, device="cuda") for _ in layers]
places = {layer.weight: place for place, layer in enumerate(layers)}


def reduce_scatter(weight: nn.Parameter) -> None:
    reduce.wait_stream(torch.cuda.current_stream() if FIXED else torch.cuda.default_stream())
    with torch.cuda.stream(reduce):
        bucket = buckets[places[weight]]
        bucket.copy_(weight.grad)
        dist.reduce_scatter_tensor(partitions[places[weight]], bucket)


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(reduce_scatter)
for _ in range(2):
    compute.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(compute):
        model(torch.ones(64, 1024, device="cuda")).mean().backward()
    torch.cuda.current_stream().wait_stream(compute)
    torch.cuda.current_stream().wait_stream(reduce)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
