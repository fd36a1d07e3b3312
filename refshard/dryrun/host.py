"""The host of one rank: it asks its device for one event after the other, and waits where the recording says so."""

import numpy as np
import numpy.typing as npt

from refshard.dryrun.device import Device, Share, Token, Work
from refshard.dryrun.price import Prices, is_message
from refshard.dryrun.recording import NO_STREAM, Flag, Kind, Recording

NS = 1e9


def main_stream(recording: Recording, prices: Prices) -> int:
    """The stream with the longest kernels in total, without copies to and from the host; 0 if nothing is launched."""
    launched = _on_device(recording) & (recording.kinds == Kind.LAUNCH)
    kernels = launched & (recording.flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST) == 0)
    streams, places = np.unique(recording.streams[kernels], return_inverse=True)
    if not len(streams):
        return 0
    return int(streams[np.argmax(np.bincount(places, weights=prices.seconds[kernels]))])


def _on_device(recording: Recording) -> npt.NDArray[np.bool_]:
    runs = np.isin(recording.kinds, (Kind.LAUNCH, Kind.COLLECTIVE))
    found: npt.NDArray[np.bool_] = runs & (recording.streams != NO_STREAM) & (recording.flags & Flag.HOST_ONLY == 0)
    return found


def _shares(recording: Recording, prices: Prices) -> npt.NDArray[np.int64]:
    copies = recording.flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST) != 0
    collective = recording.kinds == Kind.COLLECTIVE
    main = main_stream(recording, prices)
    conditions = (collective & (prices.links >= 0), copies | collective, recording.streams == main)
    return np.select(conditions, (Share.LINK, Share.ENGINE, Share.MAIN), Share.SIDE)


class Host:
    """Hands a recording's events to a device. Backward's threads run while the main thread waits: there is one clock.

    A group's communicator runs one collective at a time, in the order in which the host asked for them and whatever
    streams they are on: NCCL makes each stream wait for the communicator's last collective. Messages between two ranks
    have communicators of their own.

    ``starts`` and ``ends`` are when it asked for each event and when it was free again, in nanoseconds.
    """

    def __init__(self, recording: Recording, prices: Prices, device: Device) -> None:
        self._device = device
        self._kinds: list[int] = recording.kinds.tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._subjects: list[int] = recording.subjects.tolist()
        self._sizes: list[int] = recording.sizes.tolist()
        self._runs: list[bool] = _on_device(recording).tolist()
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
        """Whether the host has asked for everything, and the device has done it."""
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
        group = self._subjects[row]
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
