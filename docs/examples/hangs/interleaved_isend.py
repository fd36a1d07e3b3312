"""``isend`` and ``irecv`` between two ranks run in the order of their calls, and these orders do not fit together.

Made after https://github.com/pytorch/pytorch/issues/109401. Needs two ranks.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
forward = [torch.ones(1024, device="cuda") for _ in range(2)]
backward = [torch.ones(1024, device="cuda") for _ in range(2)]
if rank == 0:
    dist.send(forward[0], 1)
    pending = [dist.irecv(backward[0], 1), dist.isend(forward[1], 1), dist.irecv(backward[1], 1)]
else:
    dist.recv(forward[0], 0)
    pending = [dist.irecv(forward[1], 0), dist.isend(backward[0], 0), dist.isend(backward[1], 0)]
for work in pending:
    work.wait()
torch.cuda.synchronize()
