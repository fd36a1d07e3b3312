"""A hook scales gradients on the stream on which the gradient's accumulator was made; the reduction waits for another.

Made after https://github.com/NVIDIA/Megatron-LM/issues/3670. ``--fixed``: the reduction waits for the hook's stream
too. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
main, setup, reduce = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
accumulators = []


def make_hook(weight: nn.Parameter):
    def hook(*_: object) -> None:
        weight.main_grad.add_(weight.grad)
        reduce.wait_stream(main)
        if FIXED:
            reduce.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reduce):
            dist.all_reduce(weight.main_grad)

    return hook


for weight in model.parameters():
    weight.main_grad = torch.zeros_like(weight)
setup.wait_stream(main)
with torch.cuda.stream(setup):
    for weight in model.parameters():
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(make_hook(weight))
        accumulators.append(accumulator)
main.wait_stream(setup)
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).mean().backward()
    main.wait_stream(reduce)
    for weight in model.parameters():
        weight.grad.copy_(weight.main_grad)
        weight.main_grad.zero_()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
