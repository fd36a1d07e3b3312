"""Gradients are copied into one bucket from two streams of backward. The reduction waits for the last one only.

Made after https://github.com/deepspeedai/DeepSpeed/issues/8061. ``--fixed``: it waits for all streams that wrote into
the bucket. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
branches = [nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(2)]
weights = [branch.weight for branch in branches]
optimizer = torch.optim.SGD(weights, lr=1e-3)
main = torch.cuda.current_stream()
streams, reduce = [torch.cuda.Stream() for _ in branches], torch.cuda.Stream()
bucket = torch.empty(2, 1024, 1024, device="cuda")
producers: list[torch.cuda.Stream] = []


def fill(weight: nn.Parameter) -> None:
    place = 0 if weight is weights[0] else 1
    bucket[place].copy_(weight.grad)
    producers.append(torch.cuda.current_stream())
    if len(producers) < len(weights):
        return
    for producer in producers if FIXED else producers[-1:]:
        reduce.wait_stream(producer)
    producers.clear()
    with torch.cuda.stream(reduce):
        bucket.div_(dist.get_world_size())
        dist.all_reduce(bucket)


for weight in weights:
    weight.register_post_accumulate_grad_hook(fill)
for _ in range(2):
    batch, out = torch.ones(64, 1024, device="cuda"), []
    for branch, stream in zip(branches, streams):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            out.append(branch(batch).mean())
        main.wait_stream(stream)
    (out[0] + out[1]).backward()
    main.wait_stream(reduce)
    for weight, averaged in zip(weights, bucket):
        weight.grad.copy_(averaged)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for stream in (*streams, reduce):
        stream.wait_stream(main)
