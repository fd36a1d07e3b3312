"""The strategies that can be compared, by name. Their modules import torch, so they are loaded when asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from refshard.errors import SpecError, nearest
from refshard.plan.placement import MODES

if TYPE_CHECKING:
    from refshard.strategies.base import Strategy

_FACTORIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "single": ("single", "Single", {}),
    "ddp": ("ddp", "DDP", {}),
    "fsdp2": ("fsdp2", "FSDP2", {}),
    "fsdp2-tuned": ("fsdp2_tuned", "FSDP2Tuned", {}),
    **{f"refshard-{mode}": ("engine", "Refshard", {"mode": mode}) for mode in MODES},
}
"""Name: (module in this package, class, arguments)."""


def names() -> tuple[str, ...]:
    """Every strategy's name."""
    return tuple(_FACTORIES)


def check_name(name: str) -> None:
    """Check that a strategy exists, without importing torch.

    Raises:
        SpecError: there is none of this name.
    """
    if name not in _FACTORIES:
        raise SpecError(f"strategy: no strategy '{name}'; {nearest(name, list(_FACTORIES))}")


def make_strategy(name: str) -> "Strategy":
    """A fresh strategy of this name.

    Raises:
        SpecError: there is none.
    """
    check_name(name)
    module, class_name, arguments = _FACTORIES[name]
    strategy: Strategy = getattr(import_module(f"refshard.strategies.{module}"), class_name)(**arguments)
    return strategy
