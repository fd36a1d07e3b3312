"""A property that broadcasts is read on the main rank only.

Made after https://github.com/Lightning-AI/pytorch-lightning/issues/18148, where it is the folder of logs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Trainer:
    """Knows where logs go."""

    @property
    def log_dir(self) -> str:
        """The folder that rank 0 has chosen."""
        folder = [f"logs/{os.getpid()}" if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder, src=0)
        return folder[0]


trainer = Trainer()
if dist.get_rank() == 0:
    print(trainer.log_dir)
model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).mean().backward()
    optimizer.step()
