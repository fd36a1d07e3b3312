"""Objects are gathered on the main rank only.

Made after https://github.com/huggingface/accelerate/issues/2733.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
answers = [f"an answer of rank {dist.get_rank()}"]
if dist.get_rank() == 0:
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, answers)
    print(gathered)
dist.barrier()
