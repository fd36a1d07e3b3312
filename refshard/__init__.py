"""refshard: which way of sharding is fastest and needs the least memory on your cluster, by how much, and why."""

import importlib
from typing import TYPE_CHECKING, Any

from refshard.version import __version__

if TYPE_CHECKING:
    from refshard.analysis.frames import read_trace
    from refshard.dryrun.factory import dry_run
    from refshard.engine import checkpoint
    from refshard.engine.ahead import reshard, unshard
    from refshard.engine.api import clip_grad_norm_, full_parameters, no_sync, shard, whole_tensors
    from refshard.engine.methods import register_forward_method
    from refshard.engine.optim import local_parameters
    from refshard.engine.policy import Policy
    from refshard.engine.precision import Precision
    from refshard.measure.store import read_run

__all__ = [
    "Policy",
    "Precision",
    "__version__",
    "checkpoint",
    "clip_grad_norm_",
    "dry_run",
    "full_parameters",
    "local_parameters",
    "no_sync",
    "read_run",
    "read_trace",
    "register_forward_method",
    "reshard",
    "shard",
    "unshard",
    "whole_tensors",
]


_HOME = {
    "Policy": "refshard.engine.policy",
    "Precision": "refshard.engine.precision",
    "clip_grad_norm_": "refshard.engine.api",
    "dry_run": "refshard.dryrun.factory",
    "full_parameters": "refshard.engine.api",
    "local_parameters": "refshard.engine.optim",
    "no_sync": "refshard.engine.api",
    "read_run": "refshard.measure.store",
    "read_trace": "refshard.analysis.frames",
    "register_forward_method": "refshard.engine.methods",
    "reshard": "refshard.engine.ahead",
    "shard": "refshard.engine.api",
    "unshard": "refshard.engine.ahead",
    "whole_tensors": "refshard.engine.api",
}


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, dry runs, records or frames on first use."""
    if name == "checkpoint":
        return importlib.import_module("refshard.engine.checkpoint")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'refshard' has no attribute '{name}'")
