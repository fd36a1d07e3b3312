"""What replays of a trace's dependency graph find, as data. Times are int64 nanoseconds."""

import msgspec

COMPUTE, COMMUNICATION, COPY, HOST, BETWEEN, UNEXPLAINED = (
    "compute", "communication", "copy", "host", "between_kernels", "unexplained",
)  # fmt: skip
"""What the path is made of: ``copy`` includes preparation, ``host`` launches; ``between_kernels`` is as usual there."""
TOLERATED_ERROR = 0.03
"""A replay further from the trace's own step than this share of it ranks nothing."""
OVERLAPPED, ON_TIME, LAUNCHES, NO_SYNC, KERNEL = (
    "communication_overlapped", "ranks_on_time", "launches_free", "no_synchronisation", "kernel_twice_as_fast",
)  # fmt: skip


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the critical path is of one class, or of one ``name`` in it: a kernel, or what the host did."""

    kind: str
    ns: int
    name: str | None = None


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path per step, by class and by what it goes through, the longest first.

    The parts add up to the step, but for rounding.
    """

    parts: tuple[PathPart, ...]
    owners: tuple[PathPart, ...]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A step would take ``step_ns``, ``gain_ns`` less than without this change; ``detail`` is the kernel's name."""

    what: str
    step_ns: int
    gain_ns: int
    detail: str | None = None


class WhatIfFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Replays of ``steps`` steps of a trace, whose mean length is ``step_ns``.

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
