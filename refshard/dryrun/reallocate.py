"""Allocate once more what a recording allocated, with the caching allocator of the device and other answers to what it
asks of streams.

The calls are the script's own, in its order. What may change is where a block lies, and so when the allocator takes
memory from the device or gives it back. Addresses in the recording stay those of the script's run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.dryrun.progress import Follower
from refshard.dryrun.recording import HOST_COUNTS, NO_STREAM, Kind, Recording
from refshard.dryrun.request import Pool

EMPTY_CACHE = "empty_cache"
"""Why the host waits where a script empties the allocator's cache."""
MakeAllocator = Callable[[Any, Callable[[int], None]], Any]
"""Makes the extension's allocator from what tells of streams and what is told of segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The allocation of event ``row`` that the device had no memory for, in torch's words."""

    row: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reallocation:
    """What the allocator did. It took ``sizes[i]`` bytes from the device, or gave them back if negative, in the event
    ``rows[i]``: an ``ALLOCATE`` or the wait of an emptied cache. ``addresses`` are those of all ``ALLOCATE``.

    ``peak`` is the highest since the event at which peaks were reset, ``now`` what is there at the end, ``retries`` how
    often the allocator emptied its cache to serve a request. If ``refused``, it all ends there.
    """

    rows: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    peak: Pool
    now: Pool
    retries: int
    refused: Refusal | None = None


class UnknownBlockError(Exception):
    """The recording gives a block back whose allocation it does not have."""


def reallocate(recording: Recording, follower: Follower, make: MakeAllocator, *, reset: int = 0) -> Reallocation:
    """Go through the recording; peaks begin anew at event ``reset``.

    Raises:
        UnknownBlockError: blocks were there before the recording began.
    """
    return _Walk(recording, follower, make).run(reset)


class _Walk:
    def __init__(self, recording: Recording, follower: Follower, make: MakeAllocator) -> None:
        self._recording, self._follower = recording, follower
        self._row = 0
        self._segments: list[tuple[int, int]] = []
        self._addresses: list[int] = []
        self._blocks: dict[int, int] = {}
        self._allocator = make(follower.progress, lambda size: self._segments.append((self._row, size)))

    def run(self, reset: int) -> Reallocation:
        refused = None
        kinds: list[int] = self._recording.kinds.tolist()
        for self._row, kind in enumerate(kinds):
            if self._row == reset:
                self._allocator.reset_peak_statistics()
            self._follower.ask(self._row)
            try:
                self._call(Kind(kind))
            except MemoryError as error:  # the extension's own kind of it
                refused = Refusal(row=self._row, message=str(error))
                break
        stats = self._allocator.statistics()
        rows, sizes = np.array(self._segments, np.int64).reshape(-1, 2).T
        return Reallocation(
            rows=rows, sizes=sizes, addresses=np.array(self._addresses, np.int64), peak=_pool(stats, "peak"),
            now=_pool(stats, "current"), retries=stats["num_alloc_retries"], refused=refused,
        )  # fmt: skip

    def _call(self, kind: Kind) -> None:
        recording, row = self._recording, self._row
        stream, subject = int(recording.streams[row]), int(recording.subjects[row])
        if kind == Kind.ALLOCATE:
            address, _, _ = self._allocator.allocate(int(recording.writes[row]), stream)
            self._blocks[subject] = address
            self._addresses.append(address)
        elif kind == Kind.FREE:
            self._allocator.free(self._address(subject, forget=True))
        elif kind == Kind.HOLD:
            self._allocator.record_stream(self._address(subject), stream)
        elif kind == Kind.SYNCHRONISE and recording.name_table[recording.names[row]] == EMPTY_CACHE:
            self._allocator.empty_cache()

    def _address(self, block: int, *, forget: bool = False) -> int:
        if block not in self._blocks:
            raise UnknownBlockError(f"block {block} was there before the recording began")
        return self._blocks.pop(block) if forget else self._blocks[block]


def _pool(stats: dict[str, Any], which: str) -> Pool:
    return Pool(**{name: stats[f"{name}_bytes"]["all"][which] for name in Pool.__struct_fields__})


def same_calls(recording: Recording, found: Reallocation) -> bool:
    """Whether the allocator did what it did while the script ran: blocks at the same places, the same segments."""
    taken = np.flatnonzero(recording.kinds == Kind.SEGMENT)
    calls = np.cumsum(recording.kinds == Kind.ALLOCATE)  # those of a request come before it
    as_recorded = list(zip(calls[taken].tolist(), recording.sizes[taken].tolist()))
    here = calls[found.rows] - (recording.kinds[found.rows] == Kind.ALLOCATE)
    placed = recording.reads[recording.kinds == Kind.ALLOCATE]
    return (
        found.refused is None
        and as_recorded == list(zip(here.tolist(), found.sizes.tolist()))
        and np.array_equal(placed - placed[:1], found.addresses - found.addresses[:1])
    )


def with_segments(recording: Recording, found: Reallocation) -> Recording:
    """The recording with the segments of ``found`` in place of its own."""
    kept = np.flatnonzero(recording.kinds != Kind.SEGMENT)
    emptied = recording.kinds[found.rows] == Kind.SYNCHRONISE
    # An allocation's segments come before it, those of an emptied cache after the wait.
    places = np.concatenate((2.0 * kept, 2.0 * found.rows + np.where(emptied, 1.0, -1.0)))
    order = np.argsort(places, kind="stable")
    source, fresh = np.concatenate((kept, found.rows))[order], order >= len(kept)
    sizes = np.concatenate((recording.sizes[kept], found.sizes))[order]
    ends = np.concatenate((recording.access_ends[kept], np.zeros(len(found.rows), np.int64)))[order]
    columns = {name: getattr(recording, name)[source] for name in _COPIED}
    for name in _BLANK:
        columns[name] = np.where(fresh, columns[name].dtype.type(0), columns[name])
    columns["kinds"] = np.where(fresh, np.uint8(Kind.SEGMENT), columns["kinds"])
    columns["streams"] = np.where(fresh, np.int64(NO_STREAM), columns["streams"])
    return replace(recording, **columns, sizes=sizes, access_ends=np.maximum.accumulate(ends))


_BLANK = ("names", "subjects", "reads", "writes", "signatures", "flags", "categories", "sites", *HOST_COUNTS)
_COPIED = (*_BLANK, "kinds", "streams", "modules", "phases", "threads")


def stops(recording: Recording) -> Iterator[int]:
    """Where the host waits to give memory back: how many other events come before."""
    others = np.cumsum(recording.kinds != Kind.SEGMENT)
    given_back = (recording.kinds == Kind.SEGMENT) & (recording.sizes < 0)
    yield from others[given_back].tolist()
