"""Memory of a script's own phases, such as generate, train and evaluate: their peaks, and what one leaves to the next.

A phase is all ranges of one name that the script enters, by ``record_function`` or NVTX. Ranges may lie within others:
all that happens in a range counts for it, but memory is made in the innermost one. What lies in none counts for
:data:`OUTSIDE`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.memory_peaks import blocks_of
from refshard.dryrun.memory import MemoryAccount, categories, without_numbers
from refshard.dryrun.recording import BEGINS, ENDS, Category, Kind, Recording

OUTSIDE = ""
"""The name of what lies in no range."""
_Extent = tuple[str, int, int, bool]
"""Name, first event and end of a range, and whether it ended before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The events ``[first, end)``: the occurrence ``number`` of phase ``name``, from 1.

    ``begin_bytes`` were allocated when it began, ``peak_bytes`` at most, after event ``peak_at``; reserved bytes
    likewise. ``end_bytes`` were allocated at its end, of which ``kept_bytes`` in blocks that it made. Both are None if
    the run ended first.
    """

    name: str
    number: int
    first: int
    end: int
    peak_at: int
    begin_bytes: int
    peak_bytes: int
    begin_reserved_bytes: int
    peak_reserved_bytes: int
    end_bytes: int | None
    kept_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Bytes in ``blocks`` blocks at a phase's peak, made in the phase ``made_in`` by the script's line ``place``: in
    backward, which has none, for a module. If they are ``carried`` over, the occurrence with the peak found them there.
    """

    category: Category
    made_in: str
    carried: bool
    place: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """All ranges of phase ``name``, in order, and the entries at its peak, the largest first.

    If the allocator reserved nothing in the phase where its reserved memory is highest, but more than the phase ever
    allocates, ``cached_since`` is the phase in which most of the rest was reserved.
    """

    name: str
    ranges: tuple[Range, ...]
    entries: tuple[Entry, ...]
    cached_since: str | None

    @property
    def highest(self) -> Range:
        """The first range with the highest peak of allocated memory."""
        return max(self.ranges, key=lambda one: one.peak_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """Most that was reserved."""
        return max(one.peak_reserved_bytes for one in self.ranges)

    @property
    def kept_bytes(self) -> int | None:
        """Most that one of its ranges made and left behind; None if none ended."""
        return max((one.kept_bytes for one in self.ranges if one.kept_bytes is not None), default=None)

    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak, the largest first."""
        sums = Counter[Category]()
        for one in self.entries:
            sums[one.category] += one.bytes
        return dict(sums.most_common())


def account_phases(recording: Recording, memory: MemoryAccount) -> tuple[PhaseMemory, ...]:
    """The phases in the order in which they first begin, and last what lies outside. Without ranges there are none."""
    return _Account(recording, memory, extents).phases() if (extents := _extents(recording)) else ()


class _Account:
    """``made_in`` is the number, among ``names``, of the phase that each event is in."""

    def __init__(self, recording: Recording, memory: MemoryAccount, extents: Sequence[_Extent]) -> None:
        self._recording, self._memory = recording, memory
        self._names = [*dict.fromkeys(name for name, *_ in extents), OUTSIDE]
        self._made_in = np.full(len(recording), len(self._names) - 1)
        for name, first, end, _ in extents:
            self._made_in[first:end] = self._names.index(name)  # the innermost begins last
        edges = np.flatnonzero(np.diff(self._made_in == len(self._names) - 1, prepend=False, append=False))
        outside = [(OUTSIDE, max(first - 1, 0), end, True) for first, end in edges.reshape(-1, 2).tolist()]
        self._extents = [*extents, *outside]  # from the mark on that ends a phase
        kinds = recording.kinds
        self._blocks = blocks_of((kinds == Kind.ALLOCATE).astype(np.int64) - (kinds == Kind.FREE), recording.subjects)

    def phases(self) -> tuple[PhaseMemory, ...]:
        ranges: dict[str, list[Range]] = {name: [] for name in self._names}
        for name, first, end, ended in self._extents:
            ranges[name].append(self._range(name, len(ranges[name]) + 1, first, end, ended))
        return tuple(self._phase(name, of_name) for name, of_name in ranges.items() if of_name)

    def _range(self, name: str, number: int, first: int, end: int, ended: bool) -> Range:
        allocated, reserved = self._memory.allocated, self._memory.reserved
        peak_at = first + int(np.argmax(allocated[first:end]))
        kept = self._live(end - 1, made_from=first)
        return Range(
            name=name, number=number, first=first, end=end, peak_at=peak_at,
            begin_bytes=int(allocated[first - 1]) if first else 0, peak_bytes=int(allocated[peak_at]),
            begin_reserved_bytes=int(reserved[first - 1]) if first else 0,
            peak_reserved_bytes=int(reserved[first:end].max()), end_bytes=int(allocated[end - 1]) if ended else None,
            kept_bytes=int(self._recording.sizes[kept].sum()) if ended else None,
        )  # fmt: skip

    def _phase(self, name: str, ranges: Sequence[Range]) -> PhaseMemory:
        recording, highest = self._recording, max(ranges, key=lambda one: one.peak_bytes)
        rows = self._live(highest.peak_at)
        sums, counts = Counter[tuple[int, int, bool, str]](), Counter[tuple[int, int, bool, str]]()
        places = (
            recording.site_table[site] or without_numbers(recording.module_table[module])
            for site, module in zip(recording.sites[rows].tolist(), recording.modules[rows].tolist())
        )
        keys = zip(
            categories(recording, rows).tolist(), self._made_in[rows].tolist(), (rows < highest.first).tolist(), places
        )
        for key, size in zip(keys, recording.sizes[rows].tolist()):
            sums[key] += size
            counts[key] += 1
        entries = tuple(
            Entry(
                category=Category(key[0]), made_in=self._names[key[1]], carried=key[2], place=key[3], bytes=size,
                blocks=counts[key],
            )
            for key, size in sums.most_common()
        )  # fmt: skip
        since = self._cached_since(name, ranges)
        return PhaseMemory(name=name, ranges=tuple(ranges), entries=entries, cached_since=since)

    def _live(self, at: int, *, made_from: int = 0) -> npt.NDArray[np.int64]:
        """Rows of the blocks that live after event ``at``."""
        made = self._blocks.made
        return np.sort(made[(made >= made_from) & (made <= at) & (self._blocks.freed > at)])

    def _cached_since(self, name: str, ranges: Sequence[Range]) -> str | None:
        """Which phase reserved most of what stays reserved until this one begins, above what this one allocates."""
        top = max(ranges, key=lambda one: one.peak_reserved_bytes)
        allocated = max(one.peak_bytes for one in ranges)
        if top.peak_reserved_bytes > top.begin_reserved_bytes or top.peak_reserved_bytes <= allocated:
            return None
        lasting = np.minimum.accumulate(self._memory.reserved[: top.first][::-1])[::-1]
        grown = np.diff(np.maximum(lasting, allocated), prepend=allocated)
        since = self._names[int(np.argmax(np.bincount(self._made_in[: top.first], grown)))]
        return None if since == name else since


def _extents(recording: Recording) -> list[_Extent]:
    """Each range, in the order in which they begin."""
    begun: dict[str, int] = {}
    found = []
    for row in np.flatnonzero(recording.kinds == Kind.MARK).tolist():
        says = recording.name_table[recording.names[row]]
        if says.startswith(BEGINS):
            begun[says.removeprefix(BEGINS)] = row
        elif says.startswith(ENDS):
            name = says.removeprefix(ENDS)
            found.append((name, begun.pop(name), row + 1, True))
    found += [(name, first, len(recording), False) for name, first in begun.items()]
    return sorted(found, key=lambda one: one[1])
