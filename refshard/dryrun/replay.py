"""When each event of a recording starts and ends: the host asks in order, streams run in order, and both wait.

A launch takes its host time, and its kernel starts when that is over, the stream is free and all that the stream waits
for is done. The collectives of one group run one at a time, in the order of the host's calls, whatever streams they are
on. A synchronisation stops the host until the device has got there, and so does giving memory back, since
``cudaFree`` waits for the device.

Several ranks that are replayed together share the time: their common collectives begin when the last of them is ready,
and a message is received once it is sent; each rank then queues for its own links. A rank on its own finds all others
ready.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from refshard.dryrun.device import Device, Gate, Rates
from refshard.dryrun.host import NS, Host, main_stream
from refshard.dryrun.meetings import meetings
from refshard.dryrun.price import Prices
from refshard.dryrun.recording import Recording

NEVER = -1
"""Start and end of what takes no time of a stream."""
__all__ = ["NEVER", "NS", "Replayed", "main_stream", "replay", "replay_together"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """Times of a recording's events, int64 nanoseconds since the host asked for the first one.

    ``starts`` and ``ends`` are those on the stream, :data:`NEVER` for events that are none of a launch or a collective.
    The host asked for event ``i`` from ``host_starts[i]`` on and was free again at ``host_ends[i]``, when a launch had
    reached its stream and a synchronisation was over. ``main_stream`` is the one that computes most.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    host_starts: npt.NDArray[np.int64]
    host_ends: npt.NDArray[np.int64]
    main_stream: int

    @property
    def length(self) -> int:
        """When host and device are done with everything."""
        return int(max((column.max() for column in (self.ends, self.host_ends) if len(column)), default=0))


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
