"""Bytes by category while a step is walked."""

from typing import NamedTuple

from refshard.memory.tape import CATEGORIES, Category

Bytes = dict[Category, int]


class MemoryEvent(NamedTuple):
    """One stretch of a step: how many bytes there were at most in it, and how many after it."""

    name: str
    highest: int
    after: int


class Ledger:
    """What is allocated now, and at the ``peak`` so far. ``granule`` is what the allocator rounds a size to."""

    def __init__(self, granule: int = 1) -> None:
        self._granule = granule
        self._now: Bytes = dict.fromkeys(CATEGORIES, 0)
        self._total = self._highest = 0
        self.peak = 0
        self.at_peak: Bytes = {}
        self.events: list[MemoryEvent] = []

    def rounded(self, nbytes: int) -> int:
        """What a tensor of ``nbytes`` occupies."""
        return -(-nbytes // self._granule) * self._granule

    def take(self, category: Category, nbytes: int) -> None:
        """Allocate one tensor."""
        nbytes = self.rounded(nbytes)
        self._now[category] += nbytes
        self._total += nbytes
        self._highest = max(self._highest, self._total)
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, self._now.copy()

    def free(self, category: Category, nbytes: int) -> None:
        """Let go of one tensor."""
        nbytes = self.rounded(nbytes)
        self._now[category] -= nbytes
        self._total -= nbytes
        assert self._now[category] >= 0, f"{category} below zero"

    def pass_by(self, category: Category, *sizes: int) -> None:
        """Allocate tensors one after the other, and let go of them all."""
        for nbytes in sizes:
            self.take(category, nbytes)
        for nbytes in sizes:
            self.free(category, nbytes)

    def rename(self, nbytes: int, before: Category, after: Category) -> None:
        """Count a tensor that stays where it is in another category."""
        nbytes = self.rounded(nbytes)
        self._now[before] -= nbytes
        self._now[after] += nbytes

    def close(self, name: str) -> None:
        """End a stretch of the step."""
        self.events.append(MemoryEvent(name, self._highest, self._total))
        self._highest = self._total

    @property
    def now(self) -> Bytes:
        """Bytes by category."""
        return self._now.copy()
