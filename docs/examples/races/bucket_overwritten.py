"""Two buffers take turns as the bucket of gradients. Backward fills one again while its reduction still runs.

Made after https://github.com/deepspeedai/DeepSpeed/pull/5606. ``--fixed``: backward waits for earlier reductions where
a reduction starts. Needs two ranks.
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
reduce = torch.cuda.Stream()
buckets = [torch.empty(1024, 1024, device="cuda") for _ in range(2)]
averaged = {layer.weight: torch.empty(1024, 1024, device="cuda") for layer in layers}
filled = 0


def fill(weight: nn.Parameter) -> None:
    global filled
    bucket = buckets[filled % 2]
    filled += 1
    bucket.copy_(weight.grad)
    reduce.wait_stream(torch.cuda.current_stream())
    if FIXED:
        torch.cuda.current_stream().wait_stream(reduce)
    with torch.cuda.stream(reduce):
        dist.all_reduce(bucket)
        averaged[weight].copy_(bucket)


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(fill)
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    torch.cuda.current_stream().wait_stream(reduce)
    for layer in layers:
        layer.weight.grad.copy_(averaged[layer.weight])
    optimizer.step()
    optimizer.zero_grad()
