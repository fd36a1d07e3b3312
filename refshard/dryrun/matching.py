"""Whether the collectives of several ranks match: a mismatch is a hang or corrupt values on real GPUs.

The ranks' recordings run against each other, without time. Each host goes through its calls and stops where it waits.
Each stream takes its entries in order. A collective is done once every rank of its group has it at the head of a
stream; a message, once both ends have. Calls in one group are matched by order, messages also by sender and receiver.

A rank that did not run, or was cut off (after the requested steps, or by an error), is assumed to make every call that
the others wait for. If a rank still waits then, it hangs on GPUs too.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from refshard.analysis.mismatch import (
    MESSAGES,
    ROOTED,
    Call,
    Fault,
    GroupKey,
    Mismatch,
    absent_sides,
    calls_differ,
    deadlock,
    name_ranks,
    shortest_circle,
    sides_of,
    wrong_group,
)
from refshard.dryrun.recording import GROUP, NO_STREAM, Flag, Kind, Recording

_PER_UNIT = frozenset({"all_gather", "reduce_scatter"})
"""Collectives that sharding issues for a unit: of two units, they must not meet."""
_SEEN = (Kind.COLLECTIVE, Kind.RECORD, Kind.WAIT, Kind.SYNCHRONISE, Kind.MARK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """A rank that ran; ``whole`` if its script came to its own end."""

    recording: Recording
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The first mismatch of each group, those that hang first, by step; and ``doubts``, in words, where ranks made
    different numbers of calls until they were cut off after as many steps.
    """

    mismatches: tuple[Mismatch, ...]
    doubts: tuple[str, ...] = ()


def match(ranks: Mapping[int, Ran]) -> Matched:
    """Let the ranks that ran meet."""
    hosts = {rank: _Host(rank, ran) for rank, ran in sorted(ranks.items())}
    world = _World(hosts)
    found = [*world.wrong_groups()]
    world.run()
    found += [*world.differing(), *world.waiting()]
    mismatches = tuple(sorted(found, key=lambda one: (not one.hangs, one.step)))
    return Matched(mismatches=mismatches, doubts=() if mismatches else tuple(world.doubts()))


@dataclass(slots=True, eq=False)
class _Meeting:
    """Calls that meet. ``heads`` are ranks that have it at the head of a stream."""

    group: GroupKey
    number: int
    members: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    heads: set[int] = field(default_factory=set)
    done: bool = False


@dataclass(slots=True, eq=False)
class _Token:
    """An event on a stream."""

    done: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    """Calls that a stream runs at once."""

    meetings: list[_Meeting]


_Item = tuple[int, int, int, Call | None, GroupKey | None, bool]
"""Kind, stream, event, call, group, and whether it joins the call before."""


class _Host:
    """One rank: what its host still has to issue, its streams, and what it waits for."""

    def __init__(self, rank: int, ran: Ran) -> None:
        self.rank, self.whole = rank, ran.whole
        self.groups = _groups(ran.recording)
        self._items = _items(ran.recording, self.groups)
        self._next = next(self._items, None)
        self.counts: Counter[object] = Counter()
        self.calls: dict[GroupKey, list[Call]] = defaultdict(list)
        self.last: Call | None = None
        self.step = 1
        self.streams: dict[object, deque[_Batch | tuple[_Token, bool]]] = defaultdict(deque)
        self._events: dict[int, _Token] = {}
        self._awaited: list[_Token] = []

    @property
    def finished(self) -> bool:
        """Whether the host has issued all that it has."""
        return self._next is None and not self.blocked

    @property
    def blocked(self) -> bool:
        """Whether the host waits for its device."""
        return any(not token.done for token in self._awaited)

    def issue(self, world: "_World") -> bool:
        """Go on until the host waits; whether it did anything."""
        moved = False
        while self._next is not None and not self.blocked:
            kind, stream, event, call, group, joined = self._next
            moved, self._next = True, next(self._items, None)
            if kind == Kind.MARK:
                self.step += 1
            elif kind == Kind.COLLECTIVE:
                assert call is not None
                assert group is not None
                self._call(world, call, group, stream, joined)
            elif kind == Kind.RECORD:
                self._events[event] = self._record(stream)
            elif kind == Kind.WAIT:
                if event in self._events:
                    self.streams[stream].append((self._events[event], True))
            elif event:
                self._awaited = [self._events[event]] if event in self._events else []
            else:
                every = [stream] if stream != NO_STREAM else [one for one in self.streams if isinstance(one, int)]
                self._awaited = [self._record(one) for one in every]
        return moved

    def serve(self, world: "_World") -> bool:
        """Let each stream take what it can; whether any did."""
        moved = False
        for queue in self.streams.values():
            while queue:
                head = queue[0]
                if isinstance(head, _Batch):
                    if not world.try_meet(self.rank, head):
                        break
                else:
                    token, waits = head
                    if waits and not token.done:
                        break
                    token.done = True
                queue.popleft()
                moved = True
        return moved

    def waits_in(self) -> list[_Meeting]:
        """The calls at the head of its streams that are not done."""
        heads = [queue[0] for queue in self.streams.values() if queue]
        return [meeting for head in heads if isinstance(head, _Batch) for meeting in head.meetings if not meeting.done]

    def _record(self, stream: object) -> _Token:
        token = _Token()
        self.streams[stream].append((token, False))
        return token

    def _call(self, world: "_World", call: Call, group: GroupKey, stream: int, joined: bool) -> None:
        self.last = call
        meeting = world.arrive(self, call, group)
        on_host: object = (group, "host", len(self.calls[group]) if call.op in MESSAGES else 0)
        queue = self.streams[on_host if stream == NO_STREAM else stream]
        batch = next((entry for entry in reversed(queue) if isinstance(entry, _Batch)), None)
        if not joined or batch is None:
            batch = _Batch([])
            queue.append(batch)
        if meeting is not None:
            batch.meetings.append(meeting)


class _World:
    """All ranks that ran, and the calls in which they meet."""

    def __init__(self, hosts: Mapping[int, _Host]) -> None:
        self.hosts = hosts
        self.meetings: dict[object, _Meeting] = {}
        self._differing: dict[GroupKey, _Meeting] = {}
        self._values: dict[GroupKey, _Meeting] = {}
        self._ignored: set[GroupKey] = set()

    def run(self) -> None:
        """Until nothing moves."""
        moved = True
        while moved:
            moved = False
            for host in self.hosts.values():
                moved |= host.issue(self)
            for host in self.hosts.values():
                moved |= host.serve(self)

    def arrive(self, host: _Host, call: Call, group: GroupKey) -> _Meeting | None:
        """The meeting of a rank's call, None where it meets nobody who ran."""
        host.calls[group].append(call)
        ends: tuple[int, ...] = ()
        if call.op in MESSAGES:
            ends = (host.rank, call.other) if call.op == "send" else (call.other, host.rank)
        number = host.counts[group, ends]
        host.counts[group, ends] += 1
        if group in self._ignored or not any(rank in self.hosts for rank in group.ranks if rank != host.rank):
            return None
        key = group, ends, number
        meeting = self.meetings.get(key)
        if meeting is None:
            members = tuple(rank for rank in (ends or group.ranks) if rank in self.hosts)
            meeting = self.meetings[key] = _Meeting(group, number, members)
        first = next(iter(meeting.calls.values()), None)
        meeting.calls[host.rank] = call
        if first is not None and group not in self._differing:
            if calls_differ(first, call):
                self._differing[group] = meeting
            elif group not in self._values and _of_other_modules(first, call):
                self._values[group] = meeting
        return meeting

    def try_meet(self, rank: int, batch: _Batch) -> bool:
        """Whether a batch at the head of a rank's stream is done."""
        for meeting in batch.meetings:
            meeting.heads.add(rank)
            if not meeting.done:
                free = meeting.group in self._differing
                meeting.done = free or all(one in meeting.heads or self._free(one, meeting) for one in meeting.members)
        return all(meeting.done for meeting in batch.meetings)

    def _free(self, rank: int, meeting: _Meeting) -> bool:
        """Whether a rank may still do the call: it was cut off before."""
        host = self.hosts[rank]
        return rank not in meeting.calls and not host.whole and host.finished

    def wrong_groups(self) -> Iterator[Mismatch]:
        """Groups of one name with other ranks, and groups that a rank of theirs knows by another name or not at all."""
        known: dict[str, tuple[int, GroupKey]] = {}
        told: set[str] = set()
        for host in self.hosts.values():
            for group in host.groups.values():
                rank, first = known.setdefault(group.name, (host.rank, group))
                if first.ranks != group.ranks:
                    self._ignored |= {first, group}
                    if group.name not in told:
                        told.add(group.name)
                        yield wrong_group(rank, first, host.rank, group)
        for host in self.hosts.values():
            for group in host.groups.values():
                for rank in group.ranks:
                    other = self.hosts.get(rank)
                    if other is None or group in self._ignored or group in other.groups.values():
                        continue
                    mine = host.groups.values()
                    alike = (one for one in other.groups.values() if one.ranks == group.ranks and one not in mine)
                    if (theirs := next(alike, None)) is None and not other.whole:
                        continue
                    self._ignored |= {group, theirs or group}
                    yield wrong_group(host.rank, group, rank, theirs)

    def doubts(self) -> Iterator[str]:
        """Groups with ranks that were cut off after as many steps, but not after as many calls."""
        for group in dict.fromkeys(group for host in self.hosts.values() for group in host.calls):
            hosts = [host for rank, host in self.hosts.items() if rank in group.ranks and not host.whole]
            ranks: dict[int, list[int]] = defaultdict(list)
            for host in hosts:
                ranks[sum(call.op not in MESSAGES for call in host.calls[group])].append(host.rank)
            if len(ranks) > 1 and len({host.step for host in hosts}) == 1:
                counts = ", ".join(f"{name_ranks(which)} made {count:,}" for count, which in sorted(ranks.items()))
                yield (
                    f"Until they were stopped after {hosts[0].step - 1} steps, ranks made different numbers of calls "
                    f"in the group of {name_ranks(group.ranks)}: {counts}. More steps (--steps) would tell whether "
                    "they hang."
                )

    def differing(self) -> Iterator[Mismatch]:
        """Of each group, the first calls that met and differ."""
        for fault, found in ((Fault.DIFFERS, self._differing), (Fault.VALUES, self._values)):
            for group, meeting in found.items():
                if fault == Fault.VALUES and group in self._differing:
                    continue
                sides = sides_of(meeting.calls, fault)
                yield Mismatch(
                    fault=fault, group=group, sides=sides, number=meeting.number + 1,
                    step=min(call.step for call in meeting.calls.values()), since=self._since(meeting),
                )  # fmt: skip

    def _since(self, meeting: _Meeting) -> str:
        """Where calls that met directly before this one come from different lines, the first of these."""
        calls = {rank: self.hosts[rank].calls[meeting.group] for rank in meeting.calls}
        lists = {rank: [call for call in each if call.op not in MESSAGES] for rank, each in calls.items()}
        first = meeting.number
        if any(len(each) <= first for each in lists.values()):
            return ""  # a message
        while first > 0 and len({each[first - 1].places[:1] for each in lists.values()}) > 1:
            first -= 1
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, each in lists.items():
            ranks["".join(each[first].places[:1])].append(rank)
        if first == meeting.number or "" in ranks:
            return ""
        return " and ".join(f"{place} on {name_ranks(which)}" for place, which in ranks.items())

    def waiting(self) -> Iterator[Mismatch]:
        """What still waits: for a rank that ended, or in a circle."""
        told: set[tuple[GroupKey, tuple[int, ...]]] = set()
        blocked: dict[int, list[_Meeting]] = {rank: host.waits_in() for rank, host in self.hosts.items()}
        ended = False
        for meeting in dict.fromkeys(one for waits in blocked.values() for one in waits):
            gone = [r for r in meeting.members if r not in meeting.calls and self.hosts[r].finished]
            if not gone:
                continue
            ended = True
            ends = meeting.members if any(call.op in MESSAGES for call in meeting.calls.values()) else ()
            if (meeting.group, ends) not in told:
                told.add((meeting.group, ends))
                yield self._missing(meeting, gone)
        if not ended and (circle := self._circle(blocked)):
            yield circle

    def _missing(self, meeting: _Meeting, gone: Sequence[int]) -> Mismatch:
        sides = sides_of(meeting.calls, Fault.MISSING, "waits in", "wait in")
        ended = absent_sides({rank: self.hosts[rank].last for rank in gone}, "ends without it", "end without it")
        return Mismatch(
            fault=Fault.MISSING, group=meeting.group, sides=(*sides, *ended), number=meeting.number + 1,
            step=min(call.step for call in meeting.calls.values()),
        )  # fmt: skip

    def _circle(self, blocked: Mapping[int, list[_Meeting]]) -> Mismatch | None:
        """A shortest circle of ranks that wait for each other."""
        edges = {
            rank: {other: meeting for meeting in reversed(waits) for other in meeting.members
                   if other != rank and other not in meeting.heads}
            for rank, waits in blocked.items()
        }  # fmt: skip
        path = shortest_circle(edges)
        if not path:
            return None
        around = [edges[rank][other] for rank, other in zip(path, [*path[1:], path[0]])]
        return deadlock(path, [meeting.calls[rank] for rank, meeting in zip(path, around)], around[0].group)


def _of_other_modules(one: Call, other: Call) -> bool:
    return one.op in _PER_UNIT and bool(one.module and other.module) and one.module != other.module


def _groups(recording: Recording) -> dict[int, GroupKey]:
    """By id; groups of one rank are left out."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    found = {}
    for number, group in sorted(recording.groups.items()):
        about = group.name, group.ranks
        if len(group.ranks) > 1:
            found[number] = GroupKey(name=group.name, ranks=group.ranks, number=counts[about])
        counts[about] += 1
    return found


def _items(recording: Recording, groups: Mapping[int, GroupKey]) -> Iterator[_Item]:
    """What matters of a recording, in the host's order."""
    step = 1
    rows = np.flatnonzero(np.isin(recording.kinds, _SEEN))
    columns = (recording.kinds, recording.streams, recording.subjects, recording.flags)
    for row, kind, stream, subject, flags in zip(rows.tolist(), *(column[rows].tolist() for column in columns)):
        if kind == Kind.MARK:
            if recording.name_table[recording.names[row]] == "step":
                step += 1
                yield kind, stream, 0, None, None, False
        elif kind != Kind.COLLECTIVE:
            yield kind, stream, subject, None, None, False
        elif (group := groups.get(subject & GROUP)) is not None:
            yield kind, stream, 0, _call(recording, row, group, subject >> 32, step), group, bool(flags & Flag.JOINED)


def _call(recording: Recording, row: int, group: GroupKey, other: int, step: int) -> Call:
    op = recording.name_table[recording.names[row]]
    dtype = re.match(r"\W*(\w+)\[", recording.signature_table[recording.signatures[row]])
    return Call(
        op=op, bytes=int(recording.sizes[row]), dtype=dtype[1] if dtype and op != "barrier" else "",
        other=group.ranks[other] if op in ROOTED or op in MESSAGES else -1,
        module=recording.module_table[recording.modules[row]],
        places=tuple(recording.site_table[recording.sites[row]].splitlines()), step=step,
    )  # fmt: skip
