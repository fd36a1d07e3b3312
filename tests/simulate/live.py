"""Watches a real run of torch: how many bytes of tensors are there after each op, and between them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NUMBER = 16
"""Storages up to so many bytes are numbers (a loss, a count of steps), which nobody predicts."""


class LiveBytes(TorchDispatchMode):
    """Sums the storages that ops within have made and that still are there.

    ``levels`` has two entries an op: what is left of earlier ops' storages when it starts, and the sum when it has run;
    while not ``watching``, none.
    """

    def __init__(self, *, watching: bool = True) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.watching = watching
        self._live: dict[int, tuple[StorageWeakRef, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watching:
            self.levels.append(self.total())
        for storage in _storages((args, kwargs)):  # unknown ones do not count: they were there before
            self._live.setdefault(storage._cdata, (StorageWeakRef(storage), False))
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._live.setdefault(storage._cdata, (StorageWeakRef(storage), True))
        if self.watching:
            self.levels.append(self.total())
        return result

    def total(self) -> int:
        """Bytes now. A storage's size may have changed since it was made."""
        self._live = {key: known for key, known in self._live.items() if not known[0].expired()}
        return sum(_size(ref) for ref, counts in self._live.values() if counts)


def _size(ref: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    size = 0 if storage is None else storage.nbytes()
    return size if size > NUMBER else 0


def _storages(values: object) -> Iterable[torch.UntypedStorage]:
    leaves = (getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(values))
    return (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor))


def turns(levels: Sequence[int]) -> list[int]:
    """Where a sequence turns from rising to falling or back, its ends included: what is left of it whatever the order
    in which several things are made, or let go, in a row.
    """
    kept: list[int] = []
    for level in levels:
        if kept and level == kept[-1]:
            continue
        if len(kept) > 1 and (kept[-1] > kept[-2]) == (level > kept[-1]):
            kept[-1] = level
        else:
            kept.append(level)
    return kept
