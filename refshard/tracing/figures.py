"""What an analysis of traces finds, as data.

Times are int64 nanoseconds. What a trace cannot tell is None, never 0. ``docs/explanation/metrics.md`` has the
definitions.
"""

import msgspec


class TraceWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A doubt about a trace, or about figures made of it.

    ``code`` is for programs and stays; ``message`` says to people what it means and what to do about it. ``count``
    events or ``ns`` nanoseconds are concerned, where that can be counted.
    """

    code: str
    message: str
    count: int | None = None
    ns: int | None = None


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one window of one rank goes.

    The window is ``span_ns`` long. ``busy_ns`` is the union of all classes; each class is the union of its own spans,
    so that their sum exceeds it where they overlap. ``exposed_ns`` is communication during which no compute runs,
    ``exposed_any_ns`` communication during which nothing else runs. ``idle_ns`` splits into ``idle_host_ns`` (the next
    to run was launched after the gap began) and ``idle_dependency_ns`` (it was launched, and waited); both are None
    where the trace has no launches.
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
    idle_host_ns: int | None
    idle_dependency_ns: int | None


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


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that torch's allocator holds on ``device`` from ``ns`` on."""

    device: str
    ns: int
    bytes: int


class RankWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long this rank stood in collectives that ``rank`` was the last to enter, ``collectives`` of them.

    Waits that run at once, in collectives of several streams, count once.
    """

    rank: int
    waited_ns: int
    collectives: int


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one rank's trace.

    ``job`` is the number of the job that its file belongs to, among the files analysed together. ``whole`` is over the
    whole trace, from the first device event's start to the last one's end (of a CPU trace: over its steps, or from the
    first to the last span without steps). ``waits_for`` is empty for a rank whose peers are not here.
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
    waits_for: tuple[RankWait, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()
    windows: WindowFigures | None = None
