"""Races in a recording: two streams that touch the same memory, at least one writing, in an order that nothing fixes.

Vector clocks over streams and the host give the order: the order of a stream; an event that one stream records and
another waits for; the host, once it has waited for an event, a stream or the device, before all later launches.
Unordered accesses may run in either order on a GPU, even if they never did. Streams do not wait for the default stream:
torch and NCCL make theirs non-blocking.

Reused memory is covered, because addresses are compared, not tensors. After a block is freed, its stream uses it again
at once; another stream that still uses it then races with the block's next owner. Such a pair is marked
:attr:`Conflict.REUSE`.

Copies to and from page-locked memory count as accesses to it, so two streams can race there. That memory is never
reused too early: torch's allocator keeps it until all copies have ended.

Not covered: the host's own accesses (it may change pinned memory while a non-blocking copy reads it), other ranks and
processes, and what kernels do within an operator. All threads of the host count as one timeline. A tensor touches all
bytes from its first element to its last, so interleaved strided views seem to overlap.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import Category, Flag, Kind, Phase, Recording
from refshard.quantities import format_times

Clock = list[int]
"""How many of the counted rows of each stream are known to be over."""


def known_before(recording: Recording, touching: npt.NDArray[np.bool_]) -> dict[int, list[Clock]]:
    """By stream, what is over before each of its rows begins, of those rows that ``touching`` (bool, by row) picks.

    A clock counts these rows by stream: streams that have some come first, in ascending order. A stream's own place in
    its clocks means nothing.
    """
    ordering = np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONISE))
    # The allocator waits for the device before it gives memory back.
    given_back = (recording.kinds == Kind.SEGMENT) & (recording.sizes < 0)
    rows = np.flatnonzero(touching | ordering | given_back)
    order = _Order(_clock_order(recording, touching, rows))
    columns = recording.kinds, recording.streams, recording.subjects, touching
    for kind, stream, subject, touches in zip(*(column[rows].tolist() for column in columns)):
        if touches:
            order.touch(stream)
        elif kind == Kind.RECORD:
            order.record(stream, subject)
        elif kind == Kind.WAIT:
            order.wait(stream, subject)
        elif kind == Kind.SYNCHRONISE and subject:
            order.host_waits_for(order.event(subject))
        elif kind == Kind.SYNCHRONISE and stream >= 0:
            order.host_waits_for(order.clock(stream))
        else:
            for each in order.known:
                order.host_waits_for(order.clock(each))
    return order.known


def _clock_order(recording: Recording, touching: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64]) -> list[int]:
    """All streams of these rows; streams that touch memory come first."""
    touch = set(recording.streams[touching].tolist())
    return sorted(touch) + sorted(set(recording.streams[rows].tolist()) - touch)


class _Order:
    """Vector clocks of streams, events and the host. A clock is never changed, only replaced."""

    def __init__(self, streams: Sequence[int]) -> None:
        self._places = {stream: place for place, stream in enumerate(streams)}
        nothing = [0] * len(streams)
        self._host = nothing
        self._clocks = dict.fromkeys(streams, nothing)
        self._hosts_seen = dict.fromkeys(streams, nothing)
        self._events: dict[int, Clock] = {}
        self._nothing = nothing
        self.known: dict[int, list[Clock]] = {stream: [] for stream in streams}

    def touch(self, stream: int) -> None:
        self.known[stream].append(self._begun(stream))

    def record(self, stream: int, event: int) -> None:
        self._events[event] = self.clock(stream)

    def wait(self, stream: int, event: int) -> None:
        self._clocks[stream] = _join(self._clocks[stream], self.event(event))

    def host_waits_for(self, clock: Clock) -> None:
        self._host = _join(self._host, clock)

    def event(self, event: int) -> Clock:
        """What an event stands for: nothing, as in CUDA, if it was never recorded."""
        return self._events.get(event, self._nothing)

    def clock(self, stream: int) -> Clock:
        """All events that have ended once everything issued to a stream so far has."""
        clock = list(self._begun(stream))
        clock[self._places[stream]] = len(self.known[stream])
        return clock

    def _begun(self, stream: int) -> Clock:
        """What is over before the next thing on a stream begins: the host issues it, knowing what it knows."""
        if self._hosts_seen[stream] is not self._host:
            self._hosts_seen[stream] = self._host
            self._clocks[stream] = _join(self._clocks[stream], self._host)
        return self._clocks[stream]


def _join(one: Clock, other: Clock) -> Clock:
    return [a if a > b else b for a, b in zip(one, other)]


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FEW = 256
_MANY = 1 << 14
"""Accesses of two lanes that are compared at a time, each with each."""


class Conflict(Enum):
    """How two accesses collide. ``REUSE``: a block that the earlier one touched was freed before the later one."""

    WRITE_WRITE = "write-write"
    READ_WRITE = "read-write"
    REUSE = "memory handed on by the allocator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a race: an operator or collective, its stream, where in the model and the step, and what it does."""

    operator: str
    stream: int
    module: str
    phase: Phase
    writes: bool

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        does = "writes" if self.writes else "reads"
        return f"{self.operator} ({does}, {self.phase.name.lower()}{where}, stream {self.stream})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """All pairs of rows that collide in one way. The host issued ``earlier`` first; the device may run it last.

    ``times`` counts pairs. ``rows`` is the first pair, and ``nbytes`` how many bytes its two accesses have in common.
    """

    conflict: Conflict
    earlier: Side
    later: Side
    times: int
    rows: tuple[int, int]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.conflict.value}, {format_times(self.times)}: {self.earlier}, then {self.later}"


def find_races(recording: Recording) -> tuple[Race, ...]:
    """Every race between two streams of a recording, by first pair.

    A row that both reads and writes exactly the same bytes counts as writing them. A kernel's workspace counts as
    written by the operator that it was allocated for. Not counted is what was issued before the recording began.
    """
    touches = _touches(recording)
    lanes = _lanes(recording, touches)
    tally = _Tally(recording, touches)
    for one, other in combinations(range(len(lanes)), 2):
        for pair in _unordered(lanes[one], lanes[other], touches):
            tally.add(*pair)
    return tally.races()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Touches:
    """Accesses, sorted by the rows that make them: bytes ``[starts, ends)``."""

    rows: IntArray
    starts: IntArray
    ends: IntArray
    writes: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lane:
    """The touching rows of one stream, in order. ``number`` is the lane's place among all.

    ``known[k, i]``: how many of lane ``i``'s rows come before this lane's row ``k``. Touches ``accesses`` are this
    lane's; touch ``n`` of them belongs to row ``places[n]``, and row ``k`` has those from ``firsts[k]`` to
    ``firsts[k + 1]``.
    """

    number: int
    known: IntArray
    accesses: IntArray
    places: IntArray
    firsts: IntArray


def _touches(recording: Recording) -> _Touches:
    counts = np.diff(recording.access_ends, prepend=0)
    by_launch = np.repeat(np.arange(len(recording)), counts)
    launches = np.isin(recording.kinds, (Kind.LAUNCH, Kind.COLLECTIVE)) & (recording.streams >= 0)
    launches &= (recording.flags & Flag.HOST_ONLY) == 0
    kept = launches[by_launch] & (recording.access_sizes > 0)
    scratch = np.flatnonzero(_workspaces(recording))
    rows = np.concatenate([by_launch[kept], scratch])
    starts = np.concatenate([recording.access_addresses[kept], recording.reads[scratch]])
    ends = starts + np.concatenate([recording.access_sizes[kept], recording.sizes[scratch]])
    writes = np.concatenate([recording.access_writes[kept], np.ones(len(scratch), np.bool_)])
    order = np.lexsort((~writes, ends, starts, rows))
    rows, starts, ends, writes = rows[order], starts[order], ends[order], writes[order]
    again = np.zeros(len(rows), np.bool_)
    again[1:] = (rows[1:] == rows[:-1]) & (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])
    return _Touches(rows=rows[~again], starts=starts[~again], ends=ends[~again], writes=writes[~again])


def _workspaces(recording: Recording) -> BoolArray:
    """Rows that allocate a workspace. NCCL's are left out: it uses them on its own stream, not on the block's."""
    found = (recording.kinds == Kind.ALLOCATE) & (recording.categories == Category.WORKSPACE)
    found &= (recording.reads > 0) & (recording.sizes > 0) & (recording.streams >= 0)
    found &= recording.flags & Flag.CAPTURED == 0  # nodes of the graph have them
    of_nccl = np.array([name.startswith("nccl::") for name in recording.name_table], np.bool_)
    scratch: BoolArray = found & ~of_nccl[recording.names]
    return scratch


def _lanes(recording: Recording, touches: _Touches) -> list[_Lane]:
    """One lane for each stream that touches memory, by stream."""
    touching = np.zeros(len(recording), np.bool_)
    touching[touches.rows] = True
    streams = np.unique(recording.streams[touching]).tolist()
    known = known_before(recording, touching)
    lanes = []
    for number, stream in enumerate(streams):
        accesses = np.flatnonzero(recording.streams[touches.rows] == stream)
        _, firsts, places = np.unique(touches.rows[accesses], return_index=True, return_inverse=True)
        lanes.append(
            _Lane(
                number=number,
                known=np.array(known[stream], np.int64)[:, : len(streams)],
                accesses=accesses,
                places=places,
                firsts=np.append(firsts, len(accesses)),
            )
        )
    return lanes


def _unordered(one: _Lane, other: _Lane, touches: _Touches) -> Iterator[tuple[IntArray, IntArray]]:
    """Touches of two lanes that collide and that nothing orders, a batch of pairs at a time.

    The rows of a lane that are ordered neither before nor after a given row of another follow each other without a gap:
    later ones come after it, earlier ones before. All pairs of two given rows are in one batch.
    """
    if other.accesses.size < one.accesses.size:
        one, other = other, one
    rows = np.arange(1, len(one.firsts))
    lows, highs = one.known[:, other.number], np.searchsorted(other.known[:, one.number], rows)
    mine = np.flatnonzero((lows < highs)[one.places])
    for some in _batches(one.places[mine], _FEW):
        few = mine[some]
        window = slice(other.firsts[lows[one.places[few[0]]]], other.firsts[highs[one.places[few[-1]]]])
        theirs = window.start + np.flatnonzero(_collides(other.accesses[window], one.accesses[few], touches))
        for part in _batches(other.places[theirs], _MANY):
            many = theirs[part]
            at = other.places[many]
            open_ = (lows[one.places[few], None] <= at) & (at < highs[one.places[few], None])
            found = np.nonzero(open_ & _overlaps(one.accesses[few], other.accesses[many], touches))
            yield one.accesses[few[found[0]]], other.accesses[many[found[1]]]


def _batches(places: IntArray, size: int) -> Iterator[slice]:
    """Slices of about ``size`` accesses that keep those of one row together."""
    end = 0
    while end < len(places):
        start, end = end, min(end + size, len(places))
        end = int(np.searchsorted(places, places[end - 1], side="right"))
        yield slice(start, end)


def _overlaps(few: IntArray, many: IntArray, touches: _Touches) -> BoolArray:
    """Which of few accesses collides with which of many: common bytes, and one of the two writes."""
    overlap = touches.starts[few, None] < touches.ends[many]
    overlap &= touches.starts[many] < touches.ends[few, None]
    overlap &= touches.writes[few, None] | touches.writes[many]
    return overlap


def _collides(many: IntArray, few: IntArray, touches: _Touches) -> BoolArray:
    """Which of many accesses collides with any of few."""
    writes = few[touches.writes[few]]
    starts, ends = touches.starts[many], touches.ends[many]
    found = _meets(starts, ends, touches.starts[writes], touches.ends[writes])
    found |= touches.writes[many] & _meets(starts, ends, touches.starts[few], touches.ends[few])
    return found


def _meets(starts: IntArray, ends: IntArray, of_starts: IntArray, of_ends: IntArray) -> BoolArray:
    """Which of the ranges ``[starts, ends)`` have bytes in common with the union of others."""
    if not of_starts.size:
        return np.zeros(len(starts), np.bool_)
    order = np.argsort(of_starts)
    of_starts, reach = of_starts[order], np.maximum.accumulate(of_ends[order])
    begun = np.searchsorted(of_starts, ends)
    found: BoolArray = (begun > 0) & (reach[begun - 1] > starts)
    return found


class _Tally:
    """Counts pairs of rows by who collides with whom, and how."""

    def __init__(self, recording: Recording, touches: _Touches) -> None:
        self._recording, self._touches = recording, touches
        self._sites = _sites(recording)
        self._free_rows = np.flatnonzero(recording.kinds == Kind.FREE)
        self._free_starts = recording.reads[self._free_rows]
        self._free_ends = self._free_starts + recording.sizes[self._free_rows]
        self._freed: dict[int, int] = {}
        self._times: Counter[tuple[int, ...]] = Counter()
        self._first: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def add(self, some: IntArray, others: IntArray) -> None:
        """Count pairs of touches. All those of any two rows come at once."""
        if not some.size:
            return
        touches = self._touches
        in_order = touches.rows[some] < touches.rows[others]
        a, b = np.where(in_order, some, others), np.where(in_order, others, some)
        nbytes = np.minimum(touches.ends[a], touches.ends[b]) - np.maximum(touches.starts[a], touches.starts[b])
        reuse = self._freed_after(a) < touches.rows[b]
        pairs = np.stack([touches.rows[a], touches.rows[b], touches.writes[a], touches.writes[b], reuse])
        which, _ = _distinct(pairs, -nbytes)
        pairs, nbytes = pairs[:, which], nbytes[which]
        keys = np.concatenate([self._sites[pairs[:2]], pairs[2:]])
        which, times = _distinct(keys, pairs[0] * len(self._recording) + pairs[1])
        for at, count in zip(which.tolist(), times.tolist()):
            key = tuple(keys[:, at].tolist())
            first = (int(pairs[0, at]), int(pairs[1, at]), int(nbytes[at]))
            self._times[key] += count
            self._first[key] = min(self._first.get(key, first), first)

    def races(self) -> tuple[Race, ...]:
        """All that was counted, by first pair; of one pair, what it writes first."""
        found = []
        by_pair = sorted(self._first.items(), key=lambda item: (item[1][:2], [-number for number in item[0][2:]]))
        for key, (earlier, later, nbytes) in by_pair:
            _, _, earlier_writes, later_writes, reuse = key
            both = Conflict.WRITE_WRITE if earlier_writes and later_writes else Conflict.READ_WRITE
            found.append(
                Race(
                    conflict=Conflict.REUSE if reuse else both,
                    earlier=self._side(earlier, bool(earlier_writes)),
                    later=self._side(later, bool(later_writes)),
                    times=self._times[key],
                    rows=(earlier, later),
                    nbytes=nbytes,
                )
            )
        return tuple(found)

    def _freed_after(self, accesses: IntArray) -> IntArray:
        """For each access, the first later row that frees memory which it touches; past the end if no row does."""
        distinct, inverse = np.unique(accesses, return_inverse=True)
        for access in distinct.tolist():
            if access not in self._freed:
                self._freed[access] = self._first_free(access)
        found: IntArray = np.array([self._freed[access] for access in distinct.tolist()], np.int64)[inverse]
        return found

    def _first_free(self, access: int) -> int:
        after = int(np.searchsorted(self._free_rows, self._touches.rows[access]))
        hits = self._free_starts[after:] < self._touches.ends[access]
        hits &= self._free_ends[after:] > self._touches.starts[access]
        at = int(hits.argmax()) if hits.size else 0
        return int(self._free_rows[after + at]) if hits.size and hits[at] else len(self._recording)

    def _side(self, row: int, writes: bool) -> Side:
        recording = self._recording
        return Side(
            operator=recording.name_table[recording.names[row]],
            stream=int(recording.streams[row]),
            module=recording.module_table[recording.modules[row]],
            phase=Phase(recording.phases[row]),
            writes=writes,
        )


def _sites(recording: Recording) -> IntArray:
    """A number for each row, the same for rows of one operator, stream, module and phase."""
    _, streams = np.unique(recording.streams, return_inverse=True)
    sites = recording.names.astype(np.int64) * len(recording.module_table) + recording.modules
    found: IntArray = (sites * len(Phase) + recording.phases) * (len(recording) + 1) + streams
    return found


def _distinct(columns: IntArray, ties: IntArray) -> tuple[IntArray, IntArray]:
    """For each distinct column, which one of those alike has the lowest tie, and how many are alike."""
    order = np.lexsort((ties, *columns))
    columns = columns[:, order]
    new = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))
    begins = np.flatnonzero(new)
    return order[begins], np.diff(np.append(begins, len(order)))
