"""The events of a trace file as columns: what the analysis needs of them, and no more. Times are int64 nanoseconds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.tracing.files.frames import NO_FRAMES, Frames

HOST, LAUNCH, ANNOTATION, KERNEL, MEMCPY, MEMSET, OVERHEAD, SYNC = range(8)
"""Codes of :attr:`HostEvents.categories` and :attr:`DeviceEvents.categories`; a ``SYNC`` is a :class:`SyncEvents`."""

STREAM_WAIT, EVENT_SYNC, STREAM_SYNC, CONTEXT_SYNC = range(4)
SYNC_KINDS = {
    "Stream Wait Event": STREAM_WAIT,
    "Event Sync": EVENT_SYNC,
    "Stream Sync": STREAM_SYNC,
    "Context Sync": CONTEXT_SYNC,
}
"""Names of Kineto's ``cuda_sync`` events, and codes of :attr:`SyncEvents.kinds`."""

GLOO, EMULATED = "gloo:", "emulated:"
"""What the names of the spans begin with in which a collective runs on a CPU: gloo's, and emulated ones."""
UNUSED = -1
UNREAD = -2
"""Events of a device whose meaning no document gives: they are counted, not read."""

CATEGORIES = {
    "cpu_op": HOST, "operator": HOST,
    "user_annotation": ANNOTATION,
    "cuda_runtime": LAUNCH, "cuda_driver": LAUNCH, "hip_runtime": LAUNCH, "hip_driver": LAUNCH,
    "xpu_runtime": LAUNCH, "xpu_driver": LAUNCH, "mtia_runtime": LAUNCH, "privateuse1_runtime": LAUNCH,
    "privateuse1_driver": LAUNCH, "runtime": LAUNCH,
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY, "memcpy": MEMCPY,
    "gpu_memset": MEMSET, "memset": MEMSET,
    "overhead": OVERHEAD,
    "mtia_ccp_events": UNREAD, "mtia_insight": UNREAD,
    "cuda_sync": SYNC,
}  # fmt: skip
"""What Kineto calls a category, in lower case (2021's traces capitalise), and what it is."""


class Operands(msgspec.Struct, frozen=True, gc=False):
    """An operator's arguments as the trace spells them, each a JSON array with an entry per argument, or empty.

    ``dims`` are sizes, ``strides`` in elements, ``types`` of the elements, ``values`` of what is no tensor. The
    last are kept only for operators whose FLOPs depend on them.
    """

    dims: bytes
    strides: bytes
    types: bytes
    values: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEvents:
    """What allocators handed out and took back, in the order of time.

    ``changes`` are bytes, negative where taken back. ``addresses`` say where, ``allocated`` and ``reserved`` how many
    bytes the allocator held then; each -1 where the trace does not say. ``devices`` index
    :attr:`TraceFile.memory_devices`, ``threads`` :attr:`TraceFile.threads`, or are -1 for one without host events.
    """

    times: npt.NDArray[np.int64]
    changes: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    devices: npt.NDArray[np.int32]
    threads: npt.NDArray[np.int32]

    @classmethod
    def none(cls) -> "MemoryEvents":
        """Nothing of what allocators did is known."""
        no, code = np.empty(0, np.int64), np.empty(0, np.int32)
        return cls(times=no, changes=no, addresses=no, allocated=no, reserved=no, devices=code, threads=code)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostEvents:
    """Operators, annotations and launches, in the file's order.

    ``correlations`` are -1 but for launches, ``externals`` but for operators and annotations; ``threads`` index
    :attr:`TraceFile.threads`. ``operands`` index :attr:`TraceFile.operands`, and are -1 where nothing is kept of them.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int8]
    names: npt.NDArray[np.int32]
    threads: npt.NDArray[np.int32]
    correlations: npt.NDArray[np.int64]
    externals: npt.NDArray[np.int64]
    operands: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceEvents:
    """Kernels, copies and memsets, in the file's order.

    ``lanes`` index :attr:`TraceFile.lanes`, ``signatures`` :attr:`TraceFile.signatures`.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int8]
    names: npt.NDArray[np.int32]
    lanes: npt.NDArray[np.int32]
    correlations: npt.NDArray[np.int64]
    externals: npt.NDArray[np.int64]
    signatures: npt.NDArray[np.int32]
    is_collective: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncEvents:
    """What waited for which stream, where the profiler recorded it (``enable_cuda_sync_events``), in the file's order.

    ``correlations`` name the host's call that waits or has a stream wait, ``records`` the call that recorded the event
    waited for. ``streams`` wait or, in a stream's synchronisation, are waited for; ``sources`` are those that the event
    was recorded on. All but ``kinds`` are -1 where the trace does not say.
    """

    kinds: npt.NDArray[np.int8]
    correlations: npt.NDArray[np.int64]
    devices: npt.NDArray[np.int64]
    streams: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]

    @classmethod
    def none(cls) -> "SyncEvents":
        """Nothing of what waited is known."""
        no = np.empty(0, np.int64)
        return cls(kinds=no.astype(np.int8), correlations=no, devices=no, streams=no, sources=no, records=no)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceFile:
    """A trace as columns, with its tables of names and what the file says of itself.

    ``host_args`` and ``device_args`` are the arguments of the events, by row, that tell of collectives. ``operands``
    are those of operators that compute, each distinct one once. ``skipped`` counts what could not be used, by reason.
    """

    path: Path
    size: int
    host: HostEvents
    device: DeviceEvents
    syncs: SyncEvents
    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    lanes: tuple[tuple[str, str], ...]
    signatures: tuple[str, ...]
    host_args: dict[int, dict[str, Any]]
    device_args: dict[int, dict[str, Any]]
    operands: tuple[Operands, ...]
    memory: MemoryEvents
    memory_devices: tuple[str, ...]
    metadata: dict[str, Any]
    count: int
    skipped: dict[str, int] = field(default_factory=dict)
    frames: Frames = NO_FRAMES


def whole(value: Any) -> int | None:
    """A number of things, or None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None
