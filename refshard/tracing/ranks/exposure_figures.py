"""Where exposed communication goes, and how fast its messages move, as data. Times are int64 nanoseconds."""

from typing import Literal

import msgspec

Bound = Literal["skew", "latency", "bandwidth", "below", "unknown"]
"""What exposed communication comes from: waiting for ranks, latency, a link that is full, one that is not; or unknown,
where no rate of the link is known."""


class PeerWait(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed nanoseconds in which this rank waited for ``rank`` to enter a collective."""

    rank: int
    waited_ns: int


class ExposedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The exposed communication of one window, divided; ``step`` is None for the whole trace.

    ``transfer_ns``, ``waiting_ns`` and ``undivided_ns`` add up to ``exposed_ns``. Waiting is None where no collective
    of the trace was matched with another rank's, transfer where none was with those of its whole group.
    ``undivided_ns`` is what may be either. ``launch_ns`` is besides: the time in which nothing ran because the host
    launched the next collective late; None where a launch is unknown.
    """

    step: int | None
    exposed_ns: int
    transfer_ns: int | None
    waiting_ns: int | None
    undivided_ns: int
    launch_ns: int | None
    waits_for: tuple[PeerWait, ...] = ()


class MessageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one group and operation with sizes in ``[least_bytes, most_bytes]``, over the whole trace.

    ``nodes`` is how many the group spans. ``exposed_ns`` is their share of the steps' exposed time, of which
    ``waiting_ns`` is known to be waiting. Bandwidths are bus bandwidths in bytes per second: the median with the
    waiting, the median without (from the rank that entered last; None unless all ranks of the group are here), the
    largest, and what the link reaches according to ``profile`` of :class:`CommunicationFigures`.
    ``is_latency_bound`` says whether latency takes at least half of a typical one.
    """

    op: str
    group: str | None
    description: str | None
    group_size: int | None
    nodes: int | None
    count: int
    bytes: int | None
    least_bytes: int | None
    most_bytes: int | None
    exposed_ns: int
    waiting_ns: int | None
    bus_bandwidth: float | None
    transfer_bandwidth: float | None
    largest_bandwidth: float | None
    link_bandwidth: float | None
    is_latency_bound: bool | None


class CommunicationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed communication of one trace: over all, per step, and by group, operation and size (most exposed first).

    ``bound`` answers "bandwidth, latency or skew?" over the steps; None without exposed communication. ``profile``
    names the cluster profile that has the trace's device. ``missing`` says why a part is not divided, ``no_launch`` why
    no launch is told.
    """

    whole: ExposedSplit
    steps: tuple[ExposedSplit, ...]
    messages: tuple[MessageFigures, ...]
    bound: Bound | None
    profile: str | None
    missing: str | None
    no_launch: str | None
