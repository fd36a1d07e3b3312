"""Two ranks send to each other before either receives.

Made after https://github.com/NVIDIA/nccl/issues/479. Needs two ranks.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
other = 1 - dist.get_rank()
mine, theirs = torch.ones(2**20, device="cuda"), torch.empty(2**20, device="cuda")
dist.send(mine, other)
dist.recv(theirs, other)
torch.cuda.synchronize()
