"""What is in memory over a recording, and what is there at the peak: by category, by module, by operator."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import Category, Kind, Phase, Recording

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one module holds for one purpose: ``bytes`` in ``blocks`` blocks, made by ``operator`` in ``phase``."""

    category: Category
    module: str
    operator: str
    phase: Phase
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryAccount:
    """Bytes over the events of a recording, ``allocated`` and ``reserved`` after each (int64); the event ``peak_at`` at
    which most was allocated, and what was held then, the largest first. Blocks are as large as the allocator rounds.
    """

    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    peak_at: int
    held: tuple[Held, ...]

    @property
    def peak_bytes(self) -> int:
        """Most that was allocated."""
        return int(self.allocated[self.peak_at]) if len(self.allocated) else 0

    @property
    def peak_reserved_bytes(self) -> int:
        """Most that was reserved."""
        return int(self.reserved.max(initial=0))

    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak, the largest first."""
        return _largest((one.category, one.bytes) for one in self.held)

    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by the module that made them, the largest first; "" where none is known."""
        return _largest((one.module, one.bytes) for one in self.held)


def _largest(pairs: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    sums: Counter[Key] = Counter()
    for key, size in pairs:
        sums[key] += size
    return dict(sums.most_common())


def account_memory(recording: Recording) -> MemoryAccount:
    """Follow every block of a recording."""
    kinds, sizes = recording.kinds, recording.sizes
    allocated = np.cumsum(np.where(kinds == Kind.ALLOCATE, sizes, 0) - np.where(kinds == Kind.FREE, sizes, 0))
    reserved = np.cumsum(np.where(kinds == Kind.SEGMENT, sizes, 0))
    peak_at = int(np.argmax(allocated)) if len(allocated) else 0
    return MemoryAccount(
        allocated=allocated, reserved=reserved, peak_at=peak_at, held=_held(recording, live_rows(recording, peak_at))
    )


def live_rows(recording: Recording, at: int) -> npt.NDArray[np.int64]:
    """Rows of the ``ALLOCATE`` events whose blocks live after event ``at``."""
    until = slice(0, at + 1)
    made = np.flatnonzero(recording.kinds[until] == Kind.ALLOCATE)
    freed = recording.subjects[until][recording.kinds[until] == Kind.FREE]
    return made[~np.isin(recording.subjects[made], freed)]


def categories(recording: Recording, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """What these allocations hold: as told, else by the phase in which they were made.

    What forward and backward make and nobody names are activations, or gradients of these; so is what is made outside
    of modules once one has run, such as a loss. What an optimizer makes and does not keep is its workspace.
    """
    told = recording.categories[rows]
    phases = recording.phases[rows]
    inside = np.flatnonzero(recording.phases != Phase.OTHER)
    guessed = np.full(len(rows), Category.OTHER, np.uint8)
    guessed[rows >= (inside[0] if len(inside) else len(recording))] = Category.ACTIVATIONS
    guessed[phases == Phase.OPTIMIZER] = Category.WORKSPACE
    return np.where(told == Category.OTHER, guessed, told)


def _held(recording: Recording, rows: npt.NDArray[np.int64]) -> tuple[Held, ...]:
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    counts: Counter[tuple[int, int, int, int]] = Counter()
    keys = zip(
        categories(recording, rows).tolist(),
        recording.modules[rows].tolist(),
        recording.names[rows].tolist(),
        recording.phases[rows].tolist(),
    )
    for key, size in zip(keys, recording.sizes[rows].tolist()):
        sizes[key] += size
        counts[key] += 1
    return tuple(
        Held(
            category=Category(key[0]), module=recording.module_table[key[1]], operator=recording.name_table[key[2]],
            phase=Phase(key[3]), bytes=size, blocks=counts[key],
        )
        for key, size in sizes.most_common()
    )  # fmt: skip
