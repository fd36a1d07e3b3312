"""The loss is computed in chunks. The sum of reduced gradients still reads one whose memory the next chunk takes.

Made after https://github.com/pytorch/pytorch/pull/181218. ``--fixed``: the next chunk waits for the sum. Needs two
ranks.
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
head = nn.Linear(1024, 1024, bias=False, device="cuda")
optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
current, reduce = torch.cuda.current_stream(), torch.cuda.Stream()
chunks = torch.ones(4, 512, 1024, device="cuda")
for _ in range(2):
    total, sent = None, None
    for chunk in chunks:
        head(chunk).mean().backward()
        if sent is not None:
            current.wait_event(sent[1])
        gradient, head.weight.grad = head.weight.grad, None
        reduced = torch.empty(1024 // ranks, 1024, device="cuda")
        reduce.wait_stream(current)
        with torch.cuda.stream(reduce):
            dist.reduce_scatter_tensor(reduced, gradient)
            sent = gradient, reduce.record_event()
            total = reduced if total is None else total.add_(reduced)
        del reduced
        if FIXED:
            current.wait_stream(reduce)
    current.wait_stream(reduce)
    head.weight.grad = total.repeat(ranks, 1)
    optimizer.step()
    optimizer.zero_grad()
