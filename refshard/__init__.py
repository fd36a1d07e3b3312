"""refshard: which way of sharding a training run is fastest and leanest on your cluster, by how much, and why."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refshard.engine import checkpoint
    from refshard.engine.api import full_parameters, shard

__version__ = "0.1.0"
__all__ = ["__version__", "checkpoint", "full_parameters", "shard"]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, when it is first asked for."""
    if name in ("full_parameters", "shard"):
        from refshard.engine import api

        return getattr(api, name)
    if name == "checkpoint":
        return importlib.import_module("refshard.engine.checkpoint")
    raise AttributeError(f"module 'refshard' has no attribute '{name}'")
