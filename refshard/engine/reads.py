"""Sees when backward reads a unit's weights, by hooks on the autograd nodes that have saved some.

The engine gathers a unit when the gradient of one of its outputs comes, and gives it up after its last gradient. Nearly
always that is when its weights are read; but a loss may be taken from within a unit, or a weight read apart from its
gradient. So a call is watched until its pattern is known.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from refshard.engine.subclasses import address
from refshard.engine.trees import leaves_of
from refshard.engine.unit import Unit


def watch_reads(unit: Unit, outputs: Iterable[torch.Tensor], start: int, on_read: Callable[[], None]) -> None:
    """Have ``on_read`` called before backward reads a weight of the unit that a call has saved.

    The call has returned ``outputs``, and made the nodes with a sequence number of at least ``start``. What it saved
    within activation checkpointing is not seen; recomputation runs the unit's modules again.
    """
    for node in _nodes([out.grad_fn for out in outputs if out.grad_fn is not None], start):
        if any(saved.numel() and unit.slot.holds(address(saved)) for saved in _saved_by(node)):
            node.register_prehook(lambda _: on_read())


def _nodes(roots: list[Node], start: int) -> Iterator[Node]:
    seen = set()
    while roots:
        node = roots.pop()
        if node not in seen and start <= node._sequence_nr() < _LAST:
            seen.add(node)
            yield node
            roots += [following for following, _ in node.next_functions if following is not None]


_LAST = 2**64 - 1
"""The sequence number of the nodes that accumulate gradients."""


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node has saved, without the hooks that others have put on them."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            found = getattr(node, name)
            for saved in found if isinstance(found, tuple | list) else [found]:
                tensor = None if saved.unpack_hook is not None else saved.data
                if tensor is not None:
                    yield tensor
    # Kept by a custom function behind autograd's back.
    yield from (kept for kept in leaves_of(getattr(node, "__dict__", {})) if isinstance(kept, torch.Tensor))
