"""What holds the GPU up, as data: nothing here needs numpy."""

from enum import StrEnum

import msgspec


class Hold(StrEnum):
    """Kinds of calls that may hold the GPU up."""

    ITEM = "item"  # a value is read: .item(), .tolist(), if tensor:
    SHAPE = "shape"  # the size of a result depends on values: nonzero, masks, unique
    COPY = "copy"  # a copy that the host waits for
    SYNC = "synchronize"  # any other wait
    ALLOCATOR = "allocator"  # memory from the driver, or back to it
    LOADING = "loading"  # a module is loaded, or a launch is long while the GPU has nothing to do
    QUEUE = "full queue"  # a launch is long while the GPU is busy
    OTHER = "other"  # any other long call


class HoldUp(msgspec.Struct, frozen=True, kw_only=True):
    """What calls at one place of the code, of one kind, do over all steps; without steps over the whole trace.

    ``call`` is the driver's function that takes most of the time. ``line`` is the Python function of the user's code
    that makes the call, as the profiler names it. ``operator`` is the innermost operator around it; ``unit`` the layer,
    or else the innermost annotation. ``copied`` names the copy that a call started. ``count`` is the number of calls;
    those that one operator makes for one purpose count once. ``host_ns`` is their duration. ``idle_ns`` is the GPU's
    idle time that they cause, at most ``host_ns``. ``followed_ns`` is all idle time between them and the kernel that
    their thread launches next.
    """

    kind: Hold
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


class HoldUps(msgspec.Struct, frozen=True, kw_only=True):
    """All places, the one that causes most idle time first; None, with the ``reason``, where it cannot be told.

    ``steps`` is the number of steps that the figures are sums over, None in a trace without steps. ``idle_ns`` is all
    of their idle time, and ``span_ns`` their length.
    """

    places: tuple[HoldUp, ...] | None
    steps: int | None = None
    span_ns: int = 0
    idle_ns: int = 0
    reason: str | None = None
