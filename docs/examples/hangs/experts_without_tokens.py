"""Experts without tokens do not run, so ranks gather the parameters of different experts.

Made after https://github.com/huggingface/transformers/issues/30277, which trains with ZeRO-3. A dry run assumes a
routing (``--routing``) in place of the one that the router computes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Mixture(nn.Module):
    """Four experts, one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(512, 4, device="cuda")
        self.experts = nn.ModuleList(nn.Linear(512, 512, device="cuda") for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        chosen = self.router(tokens).topk(1).indices.flatten()
        result = tokens.clone()
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().flatten()
            if len(where):
                result[where] = expert(tokens[where])
        return result


model = Mixture()
for expert in model.experts:
    fully_shard(expert)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.rand(16, 512, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
