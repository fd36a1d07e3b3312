"""Each rank creates only the group that it is in, so both groups get the same name and meet in the store.

Made after https://github.com/pytorch/pytorch/issues/130102. Needs four ranks.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mine = [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
group = dist.new_group(mine)
dist.barrier(group=group)
