"""Which kernels waited for kernels of other streams, as the profiler recorded it (``enable_cuda_sync_events``)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.table import LAUNCH, STREAM_WAIT, TraceFile
from refshard.events.timeline import UNKNOWN, Nanoseconds, Spans

Rows = npt.NDArray[np.int64]
Pairs = tuple[Rows, Rows]
"""What waits, and the span that it waits for."""

LOWEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """The spans of each lane in the order in which they run, and when they had been launched at the latest."""

    rows: tuple[Rows, ...]
    launches: tuple[Nanoseconds, ...]
    starts: Nanoseconds
    ends: Nanoseconds

    @classmethod
    def of(cls, spans: Spans) -> "Streams":
        """A lane runs in the order of its launches, so a span of unknown launch counts as launched with the last."""
        order = np.argsort(spans.lanes, kind="stable")
        cuts = np.searchsorted(spans.lanes[order], np.arange(1, len(spans.lane_names)))
        rows = tuple(np.split(order, cuts))
        launches = np.where(spans.launches == UNKNOWN, LOWEST, spans.launches)
        ordered = tuple(np.maximum.accumulate(launches[mine]) if len(mine) else launches[mine] for mine in rows)
        return cls(rows=rows, launches=ordered, starts=spans.starts, ends=spans.ends)

    def last_before(self, lane: int, points: Nanoseconds) -> Rows:
        """The last span of a lane launched before each point, :data:`UNKNOWN` without one."""
        place = np.searchsorted(self.launches[lane], points, "left")
        return np.append(self.rows[lane], UNKNOWN)[place - 1]

    def first_after(self, lane: int, points: Nanoseconds) -> Rows:
        """The first span of a lane launched at each point or later, :data:`UNKNOWN` without one."""
        return np.append(self.rows[lane], UNKNOWN)[np.searchsorted(self.launches[lane], points, "left")]


def recorded_waits(trace: TraceFile, spans: Spans) -> Pairs:
    """Streams' waits that the profiler recorded: the first span that waits, and the last that it waits for.

    Where it does not say which call recorded the event (until 2023), the event is taken to have been recorded just
    before the wait, as ``torch.cuda.Stream.wait_stream`` does.
    """
    syncs, numbers = trace.syncs, lane_numbers(trace)
    rows = np.flatnonzero(syncs.kinds == STREAM_WAIT)
    if not len(rows):
        return rows, rows
    streams = Streams.of(spans)
    waiting, sources = (
        np.array([numbers.get(key, UNKNOWN) for key in zip(syncs.devices[rows].tolist(), of[rows].tolist())], np.int64)
        for of in (syncs.streams, syncs.sources)
    )
    begins = begins_by_correlation(trace, np.concatenate((syncs.correlations[rows], syncs.records[rows])))
    called, recorded = begins[: len(rows)], begins[len(rows) :]
    recorded = np.where(syncs.records[rows] < 0, called, recorded)
    usable = (waiting != UNKNOWN) & (sources != UNKNOWN) & (waiting != sources)
    usable &= (called != UNKNOWN) & (recorded != UNKNOWN)
    first, last = np.full(len(rows), UNKNOWN, np.int64), np.full(len(rows), UNKNOWN, np.int64)
    for lane in range(len(streams.rows)):
        mine, theirs = usable & (waiting == lane), usable & (sources == lane)
        first[mine] = streams.first_after(lane, called[mine])
        last[theirs] = streams.last_before(lane, recorded[theirs])
    known = (first != UNKNOWN) & (last != UNKNOWN)
    return first[known], last[known]


def lane_numbers(trace: TraceFile) -> dict[tuple[int, int], int]:
    """Lanes by device and stream."""
    return {
        (int(device), int(stream)): lane
        for lane, (device, stream) in enumerate(trace.lanes)
        if device.isdigit() and stream.isdigit()
    }


def begins_by_correlation(trace: TraceFile, correlations: npt.NDArray[np.int64]) -> Nanoseconds:
    """When the call with each correlation id began; :data:`UNKNOWN` without such a call."""
    host = trace.host
    rows = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0))
    rows = rows[np.isin(host.correlations[rows], correlations)]
    rows = rows[np.argsort(host.correlations[rows], kind="stable")]
    ids = np.append(host.correlations[rows], UNKNOWN)
    place = np.searchsorted(ids[:-1], correlations)
    return np.where(ids[place] == correlations, np.append(host.starts[rows], UNKNOWN)[place], UNKNOWN)
