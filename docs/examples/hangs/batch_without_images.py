"""A batch without images skips the vision tower on its rank, so this rank gathers other parameters than the rest.

Made after https://github.com/2U1/Phi3-Vision-Finetune/issues/41, which trains with DeepSpeed's ZeRO-3.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Model(nn.Module):
    """Text, and images if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(512, 256, device="cuda")
        self.text = nn.Linear(256, 256, device="cuda")
        self.head = nn.Linear(256, 64, device="cuda")

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        found = self.text(text)
        return self.head(found if images is None else found + self.vision(images))


model = Model()
for part in model.children():
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    with_images = step != 1 or dist.get_rank() != 1  # one batch of one rank is text only
    images = torch.ones(8, 512, device="cuda") if with_images else None
    model(torch.ones(8, 256, device="cuda"), images).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
