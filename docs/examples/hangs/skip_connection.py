"""A stage takes what two earlier stages send in one batch, one of which computes from what the other one sends.

Made after https://github.com/pytorch/PiPPy/issues/969. Needs three ranks. Whether NCCL hangs here depends on how it
connects ranks at their first message.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
first, second = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
if rank == 0:
    operations = [[P2POp(isend, first, 1), P2POp(isend, second, 2)]]
elif rank == 1:
    operations = [[P2POp(irecv, first, 0)], [P2POp(isend, first, 2)]]
else:
    operations = [[P2POp(irecv, first, 0), P2POp(irecv, second, 1)]]
for batch in operations:
    for work in batch_isend_irecv(batch):
        work.wait()
torch.cuda.synchronize()
