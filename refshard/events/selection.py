"""Which events of a trace count: the events of one device, without events far from the others in time.

Recorders' clocks err: one kernel with the time 0 among events of today would make a trace of 56 years, in which every
share of time rounds to nothing.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from refshard.errors import TraceError
from refshard.events.table import LAUNCH, DeviceEvents, HostEvents, TraceFile
from refshard.events.timeline import rows_of

HOUR_NS = 3600 * 10**9
SPANS = 100
"""An event is far from the others at this many times their span, and at no less than an hour."""
RULES = ((HOUR_NS, 0.99), (24 * HOUR_NS, 0.5))
"""Distance beyond which events count as stray, and the share of events that the rest must have. A pause of an hour may
be intended, but hardly for a single event; no recording pauses for a day."""

T = TypeVar("T")
Rows = npt.NDArray[np.bool_]


def only_device(trace: TraceFile, device: str) -> TraceFile:
    """The trace with one device's events, and with the host's events of the processes that launched them.

    Raises:
        TraceError: the trace has no such device.
    """
    wanted = [lane for lane, (name, _) in enumerate(trace.lanes) if name == device]
    if not wanted:
        names = ", ".join(sorted({name for name, _ in trace.lanes})) or "none (a CPU trace)"
        raise TraceError(f"{trace.path}: --gpu {device} is not in the trace; its GPUs: {names}")
    rows, host = np.isin(trace.device.lanes, wanted), trace.host
    launched = (host.categories == LAUNCH) & (host.correlations > 0)
    launched &= np.isin(host.correlations, trace.device.correlations[rows])
    processes = {trace.threads[thread][0] for thread in np.unique(host.threads[launched]).tolist()}
    threads = [place for place, (process, _) in enumerate(trace.threads) if process in processes]
    kept = np.isin(host.threads, threads) if processes else np.ones(len(host.threads), np.bool_)
    return _with(trace, kept, rows)


def without_far_events(trace: TraceFile) -> TraceFile:
    """The trace without events that start or end far from the others, which ``skipped`` then counts as ``far_events``.

    The starts are cut wherever none follows for an hour. If one part has 99 % of all events, it is what was recorded;
    an event is far if it starts or ends more than an hour and more than :data:`SPANS` times that part's span outside
    of it. Else the same holds with a day and half of the events. If no part reaches the share, all events stay.
    """
    host, device = trace.host, trace.device
    tables = [table for table in (host, device) if len(table.starts)]
    if not tables or max(int(t.ends.max()) for t in tables) - min(int(t.starts.min()) for t in tables) <= HOUR_NS:
        return trace
    starts, ends = np.concatenate((host.starts, device.starts)), np.concatenate((host.ends, device.ends))
    bounds = next((found for rule in RULES if (found := _bounds(starts, ends, *rule)) is not None), None)
    if bounds is None:
        return trace
    near_host, near_device = _near(host, bounds), _near(device, bounds)
    memory = trace.memory
    near = (memory.times >= bounds[0]) & (memory.times <= bounds[1])
    if set(memory.devices[near].tolist()) == set(memory.devices.tolist()):  # or a device would be left without events
        memory = rows_of(memory, near)
    far = int((~near_host).sum() + (~near_device).sum())
    return replace(
        _with(trace, near_host, near_device),
        memory=memory,
        skipped={**trace.skipped, "far_events": far},
    )


def _bounds(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], pause: int, share: float
) -> tuple[int, int] | None:
    """Time range of near events; None where all are near, or where no part has more than ``share`` of them."""
    if not len(starts) or int(ends.max()) - int(starts.min()) <= pause:
        return None
    ordered = np.sort(starts)
    cuts = np.flatnonzero(np.diff(ordered) > pause) + 1
    edges = np.concatenate(([0], cuts, [len(ordered)]))
    counts = np.diff(edges)
    most = int(np.argmax(counts))
    if counts[most] <= share * len(ordered):
        return None
    first, last = int(ordered[edges[most]]), int(ordered[edges[most + 1] - 1])
    room = max(pause, SPANS * (last - first))
    bounds = first - room, last + room
    return bounds if int(starts.min()) < bounds[0] or int(ends.max()) > bounds[1] else None


def _near(events: HostEvents | DeviceEvents, bounds: tuple[int, int]) -> Rows:
    return np.asarray((events.starts >= bounds[0]) & (events.ends <= bounds[1]), np.bool_)


def _with(trace: TraceFile, host: Rows, device: Rows) -> TraceFile:
    """The trace with these of its host and device events, and their arguments."""
    return replace(
        trace, host=rows_of(trace.host, host), device=rows_of(trace.device, device),
        host_args=_renumbered(trace.host_args, host), device_args=_renumbered(trace.device_args, device),
    )  # fmt: skip


def _renumbered(args: dict[int, T], kept: Rows) -> dict[int, T]:
    """Arguments by row, after rows were left out."""
    row = np.cumsum(kept) - 1
    return {int(row[old]): found for old, found in args.items() if kept[old]}
