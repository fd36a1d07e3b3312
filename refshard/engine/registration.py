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

    A module may be put around another one in its place, or come off again: torch's ``checkpoint_wrapper``, say.

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
    there = module._modules.get(name)
    if submodule is None or module not in _SHARDED or there is submodule:
        return
    held = _holders(submodule)
    wraps = there is not None and _holders(there) == held
    if name == "parametrizations" or (held and not wraps):
        raise _refused(f"module '{name}'", module)
    _SHARDED.update(submodule.modules())


def _holders(module: nn.Module) -> set[nn.Module]:
    return {held for held in module.modules() if any(p is not None for p in held._parameters.values())}


def _refused(what: str, module: nn.Module) -> EngineError:
    return EngineError(
        f"{what} is put into a {type(module).__name__} of a sharded model, where the engine cannot shard "
        "it; replace, prune, parametrize or adapt modules before refshard.shard"
    )
