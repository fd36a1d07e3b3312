"""User code on side streams, for :mod:`tests.fakecuda.test_side_streams`: losses and races of each program."""

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.fakecuda.child import check
from tests.fakecuda.side_streams import PROGRAMS, UNORDERED, UNSHARDED, run


@check
def init() -> str:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=600))
    return dist.get_backend()


def in_all_modes(name: str) -> dict[str, Any]:
    return {mode: run(name, mode) for mode in (UNSHARDED, *os.environ["TEST_MODES"].split())}


globals().update({name: check(partial(in_all_modes, name)) for name in {**PROGRAMS, **UNORDERED}})
