"""Mismatched calls of collectives on several ranks, as text: of dry runs and of real hangs."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from refshard.quantities import format_bytes

ROOT = "(root)"
"""The path of the outermost module."""
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
MESSAGES = frozenset({"send", "recv"})
_LISTED = 8
_NO_PURPOSE = ("", "undefined", "default_pg")
"""What torch writes where nobody said what a group is for."""


class Fault(StrEnum):
    """How calls fail to meet.

    ``DIFFERS``: calls that meet differ in their operation, size, dtype or root. ``MISSING``: a rank ends without the
    call that others wait for, or stands elsewhere. ``DEADLOCK``: ranks wait for each other in a circle. ``STALLED``:
    all ranks made the call, and it does not end. ``GROUP``: a group was created with other ranks, in another order, or
    not on all of its ranks. ``VALUES``: calls of the same size meet that belong to different modules.
    """

    DIFFERS = "differs"
    MISSING = "missing"
    DEADLOCK = "deadlock"
    STALLED = "stalled"
    GROUP = "group"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """A group as all of its ranks know it: torch's name, its global ranks, its number among backends of both, and the
    description that its maker gave it.
    """

    name: str
    ranks: tuple[int, ...]
    number: int = 0
    description: str = ""

    def __str__(self) -> str:
        purpose = "" if self.description in _NO_PURPOSE else f" ({self.description})"
        return f"the group of {name_ranks(self.ranks)}{purpose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One rank's call of a collective. ``bytes`` are those of the unsharded tensor, -1 if unknown. ``other`` is the
    global rank of a message's other end, or of the root; -1 if it has neither or is unknown. ``places`` are lines of
    the script, from the innermost call on. ``step`` counts optimizer steps from 1; 0 if unknown.
    """

    op: str
    bytes: int
    dtype: str = ""
    other: int = -1
    module: str = ""
    places: tuple[str, ...] = ()
    step: int = 1

    def __str__(self) -> str:
        way = "from" if self.op in ("recv", "broadcast", "scatter") else "to"
        end = "" if self.other < 0 else f" {way} rank {self.other}"
        known = self.op != "barrier" and self.bytes >= 0
        size = f" of {format_bytes(self.bytes)}{f' {self.dtype}' if self.dtype else ''}" if known else ""
        module = f" in {self.module}" if self.module not in ("", ROOT) else ""
        return f"{self.op}{end}{size}{module}{f' ({self.places[0]})' if self.places else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What some ranks do in a mismatch: their call, ``passed`` if it has ended, and ``says`` in words what it is in."""

    ranks: tuple[int, ...]
    says: str
    call: Call | None = None
    passed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Calls that do not fit together, in ``group``, the first such ones there. ``number`` counts the group's calls from
    1; 0 if they are calls of several. ``step`` is 0 if unknown. ``since`` are the places of the calls that met before
    this one and were not from the same lines, if any: they tell where the ranks parted.
    """

    fault: Fault
    group: GroupKey
    sides: tuple[Side, ...]
    number: int
    step: int
    since: str = ""

    @property
    def hangs(self) -> bool:
        """Whether it hangs; else values are wrong."""
        return self.fault != Fault.VALUES

    def __str__(self) -> str:
        joint = {Fault.DIFFERS: " where ", Fault.VALUES: " where ", Fault.DEADLOCK: ", while "}.get(self.fault, "; ")
        sides = joint.join(f"{name_ranks(side.ranks)} {side.says}" for side in self.sides[:_LISTED])
        when = f"from step {self.step} on" if self.step else f"call {self.number}" if self.number else ""
        where = "" if len(self.group.ranks) < 2 else f"in {self.group}"
        values = "" if self.hangs else ": the same size, so no hang, but the values are those of another module"
        since = f". Calls from different lines met before, first {self.since}" if self.since else ""
        return f"{sides}; {', '.join(filter(None, (when, where)))}{values}{since}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> name_ranks([1]), name_ranks([0, 1, 2, 3]), name_ranks([0, 2, 4, 6]), name_ranks([0, 5])
    ('rank 1', 'ranks 0 to 3', 'ranks 0, 2, 4 and 6', 'ranks 0 and 5')
    """
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    if len(found) > _LISTED:
        return f"{len(found)} ranks ({', '.join(map(str, found[:_LISTED]))} ...)"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"


def shortest_circle(edges: Mapping[int, Mapping[int, object]]) -> list[int]:
    """A shortest circle in a graph of ranks, by breadth; empty if there is none."""
    paths = [path for start in edges if (path := _cycle(edges, start))]
    return min(paths, key=len, default=[])


def _cycle(edges: Mapping[int, Mapping[int, object]], start: int) -> list[int]:
    """A shortest path from ``start`` back to it, by breadth; empty if there is none."""
    before: dict[int, int] = {}
    queue = deque([start])
    while queue:
        one = queue.popleft()
        for other in edges.get(one, {}):
            if other == start:
                path = [one]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1]
            if other not in before:
                before[other] = one
                queue.append(other)
    return []


def deadlock(circle: Sequence[int], calls: Sequence[Call], group: GroupKey) -> Mismatch:
    """Each rank of the circle waits for the next one, in its call. ``group`` is that of the first call."""
    sides = tuple(
        Side(ranks=(rank,), says=f"waits for rank {other} in {call}", call=call)
        for rank, other, call in zip(circle, [*circle[1:], circle[0]], calls)
    )
    return Mismatch(fault=Fault.DEADLOCK, group=group, sides=sides, number=0, step=min(call.step for call in calls))


def absent_sides(last: Mapping[int, Call | None], verb: str, verbs: str) -> Iterator[Side]:
    """Ranks that others wait for, by the ``last`` call that they made."""
    by_last: dict[Call | None, list[int]] = defaultdict(list)
    for rank, call in last.items():
        by_last[call].append(rank)
    for call, ranks in by_last.items():
        after = " and made no call before" if call is None else f" (last call: {call})"
        yield Side(ranks=tuple(ranks), says=f"{verb if len(ranks) == 1 else verbs}{after}", call=call, passed=True)


def sides_of(calls: Mapping[int, Call], fault: Fault, verb: str = "calls", verbs: str = "call") -> tuple[Side, ...]:
    """Ranks by what they do, the most common last."""
    by_key: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        key: object = call.places
        if fault in (Fault.DIFFERS, Fault.VALUES):
            key = (call.op, call.bytes, call.dtype, call.other, call.module)
        by_key[key].append(rank)
    ordered = sorted(by_key.values(), key=lambda ranks: (len(ranks), ranks))
    return tuple(
        Side(ranks=tuple(ranks), says=f"{verb if len(ranks) == 1 else verbs} {calls[ranks[0]]}", call=calls[ranks[0]])
        for ranks in ordered
    )


def wrong_group(rank: int, group: GroupKey, other: int, theirs: GroupKey | None) -> Mismatch:
    """The rank's group, and what another of its ranks has in its place."""
    mine = f"creates group {group.name} of {name_ranks(group.ranks)}"
    if theirs is None:
        says = "never creates it"
    elif theirs.name == group.name:
        says = f"creates group {theirs.name} of {name_ranks(theirs.ranks)}"
    else:
        says = f"creates it as group {theirs.name}"
    sides = (Side(ranks=(rank,), says=mine), Side(ranks=(other,), says=says))
    return Mismatch(fault=Fault.GROUP, group=group, sides=sides, number=0, step=1)


def calls_differ(one: Call, other: Call) -> bool:
    """Whether calls that meet are not the same. An all-to-all may move other bytes on each rank."""
    if {one.op, other.op} == MESSAGES:
        return (one.bytes, one.dtype) != (other.bytes, other.dtype)
    if one.op != other.op or (one.dtype and other.dtype and one.dtype != other.dtype):
        return True
    if one.op == "all_to_all":
        return False
    sizes = {one.bytes, other.bytes} - {-1}
    return len(sizes) > 1 or (one.op in ROOTED and one.other != other.other)
