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
        self._made: dict[int, StorageWeakRef] = {}
        self._before: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watching:
            self.levels.append(self.total())
        for storage in _storages((args, kwargs)):
            if self._unknown(storage):
                self._before[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if self._unknown(storage):
                self._made[storage._cdata] = StorageWeakRef(storage)
        if self.watching:
            self.levels.append(self.total())
        return result

    def total(self) -> int:
        """Bytes now. A storage's size may have changed since it was made."""
        total, gone = 0, []
        for key, ref in self._made.items():
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                gone.append(key)
            elif (size := storage.nbytes()) > NUMBER:
                total += size
        for key in gone:
            del self._made[key]
        return total

    def _unknown(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage has not been seen; another one may have been at its address."""
        known = self._made.get(storage._cdata) or self._before.get(storage._cdata)
        return known is None or known.expired()


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
