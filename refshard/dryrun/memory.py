"""What is in memory over a recording, and at the peak: by category, module and operator.

:func:`memory_course` downsamples memory over time for a chart. A state is what is held after the first ``n`` events. A
clock gives each state its place on the axis: the time when the GPU gets there (:func:`gpu_clock`), or the number of
calls of the allocator (:func:`call_clock`). Neither is the host's time: the host issues a whole step in a few
milliseconds, long before the GPU has done any of it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import Category, Kind, Phase, Recording
from refshard.dryrun.replay import NEVER, Replayed

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
    ``loading`` events come before the first forward pass.
    """

    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    loading: int
    peak_at: int
    held: tuple[Held, ...]

    @property
    def peak_bytes(self) -> int:
        """Most that was allocated."""
        return int(self.allocated[self.peak_at]) if len(self.allocated) else 0

    @property
    def loading_peak_bytes(self) -> int:
        """Most that was allocated before the first forward pass."""
        return int(self.allocated[: self.loading].max(initial=0))

    @property
    def training_peak_bytes(self) -> int:
        """Most that was allocated from the first forward pass on."""
        return int(self.allocated[self.loading :].max(initial=0))

    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak, the largest first."""
        return _largest((one.category, one.bytes) for one in self.held)

    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by the module that made them, the largest first; "" where none is known."""
        return _largest((one.module, one.bytes) for one in self.held)


def without_numbers(module: str) -> str:
    """A module's path with a star for each number: layers that differ only there are alike.

    >>> without_numbers("model.layers.31.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


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
        allocated=allocated, reserved=reserved, loading=_first_pass(recording), peak_at=peak_at,
        held=_held(recording, live_rows(recording, peak_at)),
    )  # fmt: skip


def _first_pass(recording: Recording) -> int:
    """The first event in a module or an optimizer; the recording's length without one."""
    inside = np.flatnonzero(recording.phases != Phase.OTHER)
    return int(inside[0]) if len(inside) else len(recording)


def live_rows(recording: Recording, at: int) -> npt.NDArray[np.int64]:
    """Rows of the ``ALLOCATE`` events with blocks that live after event ``at``."""
    until = slice(0, at + 1)
    made = np.flatnonzero(recording.kinds[until] == Kind.ALLOCATE)
    freed = recording.subjects[until][recording.kinds[until] == Kind.FREE]
    return made[~np.isin(recording.subjects[made], freed)]


def categories(recording: Recording, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """What these allocations hold: as recorded, else by the phase in which they were made.

    What forward and backward make and nobody names are activations, or gradients of these; so is what is made outside
    of modules once one has run, such as a loss. What an optimizer makes and does not keep is its workspace.
    """
    recorded = recording.categories[rows]
    phases = recording.phases[rows]
    guessed = np.full(len(rows), Category.OTHER, np.uint8)
    guessed[rows >= _first_pass(recording)] = Category.ACTIVATIONS
    guessed[phases == Phase.OPTIMIZER] = Category.WORKSPACE
    return np.where(recorded == Category.OTHER, guessed, recorded)


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


Clock = npt.NDArray[np.int64]
"""A place for each event, and one for the end: ``clock[n]`` is where event ``n`` happens. It never decreases."""
_MOST_BINS = 300
_PART_OF = {Phase.RECOMPUTE: Phase.BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRun:
    """The host stays in ``phase`` between two places of a clock; recomputation is a part of backward."""

    phase: Phase
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCourse:
    """States of memory at places of a clock, one sample a row, in order.

    ``counts`` (int64) are the events before each state, ``places`` (int64) where it holds, ``held`` (int64, samples by
    :class:`~refshard.dryrun.recording.Category`) bytes of blocks, ``reserved`` (int64) bytes that the allocator has. A
    state that lasts has several samples. ``peak`` is the sample with most allocated, which is the peak of all states,
    not of the samples alone.
    """

    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    peak: int
    phases: tuple[PhaseRun, ...]

    @property
    def allocated(self) -> npt.NDArray[np.int64]:
        """Bytes of all blocks."""
        return np.asarray(self.held.sum(axis=1))

    @property
    def peak_bytes(self) -> int:
        """Most that was allocated."""
        return int(self.allocated[self.peak])

    @property
    def peak_reserved_bytes(self) -> int:
        """Most that was reserved."""
        return int(self.reserved.max())


def gpu_clock(recording: Recording, replayed: Replayed) -> Clock:
    """Nanoseconds of the replay: each event happens when the stream that computes most is done with all before it."""
    ends = np.where(recording.streams == replayed.main_stream, replayed.ends, NEVER)
    return np.concatenate(([0], np.maximum.accumulate(np.maximum(ends, 0))))


def call_clock(recording: Recording) -> Clock:
    """How many blocks had been taken or given back before each event."""
    calls = np.isin(recording.kinds, (Kind.ALLOCATE, Kind.FREE))
    return np.concatenate(([0], np.cumsum(calls)))


def memory_course(
    recording: Recording, account: MemoryAccount, clock: Clock, *, first: int, end: int, bins: int = _MOST_BINS
) -> MemoryCourse:
    """The states from before event ``first`` until after event ``end - 1``, thinned out.

    The clock's stretch is cut into ``bins``. Of each are kept the state with the least allocated, the one with the
    most, the one with the most reserved, and the last one, so that nothing higher or lower is missing from a picture;
    and between two bins stands the state that holds there, so that a reader who points anywhere finds one near.
    """
    allocated, reserved = (np.concatenate(([0], column)) for column in (account.allocated, account.reserved))
    kept = _kept(recording, allocated, reserved, clock, first, end, bins)
    begins = _places(kept, clock, first)
    edges = int(clock[first]) + np.arange(bins + 1) * int(clock[end] - clock[first]) // bins
    counts = np.concatenate((kept, kept[np.searchsorted(begins, edges, side="right") - 1]))
    places = np.concatenate((begins, edges))
    order = np.lexsort((places, counts))
    counts, places = counts[order], places[order]
    held = held_by_category(recording, counts)
    return MemoryCourse(
        counts=counts,
        places=places,
        held=held,
        reserved=reserved[counts],
        peak=int(np.argmax(held.sum(axis=1))),
        phases=phase_runs(recording, clock, first, end),
    )


def held_by_category(recording: Recording, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes held after each of these numbers of events, by category (int64, states by categories)."""
    calls = np.flatnonzero(np.isin(recording.kinds, (Kind.ALLOCATE, Kind.FREE)))
    freed = recording.kinds[calls] == Kind.FREE
    changes = np.zeros((len(calls) + 1, len(Category)), np.int64)
    changes[np.arange(len(calls)) + 1, _categories_of(recording, calls, freed)] = np.where(
        freed, -recording.sizes[calls], recording.sizes[calls]
    )
    states = np.cumsum(changes, axis=0)
    return np.asarray(states[np.searchsorted(calls, counts)])


def phase_runs(recording: Recording, clock: Clock, first: int, end: int) -> tuple[PhaseRun, ...]:
    """The stretches of forward, backward and the optimizer's step, in order.

    What lies outside of every phase ends none: forward goes on after the head has been called by itself.
    """
    rows = first + np.flatnonzero(recording.phases[first:end] != Phase.OTHER)
    phases = [Phase(code) for code in recording.phases[rows].tolist()]
    found: list[PhaseRun] = []
    for row, phase in zip(rows.tolist(), (_PART_OF.get(phase, phase) for phase in phases)):
        begin = found[-1].begin if found and found[-1].phase is phase else int(clock[row])
        run = PhaseRun(phase=phase, begin=begin, end=int(clock[row + 1]))
        found[-1 if found and found[-1].phase is phase else len(found) :] = [run]
    return tuple(found)


def _categories_of(
    recording: Recording, calls: npt.NDArray[np.int64], freed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """The category of each block taken or given back; that of a block which was never taken is not known."""
    made = calls[~freed]
    of_made = categories(recording, made).astype(np.int64)
    found = np.empty(len(calls), np.int64)
    found[~freed] = of_made
    blocks = recording.subjects[made]
    order = np.argsort(blocks, kind="stable")
    wanted = recording.subjects[calls[freed]]
    places = np.searchsorted(blocks[order], wanted)
    known = places < len(blocks)
    known[known] = blocks[order][places[known]] == wanted[known]
    found[freed] = np.where(known, np.append(of_made[order], 0)[places], int(Category.OTHER))
    return found


def _kept(
    recording: Recording, allocated: npt.NDArray[np.int64], reserved: npt.NDArray[np.int64], clock: Clock, first: int,
    end: int, bins: int,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Which states to show, as counts of events before them: ascending, the first and the last among them."""
    changing = np.isin(recording.kinds[first:end], (Kind.ALLOCATE, Kind.FREE, Kind.SEGMENT))
    counts = first + np.flatnonzero(changing) + 1
    places = _places(counts, clock, first)
    width = max(int(clock[end] - clock[first]), 1)
    of_bin = (places - clock[first]) * bins // width
    kept = {first, end}
    for part in np.split(counts, np.flatnonzero(np.diff(of_bin)) + 1) if len(counts) else ():
        kept.update(
            int(part[at])
            for at in (np.argmin(allocated[part]), np.argmax(allocated[part]), np.argmax(reserved[part]), -1)
        )
    return np.array(sorted(kept), np.int64)


def _places(counts: npt.NDArray[np.int64], clock: Clock, first: int) -> npt.NDArray[np.int64]:
    """A state begins with the event that leads to it, the first one with the stretch."""
    return clock[np.maximum(counts - 1, first)]
