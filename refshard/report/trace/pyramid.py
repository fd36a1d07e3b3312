"""Levels of detail: spans at full precision, and merged ever more coarsely for a screen with fewer pixels than spans.

A level of resolution r leaves blocks of r nanoseconds or more as they are and merges shorter ones that begin in the
same cell of r nanoseconds. A cell then holds at most one merged block of a group beside those that are wide enough to
be seen, so that drawing the level whose resolution is at most one pixel costs a number of rectangles that the width of
the screen bounds, not the number of spans. A block keeps how many spans it stands for and how long they were busy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.timeline import Nanoseconds

KEPT = 0.75
"""A level is kept if it has at most this share of the blocks of the level kept before it."""

FEWEST_CELLS = 64
"""The coarsest level has this many cells or fewer: no screen is narrower."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """Blocks ordered by group and start, disjoint within a group.

    ``firsts`` are the rows of the first span of each block, ``busy`` the nanoseconds that the spans of a block cover,
    ``counts`` how many they are. ``resolution`` is 0 where nothing is merged but what overlaps.
    """

    resolution: int
    groups: npt.NDArray[np.int32]
    starts: Nanoseconds
    ends: Nanoseconds
    busy: Nanoseconds
    counts: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


def levels(
    groups: npt.NDArray[np.int32], starts: Nanoseconds, ends: Nanoseconds, *, length: int, most: int
) -> tuple[Level, ...]:
    """The levels of spans that are ordered by group and start, finest first.

    The finest has at most ``most`` blocks where merging can reach that; ``length`` is the whole view's nanoseconds.
    """
    every = list(_halvings(_spans(groups, starts, ends), length))
    within = [level for level in every if len(level) <= most] or every[-1:]
    kept = within[:1]
    for level in within[1:]:
        if 0 < len(level) <= KEPT * len(kept[-1]):
            kept.append(level)
    return tuple(kept)


def _halvings(finest: Level, length: int) -> Iterator[Level]:
    """Every level that can be worth its room, each with cells twice as long as the one before."""
    yield finest
    level, resolution = finest, _first_resolution(finest)
    while resolution * FEWEST_CELLS <= 2 * length:
        level = _merged(level, resolution)
        yield level
        resolution *= 2


def _first_resolution(finest: Level) -> int:
    """The largest power of two with which no more blocks can merge than :data:`KEPT` leaves a level for.

    Two blocks merge only if less than a cell lies between their starts.
    """
    pitches = np.diff(finest.starts)
    if not len(pitches):
        return 2
    few = int((1 - KEPT) * len(pitches))
    pitch = int(np.partition(np.abs(pitches), few)[few])
    return 1 << max(1, pitch.bit_length() - 1)


def _spans(groups: npt.NDArray[np.int32], starts: Nanoseconds, ends: Nanoseconds) -> Level:
    """Every span a block of its own, but for those of one group that overlap: they become one."""
    fresh = np.ones(len(starts), bool)
    if len(starts):
        # Groups are laid end to end, so that one running maximum serves all: a later group begins after every earlier.
        stride = int(ends.max() - starts.min()) + 1
        shifted = ends + groups.astype(np.int64) * stride
        reach = np.maximum.accumulate(shifted)
        fresh[1:] = starts[1:] + groups[1:].astype(np.int64) * stride >= reach[:-1]
    heads = np.flatnonzero(fresh)
    tails = _reduce(np.maximum, ends, heads)
    return Level(
        resolution=0,
        groups=groups[heads],
        starts=starts[heads],
        ends=tails,
        busy=tails - starts[heads],
        counts=_reduce(np.add, np.ones(len(starts), np.int64), heads),
        firsts=heads,
    )


def _merged(finer: Level, resolution: int) -> Level:
    short = finer.ends - finer.starts < resolution
    cell = finer.starts // resolution
    fresh = np.ones(len(finer), bool)
    fresh[1:] = ~(
        short[1:] & short[:-1] & (cell[1:] == cell[:-1]) & (finer.groups[1:] == finer.groups[:-1])
    )  # fmt: skip
    heads = np.flatnonzero(fresh)
    return Level(
        resolution=resolution,
        groups=finer.groups[heads],
        starts=finer.starts[heads],
        ends=_reduce(np.maximum, finer.ends, heads),
        busy=_reduce(np.add, finer.busy, heads),
        counts=_reduce(np.add, finer.counts, heads),
        firsts=finer.firsts[heads],
    )


def _reduce(how: np.ufunc, values: npt.NDArray[np.int64], heads: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``how`` over each run of values that begins at a head."""
    if not len(heads):
        return np.empty(0, np.int64)
    return np.asarray(how.reduceat(values, heads), dtype=np.int64)
