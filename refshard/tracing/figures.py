"""What an analysis of traces finds, as data.

Times are int64 nanoseconds. What a trace cannot tell is None, never 0. ``docs/explanation/metrics.md`` has the
definitions.
"""

from enum import StrEnum

import msgspec

from refshard.tracing.allocator.held_figures import MemoryPeak
from refshard.tracing.graph_figures import GraphFigures
from refshard.tracing.host.holdup_figures import HoldUps
from refshard.tracing.operators.operator_figures import OperatorReport
from refshard.tracing.ranks.exposure_figures import CommunicationFigures
from refshard.tracing.replay.whatif_figures import WhatIfFigures


class TraceWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A doubt about a trace, or about figures made of it.

    ``code`` is for programs and stays; ``message`` says to people what it means and what to do about it. ``count``
    events or ``ns`` nanoseconds are concerned, where that can be counted.
    """

    code: str
    message: str
    count: int | None = None
    ns: int | None = None


class Cause(StrEnum):
    """Why nothing runs.

    ``LAUNCH``: the host had queued nothing, or had only just. ``CALL``: the same, while the launching thread stood in a
    call for at least half of the gap. ``BACK_TO_BACK``: the device goes from one queued kernel to the next.
    ``DEPENDENCY``: what ends the gap was queued and waited for another stream. ``UNKNOWN``: it was queued, and the
    trace does not say what it waited for.
    """

    LAUNCH = "launch"
    CALL = "call"
    BACK_TO_BACK = "back_to_back"
    DEPENDENCY = "dependency"
    UNKNOWN = "unknown"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one window of one rank goes.

    The window is ``span_ns`` long. ``busy_ns`` is the union of all classes; each class is the union of its own spans,
    so that their sum exceeds it where they overlap. ``exposed_ns`` is communication during which no compute runs,
    ``exposed_any_ns`` communication during which nothing else runs, ``lone_copy_ns`` copies and fills during which
    nothing else runs, but for those into and out of the buffers of collectives. ``idle_ns`` splits by
    :class:`Cause`; in a trace without launches all of it is ``idle_unknown_ns`` and the others
    are None.
    """

    span_ns: int
    busy_ns: int
    compute_ns: int
    comm_ns: int
    prep_ns: int
    copy_ns: int
    unclassified_ns: int
    exposed_ns: int
    exposed_any_ns: int
    overlap_ratio: float | None
    idle_ns: int
    idle_launch_ns: int | None
    idle_call_ns: int | None
    idle_back_to_back_ns: int | None
    idle_dependency_ns: int | None
    idle_unknown_ns: int
    lone_copy_ns: int = 0

    @property
    def idle_host_ns(self) -> int | None:
        """Idle time that the host is to blame for: it had launched nothing, or stood in a call."""
        if self.idle_launch_ns is None or self.idle_call_ns is None:
            return None
        return self.idle_launch_ns + self.idle_call_ns


class GiveWay(msgspec.Struct, frozen=True, kw_only=True):
    """How much preparatory kernels before reduce-scatters hold those back ("give-way effect" of YaFSDP).

    ``index`` is the time lost, over the window. ``stretch`` is how many times as long the preparatory kernels took as
    with nothing beside them, ``baseline`` where that undisturbed duration comes from, in ``samples`` samples of the
    kernel with the fewest. ``reduces`` counts the reductions that such kernels precede. ``index`` and ``stretch`` are
    None, and ``reason`` says why, where it cannot be told.
    """

    index: float | None = None
    lost_ns: int | None = None
    stretch: float | None = None
    reduces: int = 0
    samples: int = 0
    baseline: str | None = None
    reason: str | None = None


class CopyOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Device time under copy-in and copy-out annotations; ``hidden_ns`` of it is beside compute, the rest is not."""

    copy_in_ns: int
    copy_out_ns: int
    exposed_ns: int
    hidden_ns: int


class ReduceWait(msgspec.Struct, frozen=True, kw_only=True):
    """FSDP2's ``post_backward_rs_wait``: the wait for an earlier reduce-scatter before a gradient buffer is reused.

    ``host_ns`` is how long the host stood in it. ``device_ns`` is how long the compute stream stood still between the
    last kernel launched before such a wait and the first after it; None without device events.
    """

    count: int
    host_ns: int
    device_ns: int | None


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank, ``[start_ns, start_ns + breakdown.span_ns)``; ``step`` is None in a trace without steps.

    A window that a user chose in place of steps has a ``name``.
    """

    step: int | None
    start_ns: int
    breakdown: Breakdown
    giveway: GiveWay
    copies: CopyOverhead
    reduce_wait: ReduceWait
    name: str | None = None


class WindowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Windows of one kind; times are sums over ``count`` of them, but for the shortest and the longest one's length."""

    name: str
    count: int
    span_ns: int
    shortest_ns: int
    longest_ns: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    idle_ns: int


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The windows that ``asked`` chose in place of steps, by kind, in the order in which the kinds first come."""

    asked: str
    groups: tuple[WindowGroup, ...]


class UnitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One unit (layer) over all steps: its own spans' union per class, and its collectives.

    ``exposed_ns`` is the communication of this unit during which no compute, of any unit, runs, ``exposed_any_ns`` that
    during which nothing else does.
    """

    unit: str
    compute_ns: int
    comm_ns: int
    prep_ns: int
    copy_ns: int
    exposed_ns: int
    exposed_any_ns: int
    collectives: int


class CollectiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that ran.

    ``bytes`` is the size of the unsharded tensor. ``algorithm_bandwidth`` is bytes per second of the collective's own
    duration, ``bus_bandwidth`` that times nccl-tests' factor for the operation and the size of the group. ``gap_ns`` is
    the time on its stream since the collective before it ended, and ``gap_blocking`` whether this one was launched
    already while compute ran in that gap; None for the first on a stream. ``queued_ns`` is from launch to start.
    ``sequence`` is the collective's number in its group, the same on all ranks, where torch records it.
    """

    op: str
    unit: str | None
    step: int | None
    group: str | None
    group_size: int | None
    dtype: str | None
    lane: str
    start_ns: int
    duration_ns: int
    exposed_ns: int
    exposed_any_ns: int
    queued_ns: int | None
    bytes: int | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    gap_ns: int | None
    gap_blocking: bool | None
    sequence: int | None = None


class IdleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps of one cause: ``count`` of them, ``ns`` nanoseconds in all, the longest of ``longest_ns``.

    ``what`` is the operator that was launched too late, the call that blocked, or the streams of which one waited for
    the other; of gaps of unknown cause what ended them, and of those between queued kernels nothing.
    """

    cause: Cause
    what: str
    ns: int
    count: int
    longest_ns: int


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that torch's allocator holds on ``device`` from ``ns`` on."""

    device: str
    ns: int
    bytes: int


class RankWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long this rank stood in collectives that ``rank`` was the last to enter, ``collectives`` of them.

    Waits that run at once, in collectives of several streams, count once. In a trace with steps, only collectives of
    the steps count.
    """

    rank: int
    waited_ns: int
    collectives: int


class LoneCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of one name, such as ``Memcpy HtoD (Pageable -> Device)``, over all steps.

    In ``ns`` of their time nothing else runs than copies; ``count`` of them have such time.
    """

    name: str
    ns: int
    count: int


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one rank's trace.

    ``job`` is the number of the job that its file belongs to, among the files analysed together. ``whole`` is over the
    whole trace, from the first device event's start to the last one's end (of a CPU trace: over its steps, or from the
    first to the last span without steps). ``waits_for`` is empty for a rank whose peers are not here. ``untold`` says
    why no verdict on losses can be given, where that is so. If ``host_only``, a device was used of which the trace has
    no events: the breakdowns are of the host's operators, and are shown to nobody. ``operators`` is None without a
    trace file to read them from, or without work in its steps. ``what_if`` is None for a CPU's trace.
    """

    file: str
    job: int
    rank: int | None
    world_size: int | None
    backend: str | None
    device: str
    events: int
    whole: Breakdown
    giveway: GiveWay
    copies: CopyOverhead
    reduce_wait: ReduceWait
    steps: tuple[StepFigures, ...]
    units: tuple[UnitFigures, ...]
    collectives: tuple[CollectiveFigures, ...]
    idle: tuple[IdleFigures, ...] = ()
    waits_for: tuple[RankWait, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    memory_peaks: tuple[MemoryPeak, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()
    communication: CommunicationFigures | None = None
    holdups: HoldUps | None = None
    windows: WindowFigures | None = None
    untold: str | None = None
    host_only: bool = False
    graphs: GraphFigures | None = None
    operators: OperatorReport | None = None
    what_if: WhatIfFigures | None = None
    lone_copies: tuple[LoneCopy, ...] = ()
