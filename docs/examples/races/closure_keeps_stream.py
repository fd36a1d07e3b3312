"""A delayed weight gradient runs on the stream that was current when it was put off, not on the one that runs it.

Made after https://github.com/NVIDIA/TransformerEngine/pull/3089. ``--fixed``: the stream is looked up when the gradient
is computed. Needs two ranks.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
weight = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=1e-3)
gradient = torch.zeros_like(weight)
current, delayed = torch.cuda.current_stream(), torch.cuda.Stream()


def put_off(batch: torch.Tensor, grad_out: torch.Tensor) -> Callable[[], None]:
    captured = torch.cuda.current_stream()

    def compute() -> None:
        with torch.cuda.stream(torch.cuda.current_stream() if FIXED else captured):
            torch.mm(grad_out.t(), batch, out=gradient)

    return compute


for _ in range(2):
    batch = torch.ones(256, 1024, device="cuda")
    grad_out = torch.ones_like(batch @ weight.detach().t())
    compute = put_off(batch, grad_out)
    delayed.wait_stream(current)
    with torch.cuda.stream(delayed):
        compute()
        dist.all_reduce(gradient)
    current.wait_stream(delayed)
    weight.grad = gradient.clone()
    optimizer.step()
