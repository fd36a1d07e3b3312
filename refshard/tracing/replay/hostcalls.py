"""The host's calls of a trace in the order in which they depend on each other: launches, and calls that block.

A call follows the one before it on its thread. Where a thread stood still while another one made calls (autograd's
thread during backward), it follows the last of those: work was handed over. Between two calls that block, the calls of
a thread keep their distances, whatever happens on the device: a segment.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.table import HOST, LAUNCH, HostEvents, TraceFile
from refshard.events.timeline import UNKNOWN, Nanoseconds
from refshard.tracing.host.runtime import awaits_work

Rows = npt.NDArray[np.int64]

WHOLE_DEVICE = re.compile(r"(?:Device|Ctx|Context|Thread)Synchronize|Free$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOrder:
    """Calls in the order in which they began.

    ``rows`` are those of :class:`HostEvents`. ``parents`` are the calls that each one follows,
    and ``after`` says whether it began after its parent returned. ``blocks`` are the calls that wait for the device;
    ``segments`` the blocking call that the host had returned from last before each. :data:`UNKNOWN` without one.
    """

    rows: Rows
    begins: Nanoseconds
    ends: Nanoseconds
    threads: npt.NDArray[np.int32]
    names: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.bool_]
    parents: Rows
    after: npt.NDArray[np.bool_]
    segments: Rows

    def __len__(self) -> int:
        return len(self.rows)


def blocking_rows(trace: TraceFile, start: int, end: int) -> Rows:
    """Rows of calls in ``[start, end)`` that block by their name."""
    host = trace.host
    codes = [code for code, name in enumerate(trace.names) if awaits_work(name)]
    inside = (host.starts >= start) & (host.starts < end) & (host.categories == LAUNCH)
    return np.flatnonzero(inside & np.isin(host.names, codes))


def host_calls(host: HostEvents, rows: Rows, blocking: Rows) -> CallOrder:
    """The calls ``rows``, of which ``blocking`` wait for the device."""
    # An operator that stands for its launch goes on after it: it counts as a moment.
    ends = np.where(host.categories[rows] == LAUNCH, host.ends[rows], host.starts[rows])
    order = np.lexsort((-ends, host.starts[rows]))
    rows, ends = rows[order], ends[order]
    begins, threads = host.starts[rows], host.threads[rows]
    blocks = np.isin(rows, blocking)
    parents = _parents(host, begins, ends, threads)
    after = np.zeros(len(rows), np.bool_)
    has = parents != UNKNOWN
    after[has] = begins[has] >= ends[parents[has]]
    return CallOrder(
        rows=rows, begins=begins, ends=ends, threads=threads, names=host.names[rows], blocks=blocks, parents=parents,
        after=after, segments=_segments(parents, after, blocks),
    )  # fmt: skip


def _parents(host: HostEvents, begins: Nanoseconds, ends: Nanoseconds, threads: npt.NDArray[np.int32]) -> Rows:
    """The call that each one follows: on its own thread, or of the thread that handed over."""
    count = np.arange(len(begins))
    if not len(begins):
        return count
    by_thread = np.argsort(threads, kind="stable")
    same = np.zeros(len(begins), np.bool_)
    same[1:] = threads[by_thread][1:] == threads[by_thread][:-1]
    before = np.full(len(begins), UNKNOWN, np.int64)
    before[by_thread[same]] = by_thread[np.flatnonzero(same) - 1]
    switched = np.flatnonzero((before != count - 1) & (before != UNKNOWN))
    switched = switched[ends[switched - 1] <= begins[switched]]
    found = np.where(before == UNKNOWN, count - 1, before)
    # A thread that itself began operators meanwhile was not waiting for the other.
    own = _operators_begun(
        host, threads[switched], begins[np.minimum(before[switched] + 1, len(begins) - 1)], ends[switched - 1]
    )
    handed = switched[own == 0]
    found[handed] = handed - 1
    return found


def _operators_begun(
    host: HostEvents, threads: npt.NDArray[np.int32], starts: Nanoseconds, ends: Nanoseconds
) -> npt.NDArray[np.int64]:
    """How many operators a thread began in ``[start, end]``."""
    found = np.zeros(len(threads), np.int64)
    for thread in np.unique(threads).tolist():
        mine = threads == thread
        begun = np.sort(host.starts[(host.threads == thread) & (host.categories == HOST)])
        found[mine] = np.searchsorted(begun, ends[mine], "right") - np.searchsorted(begun, starts[mine], "left")
    return found


def _segments(parents: Rows, after: npt.NDArray[np.bool_], blocks: npt.NDArray[np.bool_]) -> Rows:
    """The blocking call that opens each call's segment, by following the calls' parents."""
    has = parents != UNKNOWN
    opened = has & after & blocks[parents]
    pointer = np.where(has & ~opened, parents, np.arange(len(parents)))
    while True:
        further = pointer[pointer]
        if (further == pointer).all():
            return np.where(opened[pointer], parents[pointer], UNKNOWN)
        pointer = further
