"""Memory that ``record_stream()`` holds back, given back when a GPU would give it back.

While a script runs, the device knows only what the host has waited for, so such memory stays held for too long: an
upper bound. The recording of the run, priced and replayed, tells how far each stream had come at every allocation. With
these answers the allocator goes through the same calls again (``reallocate.py``). Runs without such memory need none of
this.

Giving memory back to the device makes the host wait, so other segments may change the replay. If they do, replay and
reallocation are repeated with them, a few times at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np

from refshard.dryrun.device import Rates
from refshard.dryrun.price import price
from refshard.dryrun.progress import AsHostKnew, AsReplayed
from refshard.dryrun.reallocate import (
    MakeAllocator,
    Reallocation,
    UnknownBlockError,
    reallocate,
    same_calls,
    stops,
    with_segments,
)
from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.replay import replay_together
from refshard.specs.cluster import ClusterSpec

UNLIMITED = 0
"""The memory of a device that has no end, for :func:`settle`. Scripts have to be told a number."""
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
    total_bytes: int, reset: str = "",
) -> tuple[Settled, ...]:  # fmt: skip
    """Settle what ranks that ran on ``device`` hold back, each with ``total_bytes`` of memory.

    Their processes had ``as_run_bytes``, which differs if they ran without a limit. Peaks begin anew at the mark
    ``reset``. If one rank runs out of memory, only its refusal counts: recordings then are not those of a GPU.

    Raises:
        NotReproducedError: the recording does not hold all that the allocator did.
        SpecError: the cluster's profile lacks what an event needs.
    """
    make = partial(_make, ext, device)
    for recording in recordings:
        _check(recording, ext, make(as_run_bytes))
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


def _make(ext: ModuleType, device: int, total_bytes: int) -> MakeAllocator:
    return lambda progress, on_segment: ext.allocator_like(device, progress, on_segment, total_bytes)


def _check(recording: Recording, ext: ModuleType, make: MakeAllocator) -> None:
    """Allocate again with the answers that the script's process had: the same must come of it."""
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
