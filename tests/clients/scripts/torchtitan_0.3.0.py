"""``torchtitan.train`` of 0.3.0, which calls a function that torch 2.13 has under a private name only."""
# mypy: ignore-errors

import runpy

import torch.distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

torch.distributed.set_timeout = _set_pg_timeout
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
