"""Why a job hangs, from the flight recorder dumps of its ranks: which call does not end, and which ranks are missing.

Calls of one group are matched by sequence number, messages by sender, receiver and order. A rank is not called missing
if its ring buffer has dropped its earliest calls, it left no dump, or its dump is older than the others'. A rank that
is missing because it waits in another call is not the cause: the cause is at the end of such a chain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from refshard.analysis.kineto import operation_of
from refshard.analysis.mismatch import (
    MESSAGES,
    Call,
    Fault,
    GroupKey,
    Mismatch,
    Side,
    absent_sides,
    calls_differ,
    deadlock,
    name_ranks,
    shortest_circle,
    sides_of,
    wrong_group,
)
from refshard.analysis.names import dtype_named
from refshard.events.flight import Entry, Flight

_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end on no rank before all of them have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a rank stands: its earliest call that has not ended (``waits``), else its last one; None if it recorded
    none. ``number`` counts the calls of ``group`` from 1, ``created_ns`` is when it was made, since 1970. ``calls`` are
    in its dump, and ``lost`` were dropped from its ring before.
    """

    rank: int
    call: Call | None
    waits: bool = False
    group: GroupKey | None = None
    number: int = 0
    created_ns: int | None = None
    calls: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What dumps tell: the ``mismatches`` that cause a hang; ``followers``, which only wait for ranks that these hold
    up; where each rank stands; ``doubts``, in words; and ``silent`` ranks, which left no dump.
    """

    mismatches: tuple[Mismatch, ...]
    followers: tuple[Mismatch, ...]
    stands: tuple[Stand, ...]
    doubts: tuple[str, ...] = ()
    silent: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Meeting:
    """Calls that belong together. ``pending`` ranks have not ended it."""

    group: GroupKey
    members: tuple[int, ...]
    number: int
    calls: dict[int, Call] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    records: dict[int, int] = field(default_factory=dict)
    created: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, call: Call, entries: Sequence[Entry], *, done: bool) -> None:
        self.calls[rank], self.records[rank] = call, entries[0].record_id
        self.created[rank] = entries[0].time_created_ns or 0
        if not done:
            self.pending.add(rank)

    @property
    def is_message(self) -> bool:
        return any(call.op in MESSAGES for call in self.calls.values())

    @property
    def met(self) -> bool:
        """Whether all of its ranks have come, since one has ended it that cannot end before."""
        ended = self.calls.keys() - self.pending
        return any(self.calls[rank].op in _TOGETHER for rank in ended)


def find_hang(flights: Mapping[int, Flight]) -> Hang:
    """What the dumps of one job's ranks tell."""
    return _Job(flights).hang()


class _Job:
    """The ranks' calls, put together."""

    def __init__(self, flights: Mapping[int, Flight]) -> None:
        self.flights = flights
        self.groups = _groups(flights)
        world = {rank for groups in self.groups.values() for group in groups for rank in group.ranks}
        self.silent = tuple(sorted(world - flights.keys()))
        self.by_rank: dict[int, list[_Meeting]] = {rank: [] for rank in flights}
        self.meetings = list(self._collectives()) + list(self._messages())
        for meeting in self.meetings:
            for rank in meeting.calls:
                self.by_rank[rank].append(meeting)
        for rank, mine in self.by_rank.items():
            mine.sort(key=lambda meeting: meeting.records[rank])
        self.first: dict[tuple[GroupKey, int], int] = {}
        for meeting in self.meetings:
            for rank in () if meeting.is_message else meeting.calls:
                self.first.setdefault((meeting.group, rank), meeting.number)
        self.older = {
            rank: meeting
            for meeting in self.meetings if meeting.met
            for rank in meeting.members
            if rank in flights and rank in (meeting.pending | self._not_called(meeting))
        }  # fmt: skip

    def hang(self) -> Hang:
        """The first mismatch of each group that nothing else explains."""
        wrong = list(self._wrong_groups())
        differing = {m.group: m for m in reversed(self.meetings) if self._differ(m)}
        found = [*wrong, *(self._differing(m) for m in differing.values())]
        doubts = list(self._doubts())
        waits = self._waits(set(differing))
        absent = {id(m): self._not_called(m) - self._unknown(m) for m in waits}
        edges: dict[int, dict[int, _Meeting]] = defaultdict(dict)
        for meeting in waits:
            for rank in meeting.pending:
                for other in absent[id(meeting)]:
                    edges[rank].setdefault(other, meeting)
        causes, followers = list[Mismatch](), list[Mismatch]()
        around = list[_Meeting]()
        if circle := shortest_circle(dict(sorted(edges.items()))):
            around = [edges[rank][other] for rank, other in zip(circle, [*circle[1:], circle[0]])]
            causes.append(deadlock(circle, [m.calls[rank] for rank, m in zip(circle, around)], around[0].group))
        silent = {id(m): set(m.members) & set(self.silent) for m in waits if not absent[id(m)] | self._unknown(m)}
        held = edges.keys() | {rank for m in differing.values() for rank in m.calls}
        held |= {rank for m in waits if silent.get(id(m)) for rank in m.pending}
        for meeting in (one for one in waits if one not in around):
            if gone := absent[id(meeting)]:
                (followers if gone <= held else causes).append(self._missing(meeting, gone))
            elif without := silent.get(id(meeting)):
                side = Side(ranks=tuple(sorted(without)), says="left no dump")
                causes.append(self._waiting(meeting, Fault.MISSING, side))
        if not (found or causes or followers):
            causes += self._crossed(waits)
        if not (found or causes or followers or doubts):
            causes += [self._stalled(m) for m in waits if m.pending >= set(m.members)]
        return Hang(
            mismatches=(*found, *causes), followers=tuple(followers), stands=tuple(map(self._stand, self.flights)),
            doubts=tuple(doubts), silent=self.silent,
        )  # fmt: skip

    def _collectives(self) -> Iterator[_Meeting]:
        found: dict[tuple[GroupKey, int], _Meeting] = {}
        for rank, group, entries in self._calls(messages=False):
            key = group, entries[0].collective_seq_id
            meeting = found.setdefault(key, _Meeting(group, group.ranks, key[1]))
            meeting.add(rank, _call(entries, group), entries, done=entries[-1].done)
        yield from sorted(found.values(), key=lambda one: one.number)

    def _messages(self) -> Iterator[_Meeting]:
        """Messages between two ranks, by their order; by that of those that have not ended, if a ring dropped some."""
        found: dict[tuple[GroupKey, int, int, int], _Meeting] = {}
        counts: Counter[object] = Counter()
        for rank, group, entries in self._calls(messages=True):
            for entry in entries:
                call = _call([entry], group)
                if call.op not in MESSAGES or call.other < 0:
                    continue
                sender, receiver = (rank, call.other) if call.op == "send" else (call.other, rank)
                flights = [self.flights[one] for one in (sender, receiver) if one in self.flights]
                done = entries[-1].done  # of a batch, only the closing entry is followed
                if any(flight.lost for flight in flights) and done:
                    continue
                count = counts[rank, group, sender, receiver]
                counts[rank, group, sender, receiver] += 1
                key = group, sender, receiver, count
                meeting = found.setdefault(key, _Meeting(group, (sender, receiver), count + 1))
                meeting.add(rank, call, [entry], done=done)
        yield from found.values()

    def _calls(self, *, messages: bool) -> Iterator[tuple[int, GroupKey, list[Entry]]]:
        """Each rank's calls in its order; a coalesced one is several entries."""
        for rank, flight in self.flights.items():
            calls: dict[object, tuple[GroupKey, list[Entry]]] = {}
            for entry in flight.entries:
                known = self.groups.get(entry.process_group[0], ())
                group = next((group for group in known if rank in group.ranks), None)
                if entry.is_p2p == messages and group is not None:
                    number = entry.p2p_seq_id if messages else entry.collective_seq_id
                    calls.setdefault((group, number), (group, []))[1].append(entry)
            for group, entries in calls.values():
                yield rank, group, entries

    def _not_called(self, meeting: _Meeting) -> set[int]:
        """Ranks with a dump in which the call should be, and is not."""
        gone = {rank for rank in meeting.members if rank in self.flights and rank not in meeting.calls}
        return {rank for rank in gone if meeting.is_message or not self._dropped(meeting, rank)}

    def _dropped(self, meeting: _Meeting, rank: int) -> bool:
        """Whether the rank's ring may have dropped its call."""
        first = self.first.get((meeting.group, rank), 0)
        return bool(self.flights[rank].lost) and (not first or meeting.number < first)

    def _waits(self, differing: set[GroupKey]) -> list[_Meeting]:
        """The first call of each group, and the first message of two ranks, that has not ended; by time."""
        first: dict[object, _Meeting] = {}
        for meeting in sorted(self.meetings, key=lambda one: one.number):
            if meeting.pending and meeting.group not in differing and not meeting.met:
                first.setdefault((meeting.group, meeting.members if meeting.is_message else ()), meeting)
        return sorted(first.values(), key=lambda one: min(one.created[rank] for rank in one.pending))

    def _unknown(self, meeting: _Meeting) -> set[int]:
        """Ranks that may have called it: their dumps are older, or their rings dropped it."""
        gone = set(meeting.members) & self.flights.keys() - meeting.calls.keys()
        return {rank for rank in gone if rank in self.older or self._early(meeting, rank)} | (
            gone - self._not_called(meeting)
        )

    def _early(self, meeting: _Meeting, rank: int) -> bool:
        return 0 < self.flights[rank].written_ns < min(meeting.created.values())

    def _doubts(self) -> Iterator[str]:
        for rank, meeting in self.older.items():
            ended = sorted(meeting.calls.keys() - meeting.pending)
            yield (
                f"{name_ranks(ended).capitalize()} ended {meeting.calls[ended[0]]} (call {meeting.number} in "
                f"{meeting.group}), which rank {rank}'s dump does not show: that dump is older, or its device or link "
                f"fails. What rank {rank} did later is unknown."
            )
        told = set()
        for meeting in self.meetings:
            if meeting.met or not meeting.pending:
                continue
            for rank in meeting.members:
                if rank not in self.flights or rank in meeting.calls or rank in told:
                    continue
                if not meeting.is_message and self._dropped(meeting, rank):
                    told.add(rank)
                    yield (
                        f"Rank {rank}'s ring dropped its first {self.flights[rank].lost:,} calls, maybe also "
                        f"call {meeting.number} in {meeting.group}: record more (TORCH_FR_BUFFER_SIZE)."
                    )
                elif rank not in self.older and self._early(meeting, rank):
                    told.add(rank)
                    written = datetime.fromtimestamp(self.flights[rank].written_ns / 1e9, UTC)
                    yield (
                        f"The dump of rank {rank} was written at {written:%H:%M:%S} UTC, before other ranks called "
                        f"{next(iter(meeting.calls.values()))}: what it did later is unknown."
                    )

    def _wrong_groups(self) -> Iterator[Mismatch]:
        """Groups of one name that share ranks, and are not the same; disjoint ones may have one name."""
        for name, groups in self.groups.items():
            for one in groups:
                for other in groups:
                    if one.ranks < other.ranks and set(one.ranks) & set(other.ranks):
                        makers = [
                            min(r for r, flight in self.flights.items() if flight.groups.get(name) == group.ranks)
                            for group in (one, other)
                        ]
                        yield replace(wrong_group(makers[0], one, makers[1], other), step=0)

    def _differ(self, meeting: _Meeting) -> bool:
        first, *others = meeting.calls.values()
        return any(calls_differ(first, other) for other in others)

    def _differing(self, meeting: _Meeting) -> Mismatch:
        sides = sides_of(meeting.calls, Fault.DIFFERS)
        following = {rank: self._next(meeting, rank) for rank in meeting.calls}
        if len(sides) == 2:
            (one,), (other,) = (side.ranks[:1] for side in sides)
            pairs = ((one, other), (other, one))
            if all((call := following[a]) and not calls_differ(call, meeting.calls[b]) for a, b in pairs):
                sides = (*sides[:1], replace(sides[1], says=f"{sides[1].says} (the same calls in another order)"))
        return Mismatch(fault=Fault.DIFFERS, group=meeting.group, sides=sides, number=meeting.number, step=0)

    def _next(self, meeting: _Meeting, rank: int) -> Call | None:
        later = (
            m.calls[rank] for m in self.by_rank[rank] if m.group == meeting.group and m.number == meeting.number + 1
        )
        return next(later, None)

    def _missing(self, meeting: _Meeting, gone: Iterable[int]) -> Mismatch:
        last: dict[int, Call | None] = {}
        sides = list[Side]()
        for rank in sorted(gone):
            stand = self._stand(rank)
            if stand.waits and stand.group is not None:
                says = f"does not call it: it waits in {stand.call}, call {stand.number} in {stand.group}"
                sides.append(Side(ranks=(rank,), says=says, call=stand.call))
            else:
                last[rank] = stand.call
        return self._waiting(
            meeting, Fault.MISSING, *absent_sides(last, "does not call it", "do not call it"), *sides
        )  # fmt: skip

    def _waiting(self, meeting: _Meeting, fault: Fault, *others: Side) -> Mismatch:
        waiting = {rank: meeting.calls[rank] for rank in sorted(meeting.pending)}
        sides = (*sides_of(waiting, fault, "waits in", "wait in"), *others)
        return Mismatch(fault=fault, group=meeting.group, sides=sides, number=meeting.number, step=0)

    def _crossed(self, waits: Sequence[_Meeting]) -> Iterator[Mismatch]:
        """Two calls that all of their ranks made and that two ranks made in opposite orders."""
        for place, one in enumerate(waits):
            for other in waits[place + 1 :]:
                both = sorted(one.pending & other.pending)
                ahead = [rank for rank in both if one.records[rank] < other.records[rank]]
                behind = [rank for rank in both if rank not in ahead]
                if ahead and behind:
                    a, b = ahead[0], behind[0]
                    yield deadlock([a, b], [one.calls[a], other.calls[b]], one.group)
                    return

    def _stalled(self, meeting: _Meeting) -> Mismatch:
        stalled = self._waiting(meeting, Fault.STALLED)
        *first, last = stalled.sides
        known = self.members_known(meeting.group)
        why = "all ranks called it alike, and it does not end" if known else "no dump says which ranks are in its group"
        return replace(stalled, sides=(*first, replace(last, says=f"{last.says}: {why}")))

    def members_known(self, group: GroupKey) -> bool:
        """Whether dumps say who is in a group; gloo's do not, but everyone is in the default one."""
        named = any(group.name in flight.groups for flight in self.flights.values())
        return named or group.description == "default_pg"

    def _stand(self, rank: int) -> Stand:
        mine = self.by_rank[rank]
        waiting = [m for m in mine if rank in m.pending and not m.met]
        lost = self.flights[rank].lost
        if not mine:
            return Stand(rank=rank, call=None, lost=lost)
        meeting = waiting[0] if waiting else mine[-1]
        return Stand(
            rank=rank, call=meeting.calls[rank], waits=bool(waiting), group=meeting.group, number=meeting.number,
            created_ns=meeting.created[rank] or None, calls=len(mine), lost=lost,
        )  # fmt: skip


def _groups(flights: Mapping[int, Flight]) -> dict[str, list[GroupKey]]:
    """Groups by torch's name for them. Where no dump says who is in one, as with gloo, those that called it; in the
    default group is everyone.
    """
    ranks: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    callers: dict[str, dict[int, None]] = defaultdict(dict)
    descriptions: dict[str, str] = {}
    for rank, flight in flights.items():
        for name, members in flight.groups.items():
            ranks[name][members] = None
        for entry in flight.entries:
            name, description = entry.process_group
            descriptions[name] = description
            callers[name][rank] = None
    everyone = range(max((*flights, *(r for some in ranks.values() for one in some for r in one)), default=-1) + 1)
    found = {}
    for name in dict.fromkeys((*callers, *ranks)):
        unknown = everyone if descriptions.get(name) == "default_pg" else callers[name]
        known = list(ranks[name]) or [tuple(sorted(unknown))]
        found[name] = [GroupKey(name=name, ranks=one, description=descriptions.get(name, "")) for one in known]
    return found


def _call(entries: Sequence[Entry], group: GroupKey) -> Call:
    """A call: of several entries, what they move together."""
    inner = [entry for entry in entries if not entry.profiling_name.endswith("coalesced")] or list(entries)
    op, _, ends = inner[0].profiling_name.partition(":")[2].partition(" ")
    op = "barrier" if "barrier" in op else operation_of(op or inner[0].profiling_name)
    sizes = [_bytes(entry, op, len(group.ranks)) for entry in inner]
    dtypes = {dtype for _, dtype in sizes}
    places = next((entry.places for entry in entries if entry.places), ())
    return Call(
        op=op, bytes=-1 if any(size < 0 for size, _ in sizes) else sum(size for size, _ in sizes),
        dtype=dtypes.pop() if len(dtypes) == 1 and op != "barrier" else "",
        other=_other_end(op, ends, group), places=places, step=0,
    )  # fmt: skip


def _bytes(entry: Entry, op: str, ranks: int) -> tuple[int, str]:
    """Bytes of the unsharded tensor and the dtype; -1 if unknown."""
    dtypes = entry.input_dtypes or entry.output_dtypes
    element = dtype_named(dtypes[0]) if dtypes else None
    if element is None:
        return -1, ""
    given, made = (sum(map(math.prod, sizes)) for sizes in (entry.input_sizes, entry.output_sizes))
    if op in ("gather", "scatter"):
        # The other side's list is on the root only.
        return (given if op == "gather" else made) * ranks * element[1], element[0]
    return max(given, made) * element[1], element[0]


def _other_end(op: str, ends: str, group: GroupKey) -> int:
    """The global rank of a message's other end: torch writes ``0->1`` and ``1<-0``, by ranks of the group."""
    if op not in MESSAGES:
        return -1
    other = ends.partition("->" if op == "send" else "<-")[2]
    return group.ranks[int(other)] if other.isdigit() and int(other) < len(group.ranks) else -1
