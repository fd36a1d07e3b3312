"""Frees memory that ``record_stream()`` holds back, when a GPU would free it.

While a script runs, the device knows only what the host has waited for, so such memory stays held for too long: an
upper bound. The recording of the run, priced and replayed, tells how far each stream had come at every allocation. With
this, the allocator repeats the same calls; addresses in the recording stay those of the script's run. Runs without such
memory do not need this.

``record_stream()`` holds a freed block until other streams have passed what had been issued to them when it was freed.
torch records a CUDA event on each of them, and queries the events at every allocation.

Giving memory back to the device makes the host wait, so other segments may change the replay. If they do, replay and
reallocation are repeated with them, a few times at most.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.dryrun.device import Rates
from refshard.dryrun.price import price
from refshard.dryrun.recording import HOST_COUNTS, NO_STREAM, Flag, Kind, Recording, on_stream
from refshard.dryrun.replay import Replayed, replay_together
from refshard.dryrun.request import Pool
from refshard.specs.cluster import ClusterSpec

ON_STREAM = (Kind.LAUNCH, Kind.COLLECTIVE, Kind.RECORD, Kind.WAIT)
"""What a stream has to pass."""


class Follower(ABC):
    """Follows the host through a recording; ``progress`` is what an allocator asks then (the extension's own class)."""

    progress: Any

    @abstractmethod
    def ask(self, row: int) -> None:
        """The host asks for event ``row``."""


class AsHostKnew(Follower):
    """The device's own rule while the script ran: a stream has passed what the host has waited for."""

    def __init__(self, recording: Recording, ext: ModuleType) -> None:
        self.progress = ext.Streams()
        self._kinds: list[int] = recording.kinds.tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._subjects: list[int] = recording.subjects.tolist()
        self._on_stream: list[bool] = on_stream(recording, *ON_STREAM).tolist()

    def ask(self, row: int) -> None:
        """Tell the streams of it."""
        kind, stream, subject = self._kinds[row], self._streams[row], self._subjects[row]
        if kind == Kind.SYNCHRONISE and subject:
            self.progress.host_waits_for_event(subject)
        elif kind == Kind.SYNCHRONISE and stream != NO_STREAM:
            self.progress.host_waits_for_stream(stream)
        elif kind == Kind.SYNCHRONISE:
            self.progress.synchronise()
        elif kind == Kind.RECORD:
            self.progress.record(stream, subject)
        elif kind == Kind.WAIT:
            self.progress.wait(stream, subject)
        elif self._on_stream[row]:
            self.progress.launched(stream)


class AsReplayed(Follower):
    """A GPU's answers: a stream has passed an event if that is over when the host gets to the one at hand.

    What the allocator itself waits for, to give memory back, has been passed too. The wait takes none of the host's
    time here: that needs another replay.
    """

    def __init__(self, recording: Recording, replayed: Replayed, ext: ModuleType) -> None:
        self.progress = _replayed_progress(self, ext)
        self.row = 0
        self.known = -1  # the last event that the allocator has waited for
        self.last: dict[int, int] = {}  # event issued to each stream
        self.now: list[int] = replayed.host_starts.tolist()
        self.finished: list[int] = finish_times(recording, replayed).tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._on_stream: list[bool] = on_stream(recording, *ON_STREAM).tolist()

    def ask(self, row: int) -> None:
        """Remember it."""
        self.row = row
        if self._on_stream[row]:
            self.last[self._streams[row]] = row


def _replayed_progress(follower: AsReplayed, ext: ModuleType) -> Any:
    class Replay(ext.Progress):  # type: ignore[name-defined, misc]
        """Tickets are rows of the recording."""

        def position(self, stream: int) -> int:
            return follower.last.get(stream, -1)

        def passed(self, stream: int, ticket: int) -> bool:
            return ticket <= follower.known or follower.finished[ticket] <= follower.now[follower.row]

        def synchronise(self) -> None:
            follower.known = follower.row

    return Replay()


def finish_times(recording: Recording, replayed: Replayed) -> npt.NDArray[np.int64]:
    """When a stream has passed each event, in nanoseconds of the replay; for what no stream passes, when the host has.

    Streams run in order, so a stream has then passed all that was issued to it before.
    """
    found = replayed.host_ends.copy()
    passed: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for row in np.flatnonzero(on_stream(recording, *ON_STREAM)).tolist():
        kind, stream, subject = int(recording.kinds[row]), int(recording.streams[row]), int(recording.subjects[row])
        awaited = recorded.get(subject, 0) if kind == Kind.WAIT else 0
        end = max(int(found[row]), int(replayed.ends[row]), awaited, passed.get(stream, 0))
        found[row] = passed[stream] = end
        if kind == Kind.RECORD:
            recorded[subject] = end
    return found


EMPTY_CACHE = "empty_cache"
"""Why the host waits where a script empties the allocator's cache."""
MakeAllocator = Callable[[Any, Callable[[int], None]], Any]
"""Makes the extension's allocator from a source of stream progress and a callback for segments."""


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
    """The recording frees a block without a recorded allocation."""


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
        elif kind == Kind.COMMUNICATOR:
            self._allocator.take_outside(int(recording.sizes[row]))
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


UNLIMITED = 0
"""The memory of an unlimited device, for :func:`settle`. Scripts need a number."""
_MOST_REPLAYS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settled:
    """One rank's ``recording`` with the segments that it has on a GPU, and what else the allocator then tells."""

    recording: Recording
    allocator: Reallocation


class NotReproducedError(Exception):
    """The script's run cannot be allocated again as it was, so nothing better than the upper bound is known."""


def holds_back(recording: Recording) -> bool:
    """Whether ``record_stream()`` named another stream than a block's own."""
    return bool((recording.kinds == Kind.HOLD).any())


def settle(
    recordings: Sequence[Recording], cluster: ClusterSpec, ext: ModuleType, device: int, *, as_run_bytes: int,
    total_bytes: int, reset: str = "", expandable: bool | None = None,
) -> tuple[Settled, ...]:  # fmt: skip
    """Settle what ranks that ran on ``device`` hold back, each with ``total_bytes`` of memory.

    Their processes had ``as_run_bytes``, which differs if they ran without a limit. Peaks begin anew at the mark
    ``reset``. Segments are as in their processes unless ``expandable`` is given. If one rank runs out of memory, only
    its refusal counts: recordings then are not those of a GPU.

    Raises:
        NotReproducedError: the recording does not hold all that the allocator did.
        SpecError: the cluster's profile lacks what an event needs.
    """
    make = partial(_make, ext, device, expandable=expandable)
    for recording in recordings:
        _check(recording, ext, _make(ext, device, as_run_bytes))
    rates = Rates.of(cluster)
    for _ in range(_MOST_REPLAYS):
        prices = [price(recording, cluster) for recording in recordings]
        replays = replay_together(recordings, prices, rates)
        found = [
            reallocate(r, AsReplayed(r, replayed, ext), make(total_bytes), reset=_row_of(r, reset))
            for r, replayed in zip(recordings, replays)
        ]
        if any(one.refused for one in found):
            break
        before, recordings = recordings, [with_segments(*each) for each in zip(recordings, found)]
        if [list(stops(r)) for r in before] == [list(stops(r)) for r in recordings]:
            break
    return tuple(Settled(recording=r, allocator=one) for r, one in zip(recordings, found))


def with_segments_of(
    recording: Recording, ext: ModuleType, device: int, *, as_run_bytes: int, total_bytes: int, expandable: bool
) -> Reallocation:
    """What the allocator does with ``total_bytes`` and ``expandable`` segments or not, if nothing is held back.

    Raises:
        NotReproducedError: the recording does not hold all that the allocator did.
    """
    _check(recording, ext, _make(ext, device, as_run_bytes))
    make = _make(ext, device, total_bytes, expandable=expandable)
    return reallocate(recording, AsHostKnew(recording, ext), make)


def _make(ext: ModuleType, device: int, total_bytes: int, *, expandable: bool | None = None) -> MakeAllocator:
    return lambda progress, on_segment: ext.allocator_like(device, progress, on_segment, total_bytes, expandable)


def _check(recording: Recording, ext: ModuleType, make: MakeAllocator) -> None:
    """Allocate again with the answers that the script's process had: the same must come of it."""
    if (recording.flags[recording.kinds == Kind.ALLOCATE] & Flag.PRIVATE_POOL).any():
        raise NotReproducedError("CUDA graphs or a MemPool keep blocks in pools of their own")
    try:
        found = reallocate(recording, AsHostKnew(recording, ext), make)
    except (UnknownBlockError, ValueError) as error:
        raise NotReproducedError(f"the recording misses some allocator calls ({error})") from None
    if not same_calls(recording, found):
        raise NotReproducedError("the recording misses some allocator calls")


def _row_of(recording: Recording, says: str) -> int:
    if not says:
        return 0
    marks = np.flatnonzero((recording.kinds == Kind.MARK) & (recording.names == recording.name_table.index(says)))
    return int(marks[0])
