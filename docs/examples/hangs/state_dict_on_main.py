"""The main rank gathers the state dict, which is a collective, and the others wait in a barrier.

Made after https://github.com/huggingface/accelerate/issues/2690.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(2)))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(8, 256, device="cuda")).mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    print(list(state))
else:
    dist.barrier()
