"""A received tensor is allocated after the communication stream has waited, and filled at once on the compute stream.

Made after https://github.com/deepseek-ai/DeepEP/issues/589: with deterministic algorithms ``torch.empty`` fills memory.
``--fixed``: the communication stream waits after the allocation. Needs two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
torch.use_deterministic_algorithms(True, warn_only=True)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compute, communication = torch.cuda.current_stream(), torch.cuda.Stream()
for _ in range(2):
    tokens = torch.ones(512, 1024, device="cuda")
    communication.wait_stream(compute)
    received = torch.empty(512, 1024, device="cuda")
    if FIXED:
        communication.wait_stream(compute)
    with torch.cuda.stream(communication):
        dist.all_to_all_single(received, tokens)
    compute.wait_stream(communication)
    model(received).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
