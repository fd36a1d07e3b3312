"""What comes before what in a recording: vector clocks over streams and the host.

The order of a stream, an event that one stream records and another waits for, and the host, once it has waited for an
event, a stream or the device, for all that it launches from then on. The host counts as one timeline, whichever of its
threads waited. Streams do not wait for the default stream: torch and NCCL make theirs non-blocking.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import Kind, Recording

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
    """All streams of these rows, those that touch memory first."""
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
        """All that is over once everything asked of a stream so far is."""
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
