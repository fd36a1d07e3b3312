"""Sees when backward reads a unit's weights, through torch's hooks on saved tensors.

The engine gathers a unit when the gradient of one of its outputs comes, and gives it up after its last gradient. Nearly
always that is when its weights are read; but a loss may be taken from within a unit, or a weight read apart from its
gradient. So a call is watched until its pattern is known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from refshard.engine.transforms import unwrapped
from refshard.engine.unit import Unit
from refshard.errors import EngineError


@dataclass(frozen=True, slots=True)
class _Saved:
    """What is kept of a tensor: itself, or what an outer hook made of it. ``weight`` says that it is in the slot."""

    kept: Any
    version: int
    weight: bool


def watched_reads(unit: Unit, on_read: Callable[[], None]) -> saved_tensors_hooks:
    """While it is entered, have what backward reads of the unit's slot call ``on_read`` first.

    Hooks that are there already (those of activation checkpointing, say) see the same tensors as without it.
    """
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> _Saved:
        weight = bool(tensor.numel()) and unit.slot.holds(address(tensor))
        # Kept without its history: an output that held itself would never be let go.
        return _Saved(outer[0](tensor) if outer else tensor.detach(), tensor._version, weight)

    def unpack(saved: _Saved) -> Any:
        if saved.weight:
            on_read()
        if outer:
            return outer[1](saved.kept)
        if saved.kept._version != saved.version:
            what = f"a weight of unit '{unit.name}'" if saved.weight else f"a tensor that unit '{unit.name}' saved"
            raise EngineError(f"{what} was changed between forward and backward; change it after backward")
        return saved.kept

    return saved_tensors_hooks(pack, unpack)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor lies; a wrapper, such as a DTensor, a pending collective or that of a ``torch.func`` transform,
    lies where the one within does.
    """
    inner: Any = unwrapped(tensor)
    while is_traceable_wrapper_subclass(inner):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    found: int = inner.data_ptr()
    return found
