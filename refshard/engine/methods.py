"""Methods other than forward that read their module's own weights."""

import inspect

from torch import nn

from refshard.engine.hooks import hooks_of
from refshard.errors import EngineError, SpecError, nearest


def register_forward_method(module: nn.Module, name: str) -> None:
    """Treat each call of the method ``name`` of ``module``, a part of a sharded model, as a forward of that module.

    Use it for a method that reads its module's own weights, which are local parts outside of forward. A method that
    only calls modules does not need it. If ``module`` is inside a block, the whole block is gathered. Calls from the
    block's forward, or from another registered method, are not affected.

    Raises:
        EngineError: ``module`` is not part of a sharded model, or the method is a generator or a coroutine.
        SpecError: ``module`` has no such method.
    """
    hooks, kind = hooks_of(module), type(module).__name__
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        known = [key for key, value in vars(type(module)).items() if callable(value) and not key.startswith("_")]
        raise SpecError(f"register_forward_method: {kind} has no method '{name}'; {nearest(name, known)}")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise EngineError(
            f"method '{name}' of {kind} is a generator or a coroutine, which runs after the call has returned; "
            "register a method that returns tensors"
        )
    setattr(module, name, hooks.as_forward(module, method))
