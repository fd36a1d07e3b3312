"""Which events of several ranks' recordings are one: the same collective, or a message's two ends.

Ranks issue the collectives of a group in one order, and messages between two ranks of a group arrive in the order in
which they are sent. So the first of one rank is the first of the other, and so on. A group is the same if it holds the
same ranks; of several such groups, the first is the first on each rank, since all create groups in one order.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refshard.dryrun.price import peer_of
from refshard.dryrun.recording import NO_STREAM, Kind, Recording


@dataclass(frozen=True, slots=True)
class Member:
    """The event ``row`` of recording number ``rank``; ``sends`` if it is the sending end, which waits for no other."""

    rank: int
    row: int
    sends: bool


def meetings(recordings: Sequence[Recording]) -> list[tuple[Member, ...]]:
    """All events that more than one of these recordings takes part in.

    What only one of them has, of whatever others take part, is no meeting.
    """
    if len(recordings) < 2:
        return []
    found: dict[tuple[object, ...], list[Member]] = defaultdict(list)
    for rank, recording in enumerate(recordings):
        for key, member in _events(recording, rank):
            found[key].append(member)
    return [tuple(members) for members in found.values() if len(members) > 1]


def _events(recording: Recording, rank: int) -> list[tuple[tuple[object, ...], Member]]:
    """The rank's collectives and messages, under a key that all who take part in one find for it."""
    groups = _groups(recording)
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    found = []
    rows = np.flatnonzero((recording.kinds == Kind.COLLECTIVE) & (recording.streams != NO_STREAM))
    for row in rows.tolist():
        op, subject = recording.name_table[recording.names[row]], int(recording.subjects[row])
        about: tuple[object, ...] = groups[subject & 0xFFFFFFFF]
        if op in ("send", "recv"):
            ends = (recording.rank, peer_of(recording, subject))
            about = (*about, "message", *(ends if op == "send" else reversed(ends)))
        found.append(((*about, counts[about]), Member(rank, row, sends=op == "send")))
        counts[about] += 1
    return found


def _groups(recording: Recording) -> dict[int, tuple[object, ...]]:
    """By id, what a group is called on every rank: its ranks, and how many groups of the same ranks came before."""
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    found: dict[int, tuple[object, ...]] = {}
    for number, group in sorted(recording.groups.items()):
        found[number] = (group.ranks, counts[group.ranks])
        counts[group.ranks] += 1
    return found
