"""An iterable data set is split over ranks, and some get a batch less: the others wait for their gradients.

Made after https://github.com/pytorch/pytorch/issues/141069.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Samples(IterableDataset):
    """Ten samples over all ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(dist.get_rank(), 10, dist.get_world_size()):
            yield torch.full((64,), float(number))


model = DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in DataLoader(Samples(), batch_size=1):
    model(batch.cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
