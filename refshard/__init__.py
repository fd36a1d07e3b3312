"""refshard: which way of sharding a training run is fastest and leanest on your cluster, by how much, and why."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refshard.engine import checkpoint
    from refshard.engine.api import clip_grad_norm_, full_parameters, no_sync, shard
    from refshard.engine.precision import Precision

__version__ = "0.1.0"
__all__ = ["Precision", "__version__", "checkpoint", "clip_grad_norm_", "full_parameters", "no_sync", "shard"]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, when it is first asked for."""
    if name == "Precision":
        from refshard.engine.precision import Precision

        return Precision
    if name in __all__:
        from refshard.engine import api

        return getattr(api, name)
    if name == "checkpoint":
        return importlib.import_module("refshard.engine.checkpoint")
    raise AttributeError(f"module 'refshard' has no attribute '{name}'")
