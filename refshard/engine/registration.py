"""Notices what is put into a model after it was sharded: parameters that the engine would neither gather nor reduce."""

import functools
import weakref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from refshard.errors import EngineError

_SHARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_registrations(model: nn.Module) -> None:
    """From now on refuse new parameters, and modules that hold some, anywhere in ``model``.

    Raises:
        EngineError: later, where one is registered; the model is as it was then.
    """
    _register_once()
    _SHARDED.update(model.modules())


@functools.cache
def _register_once() -> None:
    register_module_parameter_registration_hook(_refuse_parameter)
    register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and module in _SHARDED and module._parameters.get(name) is not parameter:
        raise _refused(f"parameter '{name}'", module)


def _refuse_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is None or module not in _SHARDED or module._modules.get(name) is submodule:
        return
    if name == "parametrizations" or any(True for _ in submodule.parameters()):
        raise _refused(f"module '{name}'", module)


def _refused(what: str, module: nn.Module) -> EngineError:
    return EngineError(
        f"{what} is put into a {type(module).__name__} of a sharded model, where the engine cannot shard "
        "it; replace, prune, parametrize or adapt modules before refshard.shard"
    )
