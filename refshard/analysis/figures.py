"""The figures of an analysed trace, as data: nothing here needs numpy.

Times are int64 nanoseconds. What a trace cannot tell is None, never 0. ``docs/reference/metrics.md`` has the
definitions.
"""

from enum import StrEnum
from typing import Literal, get_args

import msgspec


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One graph capture on the host, over ``[start_ns, end_ns)``; its nodes are kernel launches."""

    start_ns: int
    end_ns: int
    launches: int


class Replays(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of graphs with equally many device events, ``events`` each.

    ``count`` is how many launches, ``busy_ns`` the union of their device events. ``capture`` is the place in
    :attr:`GraphFigures.captures` of the capture that they replay: the only one that ended before them, or the only one
    with as many kernel launches; None where the trace has none or cannot tell.
    """

    count: int
    events: int
    busy_ns: int
    capture: int | None


class GraphFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The captures of a trace, by start, and the replays, the longest first."""

    captures: tuple[Capture, ...]
    replays: tuple[Replays, ...]


class Stall(StrEnum):
    """Kinds of calls that may hold the GPU up."""

    ITEM = "item"  # a value is read: .item(), .tolist(), if tensor:
    SHAPE = "shape"  # the size of a result depends on values: nonzero, masks, unique
    COPY = "copy"  # a copy that the host waits for
    SYNC = "synchronize"  # any other wait
    ALLOCATOR = "allocator"  # memory from the driver, or back to it
    LOADING = "loading"  # a module is loaded, or a launch is long while the GPU has nothing to do
    QUEUE = "full queue"  # a launch is long while the GPU is busy
    OTHER = "other"  # any other long call


class HostStall(msgspec.Struct, frozen=True, kw_only=True):
    """What calls at one place of the code, of one kind, do over all steps; without steps over the whole trace.

    ``call`` is the driver's function that takes most of the time. ``line`` is the Python function of the user's code
    that makes the call, as the profiler names it. ``operator`` is the innermost operator around it; ``unit`` the layer,
    or else the innermost annotation. ``copied`` names the copy that a call started. ``count`` is the number of calls;
    several by one operator for one purpose count once. ``host_ns`` is their duration. ``idle_ns`` is the GPU's idle
    time that they cause, at most ``host_ns``. ``followed_ns`` is all idle time between them and the kernel that their
    thread launches next.
    """

    kind: Stall
    call: str
    line: str | None
    operator: str | None
    unit: str | None
    thread: str
    copied: str | None
    count: int
    host_ns: int
    idle_ns: int
    followed_ns: int


class HostStalls(msgspec.Struct, frozen=True, kw_only=True):
    """All places, the one that causes most idle time first; None, with the ``reason``, where that is unknown.

    ``steps`` is the number of steps that the figures are sums over, None in a trace without steps. ``idle_ns`` is all
    of their idle time, and ``span_ns`` their length.
    """

    places: tuple[HostStall, ...] | None
    steps: int | None = None
    span_ns: int = 0
    idle_ns: int = 0
    reason: str | None = None


HostWork = Literal[
    "python", "modes", "subclasses", "annotations", "autograd", "operators", "launches", "waits", "calls",
]  # fmt: skip


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """Host time of one kind in all steps, in ``count`` events, each without the events within it.

    The kind ``python`` is the time outside of all events. ``most`` are the names with the most time, in nanoseconds;
    for ``python``, functions of the user's code if the trace has them (``with_stack=True``).
    """

    kind: HostWork
    ns: int
    count: int
    most: tuple[tuple[str, int], ...]


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the threads that launch do in all ``steps``, which take ``span_ns`` on the host; the most first.

    ``input_ns`` is the time in the steps in which the device is idle and the host loads data, on whatever thread.
    """

    steps: int
    span_ns: int
    launches: int
    input_ns: int
    parts: tuple[HostPart, ...]


Bound = Literal["skew", "latency", "bandwidth", "below", "unknown"]
"""What exposed communication comes from: waiting for ranks, latency, a link that is full, one that is not; or unknown,
where no rate of the link is known."""


class PeerWait(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed nanoseconds in which this rank waited for ``rank`` to enter a collective."""

    rank: int
    waited_ns: int


class ExposedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The exposed communication of one window, divided; ``step`` is None for the whole trace.

    ``transfer_ns``, ``waiting_ns`` and ``undivided_ns`` add up to ``exposed_ns``. Waiting is None if no collective of
    the trace was matched with another rank's, transfer if none was matched with those of its whole group.
    ``undivided_ns`` may be either. ``launch_ns`` is not part of the sum: the time in which nothing ran because the
    host launched the next collective late; None if a launch is unknown.
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

    ``nodes`` is how many the group spans. ``exposed_ns`` is their share of the steps' exposed time, ``waiting_ns`` the
    part known to be waiting. Bandwidths are bus bandwidths in bytes per second: the median with the waiting, the median
    without (from the rank that entered last; None unless all ranks of the group are here), the largest, and what the
    link reaches according to ``profile`` of :class:`CommunicationFigures`. ``is_latency_bound`` says whether latency
    takes at least half of a typical one.
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
    launches are unknown.
    """

    whole: ExposedSplit
    steps: tuple[ExposedSplit, ...]
    messages: tuple[MessageFigures, ...]
    bound: Bound | None
    profile: str | None
    missing: str | None
    no_launch: str | None


OperatorClass = Literal[
    "GEMM", "attention", "convolution", "normalisation", "elementwise", "optimizer", "copies", "others", "communication"
]
CLASSES: tuple[OperatorClass, ...] = get_args(OperatorClass)
"""By their code."""


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All work of one class in all steps: ``ns`` of ``count`` kernels (on a CPU: operators).

    ``share`` is of all work but communication; communication's is None. Over its operators with a roofline, which take
    ``known_ns``: ``gain_ns`` could be gained at the roofline, ``good_gain_ns`` at the rates that the hardware profile
    has of good kernels.
    """

    name: OperatorClass
    count: int
    ns: int
    share: float | None
    known_ns: int = 0
    gain_ns: int = 0
    good_gain_ns: int = 0

    @property
    def of_roofline(self) -> float | None:
        """The time that the peaks allow these operators, over the time that they take."""
        return 1 - self.gain_ns / self.known_ns if self.known_ns else None


class OperatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All calls in all steps of one operator with arguments of the same shapes and types.

    ``ns`` is the time of their kernels (on a CPU: of the operators, without other operators that they call). ``share``
    is of all work but communication. ``flops`` and ``bytes`` are of one call; ``bytes`` is the least that it must move.
    ``flops_per_s`` is the achieved rate, ``of_peak`` that rate over the data sheet's peak for the operands' type,
    ``of_roofline`` the least time by the peaks of compute and memory, over the time taken. ``bound`` says which of the
    two peaks limits. ``good`` is the share of the roofline that good kernels reach, by the hardware profile. ``reason``
    says why there is no ``of_roofline``.
    """

    name: str
    kind: OperatorClass
    shapes: str | None
    dtype: str | None
    calls: int
    ns: int
    share: float
    flops: int | None = None
    bytes: int | None = None
    flops_per_s: float | None = None
    of_peak: float | None = None
    of_roofline: float | None = None
    bound: Literal["compute", "memory"] | None = None
    good: float | None = None
    reason: str | None = None

    def gain_ns(self, reached: float | None) -> int:
        """What could be gained if it reached so much of its roofline; 0 where either is unknown."""
        return (
            0 if not reached or self.of_roofline is None else round(self.ns * max(0.0, 1 - self.of_roofline / reached))
        )


class OperatorTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator in all steps, over all ``shapes`` distinct shapes of arguments.

    Rates are over the calls for which they are known, ``known_ns`` of ``ns``; ``of_roofline`` is the time that the
    peaks allow these over the time that they took.
    """

    name: str
    kind: OperatorClass
    calls: int
    shapes: int
    ns: int
    share: float
    known_ns: int = 0
    flops_per_s: float | None = None
    of_peak: float | None = None
    of_roofline: float | None = None


class KernelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All runs in all steps of one kernel; ``name`` as the trace has it, ``short`` what tells it from others."""

    name: str
    short: str
    kind: OperatorClass
    count: int
    ns: int
    share: float


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer kernels run during communication than alone.

    Only runs of the same work are compared (:func:`~refshard.analysis.operators.same_work`), with three or more each
    way. ``runs`` are those with more than half of their time in communication. ``beside_ns`` and ``alone_ns`` are their
    time by the median of runs during it and of runs without any. They are ``slower`` if that is significantly more: the
    rank sums of both differ at the 5 % level. Else nothing is lost.
    """

    name: str
    kind: OperatorClass
    runs: int
    beside_ns: int
    alone_ns: int
    slower: bool

    @property
    def lost_ns(self) -> int:
        """What communication costs these kernels; 0 where it does not slow them."""
        return self.beside_ns - self.alone_ns if self.slower else 0

    @property
    def times(self) -> float | None:
        """How many times as long; None where they are not slower, or take no time alone."""
        return self.beside_ns / self.alone_ns if self.slower and self.alone_ns else None


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """What communication costs the kernels that overlap it, over all steps.

    ``classes`` and ``kernels`` are in order of the time lost; empty where no run could be compared. ``beside_ns`` is
    the time of all runs during communication, ``compared_ns`` of those compared, ``shapeless_ns`` of those not compared
    because their operators' shapes are unknown.
    """

    classes: tuple[Slowdown, ...]
    kernels: tuple[Slowdown, ...]
    compared_ns: int
    beside_ns: int
    shapeless_ns: int


class OperatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the operators and kernels of all ``steps`` take (of a trace without steps: of the whole, as one).

    ``work_ns`` is all work but communication. ``totals`` (by operator), ``operators`` (by operator and shapes) and
    ``kernels`` are the longest, out of ``total_count``, ``operator_count`` and ``kernel_count``; on a CPU
    there are no kernels. ``flops`` are of all operators, where known. ``hardware`` is the profile that peaks
    come from. ``contention`` is None where no kernel overlapped communication.
    """

    steps: int
    work_ns: int
    classes: tuple[ClassFigures, ...]
    totals: tuple[OperatorTotal, ...]
    total_count: int
    operators: tuple[OperatorFigures, ...]
    operator_count: int
    kernels: tuple[KernelFigures, ...]
    kernel_count: int
    contention: Contention | None
    hardware: str | None
    has_shapes: bool
    flops: int = 0


COMPUTE, COMMUNICATION, COPY, HOST, BETWEEN, UNEXPLAINED = (
    "compute", "communication", "copy", "host", "between_kernels", "unexplained",
)  # fmt: skip
"""What the path is made of: ``copy`` includes preparation, ``host`` launches; ``between_kernels`` is as usual there."""
TOLERATED_ERROR = 0.03
"""A replay further from the trace's own step than this share of it ranks nothing."""
OVERLAPPED, ON_TIME, LAUNCHES, FAST_HOST, NO_MODES, NO_SYNC, KERNEL, ROOFLINE = (
    "communication_overlapped", "ranks_on_time", "launches_free", "host_twice_as_fast", "no_dispatch_modes",
    "no_synchronisation", "kernel_twice_as_fast", "kernel_at_roofline",
)  # fmt: skip
"""Kernels that would have to exceed their roofline to be twice as fast reach it instead."""


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the critical path is of one class, or of one ``name`` in it: a kernel, or what the host did."""

    kind: str
    ns: int
    name: str | None = None


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path per step, by class and by what it goes through, the longest first.

    The parts add up to the step, except for rounding.
    """

    parts: tuple[PathPart, ...]
    owners: tuple[PathPart, ...]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A step would take ``step_ns``, ``gain_ns`` less than without this change; ``detail``: what kernels compute."""

    what: str
    step_ns: int
    gain_ns: int
    detail: str | None = None


class WhatIfFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Replays of ``steps`` steps of a trace; their mean length is ``step_ns``.

    ``replay_error`` is how far the replay of the unchanged graph is from that, as a share of it, when nothing is held
    that the graph cannot explain. ``what_ifs`` are each alone, the largest gain first. ``order`` is the order in which
    fixing things pays: each of them after all before it, as long as it gains; empty where the error is over
    :data:`TOLERATED_ERROR`. ``waits_recorded`` and ``waits_inferred`` count the dependencies between streams. Where
    the trace holds no calls but launches (``only_launches``), a wait of the host for the device counts as its own time.
    """

    steps: int
    step_ns: int
    replay_error: float
    waits_recorded: int
    waits_inferred: int
    only_launches: bool
    what_ifs: tuple[WhatIf, ...]
    order: tuple[WhatIf, ...]
    path: CriticalPath


Category = Literal[
    "before, kept", "before, freed later", "kept", "activations", "forward", "gradients", "backward", "optimizer state",
    "optimizer", "all-gather", "reduction", "collective", "other",
]  # fmt: skip
"""What a block is for: ``docs/reference/metrics.md`` has the definitions."""
Phase = Literal["forward", "backward", "optimizer"]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes`` in ``blocks`` blocks, allocated by one operator for one purpose and unit.

    ``unit`` is the unit of the labels, else the innermost annotation of the user's; ``operator`` the outermost operator
    of the host around the allocation. Both are None where the trace does not tell, ``blocks`` too.
    """

    category: Category
    unit: str | None
    operator: str | None
    bytes: int
    blocks: int | None


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which an allocator held most, in bytes.

    ``ns`` is the host's time, in ``step`` and ``phase`` and under ``operator``, for ``unit``. ``risen_bytes`` is
    ``allocated_bytes`` less what was allocated when the trace began. ``reserved_bytes`` is what the allocator had taken
    from the device at this moment, so that the difference is cache and fragmentation; ``most_reserved_bytes`` the most
    over the trace. What a trace does not tell is None: 2021's tell no totals, a CPU has nothing reserved. ``holders``
    add up to ``allocated_bytes``, the largest first; empty without addresses. ``unmatched`` counts blocks that were
    handed out again though the trace does not show that they were taken back.
    """

    device: str
    ns: int
    step: int | None
    phase: Phase
    operator: str | None
    unit: str | None
    allocated_bytes: int | None
    risen_bytes: int
    reserved_bytes: int | None
    most_reserved_bytes: int | None
    holders: tuple[Holder, ...] = ()
    unmatched: int = 0


class TraceWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about a trace, or about its figures.

    ``code`` is stable, for programs; ``message`` tells people what it means and what to do. ``count`` events or ``ns``
    nanoseconds are affected, if that can be counted.
    """

    code: str
    message: str
    count: int | None = None
    ns: int | None = None


class Cause(StrEnum):
    """Why nothing runs.

    ``LAUNCH``: the host had queued nothing, or had only just done so. ``CALL``: the same, while the launching thread
    was in a call for at least half of the gap. ``BACK_TO_BACK``: the device goes from one queued kernel to the next.
    ``DEPENDENCY``: the next kernel was queued and waited for another stream. ``UNKNOWN``: the next kernel was queued,
    and the trace does not say what it waited for.
    """

    LAUNCH = "launch"
    CALL = "call"
    BACK_TO_BACK = "back_to_back"
    DEPENDENCY = "dependency"
    UNKNOWN = "unknown"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one window of one rank goes.

    The window is ``span_ns`` long. ``busy_ns`` is the union of all classes; each class is the union of its own spans,
    so overlapping classes add up to more than ``busy_ns``. ``exposed_ns`` is communication during which no compute
    runs, ``exposed_any_ns`` communication during which nothing else runs, ``lone_copy_ns`` copies and fills during
    which nothing else runs, without those into and out of the buffers of collectives. ``idle_ns`` is divided by
    :class:`Cause`; in a trace without launches, all of it is ``idle_unknown_ns`` and the other causes are None.
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
        """Idle time that the host caused: it had launched nothing, or was in a call."""
        if self.idle_launch_ns is None or self.idle_call_ns is None:
            return None
        return self.idle_launch_ns + self.idle_call_ns


class GiveWay(msgspec.Struct, frozen=True, kw_only=True):
    """How much preparatory kernels delay reduce-scatters (YaFSDP's "give-way effect").

    ``index`` is the time lost, over the window. ``stretch`` is the duration of the preparatory kernels over their
    undisturbed duration, ``baseline`` the source of the latter; the kernel with the fewest samples has ``samples``.
    ``reduces`` counts the reductions that such kernels precede. ``index`` and ``stretch`` are None if they are
    unknown; ``reason`` says why.
    """

    index: float | None = None
    lost_ns: int | None = None
    stretch: float | None = None
    reduces: int = 0
    samples: int = 0
    baseline: str | None = None
    reason: str | None = None


class CopyOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Device time under copy-in and copy-out annotations; ``hidden_ns`` of it overlaps compute."""

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
    """Windows of one kind; times are sums over ``count`` windows, except for the shortest and longest length."""

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
    """The windows that ``--window`` chose in place of steps, by kind, in the order in which the kinds first come."""

    window: str
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

    ``bytes`` is the size of the unsharded tensor. ``algorithm_bandwidth`` is bytes per second of the collective's
    duration, ``bus_bandwidth`` that times nccl-tests' factor for the operation and the group's size. ``gap_ns`` is the
    time since the last collective on its stream ended; ``gap_blocking`` says whether this one had been launched while
    compute ran in that gap; both are None for the first on a stream. ``queued_ns`` is from launch to start.
    ``sequence`` is the collective's number in its group, equal on all ranks, if torch recorded it.
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

    ``what`` is the operator that was launched too late, the call that blocked, or the two streams if one waited for the
    other; for gaps of unknown cause, the next kernel; for gaps between queued kernels, nothing.
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


LateCause = Literal["slower", "work", "compute", "copies", "input", "allocator", "host", "communication", "idle"]
"""What a late rank does longer than the others. ``slower``: the same kernels. ``work``: more or larger kernels.
``compute``: either, the traces cannot tell. ``copies``: to or from the host, alone. The GPU idles while the host loads
``input``, stands in a call of the ``allocator``, or does something else (``host``). ``communication``: it is itself
held up in collectives. ``idle``: it idles for another or an unknown reason."""


class LatePart(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds that a late rank costs the others, by ``cause``, over all steps."""

    cause: LateCause
    ns: int


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How late a rank enters the collectives that could be matched with those of the other ranks here.

    In the steps it is the last to enter ``last`` of ``collectives``. The others wait ``cost_ns`` for it while nothing
    computes, a mean over them; ``steps`` has the same by step. In ``leads`` steps no rank costs the others more. If it
    ``grows``, it costs more from step to step. ``parts`` divide the cost by what the rank did longer than the others on
    average, from the end of a collective that all ranks left together to its entry into one that it was the last to
    enter. So clocks do not matter, nor that steps take equally long on all ranks because they wait for each other.

    Over all steps, kernels that do the same work on the others take ``same_work`` times as long; matrix products,
    attention and convolutions among them ``products`` times, the rest ``rest`` times. Its operators have ``flops``
    times the FLOPs of the others'. Where the ranks' shapes differ, ``same_work`` is for as many FLOPs. Each is
    None where the traces cannot tell.
    """

    last: int
    collectives: int
    cost_ns: int
    steps: tuple[int, ...]
    leads: int
    grows: bool
    parts: tuple[LatePart, ...] = ()
    same_work: float | None = None
    products: float | None = None
    rest: float | None = None
    flops: float | None = None


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
    first to the last span without steps). ``waits_for`` is empty and ``lateness`` None for a rank whose peers are not
    here. ``unavailable`` says why there is no verdict on losses, if so. If ``host_only``, a device was used but the
    trace has no events of it: the breakdowns are of the host's operators, and are not shown. ``operators`` is None
    without a trace file to read them from, or without work in its steps. ``what_if`` is None for a CPU's trace.
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
    lateness: Lateness | None = None
    memory: tuple[MemoryPoint, ...] = ()
    memory_peaks: tuple[MemoryPeak, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()
    communication: CommunicationFigures | None = None
    host_stalls: HostStalls | None = None
    host_time: HostTime | None = None
    windows: WindowFigures | None = None
    unavailable: str | None = None
    host_only: bool = False
    graphs: GraphFigures | None = None
    operators: OperatorReport | None = None
    what_if: WhatIfFigures | None = None
    lone_copies: tuple[LoneCopy, ...] = ()
