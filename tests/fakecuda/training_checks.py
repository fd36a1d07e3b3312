"""Training on fake GPUs, for :mod:`tests.fakecuda.test_training`: each check returns the losses of one way to train."""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.fakecuda.child import check
from tests.fakecuda.training import ON_EIGHT, ON_TWO, losses

ways = ON_TWO if os.environ.get("WORLD_SIZE") == "2" else ON_EIGHT


@check
def init() -> str:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=600))
    return dist.get_backend()


globals().update({name: check(partial(losses, way, "cuda")) for name, way in ways.items()})
