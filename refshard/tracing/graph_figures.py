"""What is told of the CUDA and HIP graphs of a trace, as data. Times are int64 nanoseconds."""

import msgspec


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One graph being captured by the host, over ``[start_ns, end_ns)``, with so many kernel launches as nodes."""

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
