"""Simulates a device over time: streams that run in order, links that collectives queue for, and contention.

Between two events everything that runs progresses at a constant rate, so the result is exact for the model. Compute
slows down while a collective occupies a link, and the collective while compute runs. A kernel outside the main stream
shares the device with compute. Copies to and from the host run on engines of their own and disturb nothing.

Work that shares one rate ends in the same order at any rate. So each :class:`Share` has one clock that runs at its
rate, and one queue sorted by the time on that clock: an event costs O(log n) in the number of concurrent pieces of
work. Times are floats of nanoseconds.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from math import inf

from refshard.specs.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """At which part of its rate something progresses while something else runs.

    ``compute`` and ``communication`` slow each other down. A kernel outside the main stream gets the part
    ``preparation`` of the device while compute runs, and compute gets the rest.
    """

    compute: float = 1.0
    communication: float = 1.0
    preparation: float = 0.5

    @classmethod
    def of(cls, cluster: ClusterSpec) -> "Rates":
        """Those of the cluster's profile."""
        return cls(
            compute=cluster.compute_beside_communication,
            communication=cluster.communication_beside_compute,
            preparation=cluster.preparation_beside_compute,
        )


class Share(IntEnum):
    """Which part of the device something runs on.

    ``MAIN`` are kernels of the main stream, ``SIDE`` those of other streams. ``LINK`` are collectives while they occupy
    a link. ``ENGINE`` is what disturbs nothing and is not disturbed.
    """

    MAIN = 0
    SIDE = 1
    LINK = 2
    ENGINE = 3


class Token:
    """A point in a stream: ``done`` once the stream has got there; streams that wait for it go on then."""

    __slots__ = ("done", "waiting")

    def __init__(self) -> None:
        self.done = False
        self.waiting: list[_Stream] = []


@dataclass(slots=True)
class Work:
    """What a stream runs: the recording's ``row``, ``ns`` of work, then ``latency_ns`` that no link is needed for."""

    row: int
    share: Share
    ns: float
    link: int = -1
    latency_ns: float = 0.0


class Gate:
    """Holds collectives of several devices back until ``members`` of them are ready."""

    __slots__ = ("_held", "_missing")

    def __init__(self, members: int) -> None:
        self._missing = members
        self._held: list[tuple[Device, _Stream, Work]] = []

    def reach(self, device: "Device", stream: "_Stream", work: Work, *, passes: bool) -> "list[Device]":
        """One of them is ready; what is held until all are, unless it ``passes``. Return the devices that go on."""
        self._missing -= 1
        if passes:
            device.admit(stream, work)
        else:
            self._held.append((device, stream, work))
        if self._missing:
            return []
        for each, its_stream, its_work in self._held:
            each.advance(device.now)
            each.admit(its_stream, its_work)
        return [each for each, _, _ in self._held if each is not device]


class _Stream:
    __slots__ = ("busy", "queue")

    def __init__(self) -> None:
        self.busy = False
        self.queue: deque[tuple[float, Work | Token, bool]] = deque()


class Device:
    """Streams in time, from 0 ns.

    What is put on a stream is not looked at before the time ``since``, when the host has launched it. Call
    :meth:`settle`, then :meth:`next_time` and :meth:`advance` until nothing is to come. ``starts`` and ``ends`` hold
    the times of each row that ran.
    """

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self._rates = rates
        self._streams: dict[int, _Stream] = {}
        self._ready: deque[_Stream] = deque()
        self._timers: list[tuple[float, int, _Stream, Work | None]] = []
        self._timed = 0
        self._running: tuple[list[tuple[float, int, _Stream, Work]], ...] = tuple([] for _ in Share)
        self._clocks = [0.0] * len(Share)
        self._speeds = [1.0] * len(Share)
        self._dues = [inf] * len(Share)
        self._queues: dict[int, list[tuple[float, int, _Stream, Work]]] = {}
        self._occupied: set[int] = set()
        self._gates: dict[int, tuple[Gate, bool]] = {}
        self._released: list[Device] = []

    def guard(self, row: int, gate: Gate, *, passes: bool) -> None:
        """Let the collective of this row begin only when its gate is open; one that ``passes`` does not wait for it."""
        self._gates[row] = gate, passes

    def let_go(self) -> "list[Device]":
        """The devices that this one released since the last call."""
        released, self._released = self._released, []
        return released

    def run(self, stream: int, since: float, work: Work) -> None:
        """Put work on a stream."""
        self._put(stream, (since, work, False))

    def record(self, stream: int, since: float) -> Token:
        """A token that is done once the stream has done everything it was given so far."""
        token = Token()
        self._put(stream, (since, token, False))
        return token

    def wait(self, stream: int, since: float, token: Token) -> None:
        """Let a stream wait."""
        if not token.done:
            self._put(stream, (since, token, True))

    def streams(self) -> tuple[int, ...]:
        """All streams that were given anything."""
        return tuple(self._streams)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not any(stream.queue or stream.busy for stream in self._streams.values())

    def settle(self) -> None:
        """Let each stream go as far as it gets at this time, and the next collective onto each free link."""
        while self._ready:
            self._serve(self._ready.popleft())
        for link, queue in self._queues.items():
            if queue and link not in self._occupied:
                _, _, stream, work = heappop(queue)
                self._occupied.add(link)
                self._begin(stream, work)

    def next_time(self) -> float:
        """When the next thing happens, infinite if nothing does."""
        self._set_speeds()
        found = self._timers[0][0] if self._timers else inf
        for share in range(len(Share)):
            running = self._running[share]
            due = inf
            if running:
                due = self.now + max(0.0, running[0][0] - self._clocks[share]) / self._speeds[share]
                found = min(found, due)
            self._dues[share] = due
        return found

    def advance(self, to: float) -> None:
        """Let time pass, no further than :meth:`next_time` said."""
        passed = to - self.now
        self.now = to
        for share, running in enumerate(self._running):
            if not running:
                continue
            if self._dues[share] <= to:
                self._clocks[share] = running[0][0]
            else:
                self._clocks[share] += passed * self._speeds[share]
            while running and running[0][0] <= self._clocks[share]:
                _, _, stream, work = heappop(running)
                self._worked(stream, work)
        while self._timers and self._timers[0][0] <= to:
            _, _, stream, ended = heappop(self._timers)
            if ended is not None:
                self._end(stream, ended)
            else:
                self._ready.append(stream)
        self._dues = [inf] * len(Share)  # so that the same time can come twice

    def _put(self, stream: int, step: tuple[float, Work | Token, bool]) -> None:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = _Stream()
        found.queue.append(step)
        if len(found.queue) == 1 and not found.busy:
            self._ready.append(found)

    def _serve(self, stream: _Stream) -> None:
        """Take from the queue what can be had now; what begins or waits at its head makes it stop."""
        queue = stream.queue
        while queue:
            since, step, waits = queue[0]
            if since > self.now:
                self._set_timer(since, stream, None)
                return
            if isinstance(step, Work):
                queue.popleft()
                stream.busy = True
                if step.row in self._gates:
                    gate, passes = self._gates[step.row]
                    self._released += gate.reach(self, stream, step, passes=passes)
                else:
                    self.admit(stream, step)
                return
            if waits and not step.done:
                step.waiting.append(stream)
                return
            queue.popleft()
            if not waits:
                step.done = True
                self._ready.extend(step.waiting)

    def admit(self, stream: _Stream, work: Work) -> None:
        """Begin, or queue for a link: first come, first served; if several come at once, the first launched."""
        if work.link < 0:
            self._begin(stream, work)
        else:
            heappush(self._queues.setdefault(work.link, []), (self.now, work.row, stream, work))

    def _begin(self, stream: _Stream, work: Work) -> None:
        self.starts[work.row] = self.now
        running = self._running[work.share]
        if not running:
            self._clocks[work.share] = 0.0
        heappush(running, (self._clocks[work.share] + work.ns, work.row, stream, work))

    def _worked(self, stream: _Stream, work: Work) -> None:
        """The work is done; of a collective, the link is free and its result on its way."""
        self._occupied.discard(work.link)
        if work.latency_ns > 0:
            self._set_timer(self.now + work.latency_ns, stream, work)
        else:
            self._end(stream, work)

    def _end(self, stream: _Stream, work: Work) -> None:
        self.ends[work.row] = self.now
        stream.busy = False
        self._ready.append(stream)

    def _set_timer(self, time: float, stream: _Stream, ends: Work | None) -> None:
        self._timed += 1
        heappush(self._timers, (time, self._timed, stream, ends))

    def _set_speeds(self) -> None:
        computing, sharing = bool(self._running[Share.MAIN]), bool(self._running[Share.SIDE])
        rates, speeds = self._rates, self._speeds
        own = 1.0 - rates.preparation if sharing else 1.0
        speeds[Share.MAIN] = own * (rates.compute if self._running[Share.LINK] else 1.0)
        speeds[Share.SIDE] = rates.preparation if computing else 1.0
        speeds[Share.LINK] = rates.communication if computing else 1.0
