"""When each event of a recording starts and ends: the host launches in order, streams run in order, and both wait.

A launch takes its host time. Its kernel starts when that is over, the stream is free, and everything that the stream
waits for is done. The collectives of one group run one at a time, in the order of the host's calls, on any streams. A
synchronisation stops the host until the device has reached it, and so does freeing memory, because ``cudaFree`` waits
for the device.

Several ranks that are replayed together share the time: their common collectives begin when the last of them is ready,
and a message is received once it is sent; each rank then queues for its own links. A rank on its own finds all others
ready. Ranks issue the collectives of a group in one order, and messages between two ranks arrive in the order in which
they are sent, so the n-th of one rank is the n-th of the other (:func:`meetings`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from refshard.dryrun.device import Device, Gate, Rates, Share, Token, Work
from refshard.dryrun.price import Prices, is_message, peer_of
from refshard.dryrun.recording import GROUP, NO_STREAM, Kind, Recording, host_copies, on_stream

NS = 1e9


def main_stream(recording: Recording, prices: Prices) -> int:
    """The stream with the longest kernels in total, without copies to and from the host; 0 if nothing is launched."""
    kernels = on_stream(recording, Kind.LAUNCH) & ~host_copies(recording)
    streams, places = np.unique(recording.streams[kernels], return_inverse=True)
    if not len(streams):
        return 0
    return int(streams[np.argmax(np.bincount(places, weights=prices.seconds[kernels]))])


def _shares(recording: Recording, prices: Prices) -> npt.NDArray[np.int64]:
    collective = recording.kinds == Kind.COLLECTIVE
    main = main_stream(recording, prices)
    conditions = (collective & (prices.links >= 0), host_copies(recording) | collective, recording.streams == main)
    return np.select(conditions, (Share.LINK, Share.ENGINE, Share.MAIN), Share.SIDE)


class Host:
    """Hands a recording's events to a device. Backward's threads run while the main thread waits: there is one clock.

    A group's communicator runs one collective at a time, in the order of the host's calls, on any streams: NCCL makes
    each stream wait for the communicator's last collective. Messages between two ranks have communicators of their own.

    ``starts`` and ``ends`` are when it issued each event and when it was free again, in nanoseconds.
    """

    def __init__(self, recording: Recording, prices: Prices, device: Device) -> None:
        self._device = device
        self._kinds: list[int] = recording.kinds.tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._subjects: list[int] = recording.subjects.tolist()
        self._sizes: list[int] = recording.sizes.tolist()
        self._runs: list[bool] = on_stream(recording, Kind.LAUNCH, Kind.COLLECTIVE).tolist()
        self._shares = [Share(code) for code in range(len(Share))]
        self._share: list[int] = _shares(recording, prices).tolist()
        self._ns: list[float] = (prices.seconds * NS).tolist()
        self._links: list[int] = prices.links.tolist()
        self._latencies: list[float] = (prices.latencies * NS).tolist()
        self._host_ns: list[float] = (prices.host_seconds * NS).tolist()
        self.starts, self.ends = [0.0] * len(recording), [0.0] * len(recording)
        self._row, self._time = 0, 0.0
        self._events: dict[int, Token] = {}
        self._last: dict[int, tuple[int, Token]] = {}  # of each group: its last collective's stream and end
        self._ordered: list[bool] = ((recording.kinds == Kind.COLLECTIVE) & ~is_message(recording)).tolist()
        self._awaited: list[Token] = []

    @property
    def finished(self) -> bool:
        """Whether the host has issued everything, and the device has done it."""
        return self._row == len(self._kinds) and not self._awaited and self._device.idle

    def settle(self) -> None:
        """Let host and device go as far as they get at this time."""
        while True:
            self._device.settle()
            self._awaited = [token for token in self._awaited if not token.done]
            if self._awaited or self._row == len(self._kinds):
                return
            self._go_on()

    def _go_on(self) -> None:
        """Ask for one event after the other, up to the next that the host has to wait for."""
        if self._row and self._stops(self._row - 1):
            self._time = self.ends[self._row - 1] = max(self._time, self._device.now)
        time, host_ns, starts, ends = self._time, self._host_ns, self.starts, self.ends
        for row in range(self._row, len(self._kinds)):
            starts[row] = time
            ends[row] = time = time + host_ns[row]
            if self._ask(row, self._kinds[row], time):
                break
        self._row, self._time = row + 1, time

    def _ask(self, row: int, kind: int, time: float) -> bool:
        """Hand an event to the device; whether the host has to wait for it."""
        stream, subject = self._streams[row], self._subjects[row]
        if kind == Kind.LAUNCH or kind == Kind.COLLECTIVE:
            if self._runs[row]:
                self._run(row, stream, time)
        elif kind == Kind.RECORD:
            self._events[subject] = self._device.record(stream, time)
        elif kind == Kind.WAIT:
            if subject in self._events:  # else it was never recorded, and CUDA does not wait
                self._device.wait(stream, time, self._events[subject])
        elif self._stops(row):
            self._awaited = self._tokens(stream, subject, kind, time)
            return bool(self._awaited)
        return False

    def _run(self, row: int, stream: int, time: float) -> None:
        """Put a launch or a collective on its stream."""
        group = self._subjects[row] & GROUP
        if ordered := self._ordered[row]:
            before, token = self._last.get(group, (stream, None))
            if token is not None and before != stream:
                self._device.wait(stream, time, token)
        share = self._shares[self._share[row]]
        self._device.run(stream, time, Work(row, share, self._ns[row], self._links[row], self._latencies[row]))
        if ordered:
            self._last[group] = stream, self._device.record(stream, time)

    def _stops(self, row: int) -> bool:
        """Whether the host waits in this event."""
        kind = self._kinds[row]
        return kind == Kind.SYNCHRONISE or (kind == Kind.SEGMENT and self._sizes[row] < 0)

    def _tokens(self, stream: int, subject: int, kind: int, time: float) -> list[Token]:
        """What the host waits for: one event, one stream, or all of them."""
        if kind == Kind.SYNCHRONISE and subject:
            return [self._events[subject]] if subject in self._events else []
        known = self._device.streams()
        one = kind == Kind.SYNCHRONISE and stream != NO_STREAM
        return [self._device.record(each, time) for each in known if not one or each == stream]


@dataclass(frozen=True, slots=True)
class Member:
    """The event ``row`` of recording number ``rank``; ``sends`` if it is the sending end, which waits for no other."""

    rank: int
    row: int
    sends: bool


def meetings(recordings: Sequence[Recording]) -> list[tuple[Member, ...]]:
    """All events that more than one of these recordings takes part in.

    An event in only one recording is left out, even if other ranks take part in it.
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
        about: tuple[object, ...] = groups[subject & GROUP]
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


NEVER = -1
"""Start and end of what takes no time of a stream."""
__all__ = ["NEVER", "NS", "Replayed", "main_stream", "replay", "replay_together"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """Times of a recording's events, int64 nanoseconds since the host issued the first one.

    ``starts`` and ``ends`` are those on the stream, :data:`NEVER` for events that are neither a launch nor a
    collective. The host issued event ``i`` from ``host_starts[i]`` on and was free again at ``host_ends[i]``, when a
    launch had reached its stream and a synchronisation was over. ``main_stream`` is the one that computes most.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    host_starts: npt.NDArray[np.int64]
    host_ends: npt.NDArray[np.int64]
    main_stream: int

    def since(self, start: int) -> "Replayed":
        """The same with times since ``start``."""
        starts, ends = (np.where(times == NEVER, NEVER, times - start) for times in (self.starts, self.ends))
        host_starts, host_ends = self.host_starts - start, self.host_ends - start
        return replace(self, starts=starts, ends=ends, host_starts=host_starts, host_ends=host_ends)


def replay(recording: Recording, prices: Prices, rates: Rates) -> Replayed:
    """Replay one rank on its own."""
    return replay_together((recording,), (prices,), rates)[0]


def replay_together(recordings: Sequence[Recording], prices: Sequence[Prices], rates: Rates) -> tuple[Replayed, ...]:
    """Replay several ranks of one job, which all start at 0; one result per recording."""
    devices = [Device(rates) for _ in recordings]
    hosts = [Host(*each) for each in zip(recordings, prices, devices, strict=True)]
    for members in meetings(recordings):
        gate = Gate(len(members))
        for member in members:
            devices[member.rank].guard(member.row, gate, passes=member.sends)
    _run(hosts, devices)
    return tuple(_replayed(*each) for each in zip(recordings, prices, hosts, devices))


def _run(hosts: Sequence[Host], devices: Sequence[Device]) -> None:
    """Go from one event to the next, whichever device it happens on. The others are looked at when it concerns them."""
    dues = [0.0] * len(hosts)
    place_of: Mapping[Device, int] = {device: place for place, device in enumerate(devices)}
    while True:
        time = min(dues)
        if time == inf:
            break
        changed = [place for place, due in enumerate(dues) if due == time]
        while changed:
            place = changed.pop()
            device = devices[place]
            device.advance(time)
            hosts[place].settle()
            changed += [place_of[other] for other in device.let_go()]
            dues[place] = device.next_time()
    assert all(host.finished for host in hosts), "something waits for what never ends"


def _replayed(recording: Recording, prices: Prices, host: Host, device: Device) -> Replayed:
    starts, ends = (np.full(len(recording), float(NEVER)) for _ in range(2))
    starts[list(device.starts)] = list(device.starts.values())
    ends[list(device.ends)] = list(device.ends.values())
    times = [np.rint(column).astype(np.int64) for column in (starts, ends, np.array(host.starts), np.array(host.ends))]
    return Replayed(
        starts=times[0], ends=times[1], host_starts=times[2], host_ends=times[3],
        main_stream=main_stream(recording, prices),
    )  # fmt: skip
