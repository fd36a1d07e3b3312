"""What the names of calls to CUDA's and HIP's runtimes and drivers say of them."""

import re

SYNCHRONISES = re.compile(r"(?:cuda|cu|hip)\w*Synchronize")
ALLOCATES = re.compile(
    r"(?:cuda|hip)(?:Ext)?(?:Malloc|Free|Host|MemGetInfo)(?!\w*Async)"
    r"|(?:cu|hip)Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|Address|GetInfo|Host)(?!\w*Async)"
)
FREES = re.compile(r"(?:cuda|hip)Free$")
"""They wait for all work of the device."""
LOADS = re.compile(r"(?:cuda|cu|hip)(?:Module|Library)(?:Load|Unload|GetFunction)")
INSTANTIATES = re.compile(r"(?:cuda|cu|hip)GraphInstantiate")
MAY_LOAD = re.compile(r"(?:cuda|cu|hip)(?:Func|Occupancy)")
"""Calls that ask about a kernel, and load it first where modules are loaded lazily."""
COPIES = re.compile(r"(?:cuda|cu|hip)Memcpy")
COPIES_AND_WAITS = re.compile(r"(?:cuda|cu|hip)Memcpy(?!\w*Async)")
LAUNCHES = re.compile(r"(?:cuda|cu|hip)(?!\w*Graph)(?:\w*Launch\w*|Mem(?:cpy|set)\w*Async)$")
GRAPH_LAUNCHES = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
"""Calls that take as long as their graph is large."""
STREAM_WAITS = re.compile(r"(?:cuda|cu|hip)StreamWaitEvent")
LONG_NS = 100_000
"""Any other call blocks its thread if it takes as long: a launch takes some microseconds, unless it loads a module or
its queue is full."""


def blocks(name: str) -> bool:
    """Whether a call returns only when the device, or its memory, is ready."""
    return any(pattern.match(name) for pattern in (SYNCHRONISES, ALLOCATES, LOADS, INSTANTIATES, COPIES_AND_WAITS))


def awaits_work(name: str) -> bool:
    """Whether a call returns only when work that the device was given has ended."""
    return any(pattern.match(name) for pattern in (SYNCHRONISES, FREES, COPIES_AND_WAITS))
