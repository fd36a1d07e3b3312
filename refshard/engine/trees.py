"""The tensors in what modules take and return: containers that torch knows, and dataclasses within them."""

import copy
import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of ``tree``, in order; a dataclass counts as its fields."""
    found = []
    for leaf in tree_flatten(tree)[0]:
        found += leaves_of(_fields(leaf)) if _is_record(leaf) else [leaf]
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``tree``, and among the attributes of its other leaves."""
    found: list[torch.Tensor] = []
    for leaf in leaves_of(tree):
        held = [leaf] if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        found += [value for value in held if isinstance(value, torch.Tensor)]
    return found


def with_leaves(tree: Any, leaves: list[Any]) -> Any:
    """``tree`` with ``leaves`` in place of its own; what has none that differs is the same object as before."""
    kept, structure = tree_flatten(tree)
    remaining = list(reversed(leaves))
    return tree_unflatten([_filled(leaf, remaining) for leaf in kept], structure)


def _filled(leaf: Any, remaining: list[Any]) -> Any:
    if not _is_record(leaf):
        return remaining.pop()
    old = _fields(leaf)
    mine = [remaining.pop() for _ in leaves_of(old)]
    if all(a is b for a, b in zip(mine, leaves_of(old))):
        return leaf
    made = copy.copy(leaf)
    for field, value in zip(dataclasses.fields(leaf), with_leaves(old, mine)):
        object.__setattr__(made, field.name, value)  # frozen ones, too
    return made


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _fields(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]
