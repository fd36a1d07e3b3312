"""Marks in a trace where its strategy does not say itself which unit computes.

They read as the engine's do, name units as it does, and are put on after the timed steps; the traced ones are slower
by some microseconds a unit. They say where compute belongs, not collectives: a peer may issue those of one unit while
another computes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

Units = tuple[tuple[str, tuple[nn.Module, ...]], ...]
"""Names of units, and the modules whose calls are their forward."""


def mark_units(units: Iterable[tuple[str, tuple[nn.Module, ...]]]) -> None:
    """From now on, have a trace say where forward and backward of each unit begin, and where forward ends.

    A backward ends where the next begins. What activation checkpointing recomputes belongs to the backward around it.
    """
    for name, modules in units:
        for module in modules:
            _hook(name, module)


def _hook(name: str, module: nn.Module) -> None:
    def before(*_: Any) -> None:
        if not _in_backward():
            _mark("forward", name)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if _in_backward():
            return
        _mark("leave", name)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: _mark("backward", name))

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark(what: str, name: str) -> None:
    with record_function(f"refshard::{what}({name})"):
        pass
