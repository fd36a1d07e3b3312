"""What one rank requested of its device, in the order of the host's calls.

A recording is a table with one row per event. Columns are numpy arrays of one length; names, modules, signatures and
sites are codes into tables of strings, so that a step of 100,000 events takes a few megabytes.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

NO_STREAM = -1
GRAPH_LAUNCH = "cudaGraphLaunch"
"""The name of the launch that comes before the nodes of a replayed CUDA graph."""
GROUP = 0xFFFFFFFF
"""Which bits of a collective's subject are the id of its group."""
BEGINS, ENDS = "begins: ", "ends: "
"""What marks of a phase say before its name."""
HOST_COUNTS = ("host_operators", "host_dispatched", "host_nodes", "host_calls")
"""Columns that count what the host did."""


class Kind(IntEnum):
    """What an event is.

    ``LAUNCH`` puts an operator on ``stream``. ``COLLECTIVE`` puts a collective on ``stream``. ``RECORD`` records the
    event ``subject`` on ``stream``; ``WAIT`` lets ``stream`` wait for it. ``SYNCHRONISE`` lets the host wait: for
    ``stream``, for the event ``subject`` if not 0, or for the whole device if neither is given. ``ALLOCATE``
    and ``FREE`` are blocks of the caching allocator, ``SEGMENT`` is memory that the allocator takes from the device
    (negative: gives back). ``MARK`` is a boundary that the driver set: the end of a step, or where a phase of the
    script's begins or ends. ``HOLD`` is ``record_stream()``: once freed, the block ``subject`` is held back until
    ``stream``, which is not its own, has passed what it was given by then. ``COMMUNICATOR`` is device
    memory that NCCL takes for the group ``subject``.
    """

    LAUNCH = 0
    COLLECTIVE = 1
    RECORD = 2
    WAIT = 3
    SYNCHRONISE = 4
    ALLOCATE = 5
    FREE = 6
    SEGMENT = 7
    MARK = 8
    HOLD = 9
    COMMUNICATOR = 10


class Phase(IntEnum):
    """In which part of a step the host was."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    OPTIMIZER = 4


class Flag(IntFlag):
    """What else is known of a launch."""

    CAUSAL = 1
    HOST_TO_DEVICE = 2
    DEVICE_TO_HOST = 4
    HOST_ONLY = 8
    """Takes the host's time but launches no kernel (``record_stream``)."""
    VALUE_UNKNOWN = 16
    """The host waits for a value that was never computed, and gets a placeholder. Of a launch: its FLOPs depend on such
    values."""
    STRIDED = 32
    """Pointwise, and a tensor is broadcast or lies in memory unlike the others: each element's address is computed."""
    PRODUCTS = 64
    """A Triton kernel that multiplies matrices, with FLOPs that are not known."""
    COMPILED = 128
    """Launched by the wrapper of a graph that inductor compiled."""
    CAPTURED = 256
    """A CUDA graph took it in: a launch that takes only the host's time (``HOST_ONLY``); an ``ALLOCATE`` for one."""
    OF_GRAPH = 512
    """A node of a CUDA graph that is replayed: the host launches the graph as a whole."""
    PRIVATE_POOL = 1024
    """Of ``ALLOCATE``: the block is of a private pool of the allocator (a CUDA graph's, or a ``MemPool``)."""
    JOINED = 2048
    """Of ``COLLECTIVE``: it is in one batch with the collective before it on its stream (``batch_isend_irecv``)."""


class Category(IntEnum):
    """What a block of memory holds."""

    OTHER = 0
    PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER = 3
    UNSHARDED = 4
    ACTIVATIONS = 5
    WORKSPACE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group as this rank sees it: its backend's name, and the global ranks in it."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """The events of one rank.

    Columns, one entry per event:

    - ``kinds`` (uint8): a :class:`Kind`.
    - ``names`` (int32, into ``name_table``): the operator (``aten::mm``), the kernel that inductor generated or the
      script has in Triton (``inductor::triton_poi_fused_add_0``, ``triton::rms_norm``), the collective
      (``all_gather``), why the host waits (``item``), or what a mark says.
    - ``streams`` (int64): the stream's id, 0 being the default stream, :data:`NO_STREAM` if not on a stream.
    - ``subjects`` (int64): an event's id (``RECORD``, ``WAIT``, ``SYNCHRONISE``), a group's id (``COLLECTIVE``,
      ``COMMUNICATOR``), a block's id (``ALLOCATE``, ``FREE``, ``HOLD``; never used again). Of a collective, the upper
      32 bits are a rank in the group: the peer of ``send`` and ``recv``, the root of ``broadcast``, ``reduce``,
      ``gather`` and ``scatter``.
    - ``sizes`` (int64): bytes of the block (as rounded by the allocator), the segment or the communicator; of a
      collective, of the unsharded tensor. Of a generated kernel, its FLOPs if it multiplies matrices.
    - ``reads``, ``writes`` (int64): bytes that the operator reads and writes; of ``ALLOCATE`` and ``FREE``, ``reads``
      is the block's address, and of ``ALLOCATE``, ``writes`` are the bytes as requested.
    - ``signatures`` (int32, into ``signature_table``): tensors in the order of the operator's arguments, then results,
      as in ``bf16[2,8192,4096] bf16[4096,14336] -> bf16[2,8192,14336]``.
    - ``modules`` (int32, into ``module_table``): the module's path within the model, empty where unknown.
    - ``phases`` (uint8): a :class:`Phase`. ``flags`` (int32): a :class:`Flag`.
    - ``categories`` (uint8): a :class:`Category` of each ``ALLOCATE``, else 0.
    - ``threads`` (int32): the host's thread, 0 being the first to issue anything.
    - ``sites`` (int32, into ``site_table``): the line of the user's script, as ``train.py:31 in train``, where the
      host waits; of each ``ALLOCATE``, if the request wants ``sites``. Of a collective, if it wants places, such lines
      from the innermost call on, one a line.
    - ``host_operators``, ``host_dispatched``, ``host_nodes``, ``host_calls`` (int32): what the host did since the event
      before: calls of torch's dispatcher (views and composite operators included), those of them made under a Python
      dispatch mode, autograd nodes run by backward, and calls of Python functions.
    - ``access_ends`` (int64): event ``i`` has the accesses ``access_ends[i - 1] : access_ends[i]`` of
      ``access_addresses``, ``access_sizes`` (int64, bytes) and ``access_writes`` (bool): device memory that it touches,
      and page-locked memory that a copy touches, at addresses of its own.

    ``groups`` are process groups by id. ``rank`` and ``world_size`` are the script's own.
    """

    rank: int
    world_size: int
    kinds: npt.NDArray[np.uint8]
    names: npt.NDArray[np.int32]
    streams: npt.NDArray[np.int64]
    subjects: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    reads: npt.NDArray[np.int64]
    writes: npt.NDArray[np.int64]
    signatures: npt.NDArray[np.int32]
    modules: npt.NDArray[np.int32]
    phases: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.int32]
    categories: npt.NDArray[np.uint8]
    threads: npt.NDArray[np.int32]
    sites: npt.NDArray[np.int32]
    host_operators: npt.NDArray[np.int32]
    host_dispatched: npt.NDArray[np.int32]
    host_nodes: npt.NDArray[np.int32]
    host_calls: npt.NDArray[np.int32]
    access_ends: npt.NDArray[np.int64]
    access_addresses: npt.NDArray[np.int64]
    access_sizes: npt.NDArray[np.int64]
    access_writes: npt.NDArray[np.bool_]
    name_table: tuple[str, ...]
    signature_table: tuple[str, ...]
    module_table: tuple[str, ...]
    site_table: tuple[str, ...]
    groups: dict[int, Group]

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in (*HOST_COUNTS, "names", "sizes", "access_ends")}
        assert lengths == {len(self.kinds)}, "a column of the recording has another length than the others"

    def __len__(self) -> int:
        return len(self.kinds)


def on_stream(recording: Recording, *kinds: Kind) -> npt.NDArray[np.bool_]:
    """Which events of these kinds a stream has to pass."""
    taken = np.isin(recording.kinds, kinds) & (recording.flags & Flag.HOST_ONLY == 0)
    return taken & (recording.streams != NO_STREAM)  # type: ignore[no-any-return]


def host_copies(recording: Recording) -> npt.NDArray[np.bool_]:
    """Which events copy to or from the host."""
    return recording.flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST) != 0  # type: ignore[no-any-return]


_TABLES = ("name_table", "signature_table", "module_table", "site_table")


def collect(ext: ModuleType, rank: int, world_size: int) -> Recording:
    """What the device's extension ``ext`` has recorded so far."""
    columns = ext.recording()
    groups = {
        number: Group(name=name, ranks=tuple(ranks) or tuple(range(world_size)))
        for number, (name, ranks) in enumerate(ext.groups())
    }
    return Recording(rank=rank, world_size=world_size, groups=groups, **columns)


def save(recording: Recording, path: Path) -> None:
    """Write a recording to ``path`` (``.npz``)."""
    columns = {name: getattr(recording, name) for name in Recording.__slots__}
    about = {name: columns.pop(name) for name in (*_TABLES, "groups", "rank", "world_size")}
    with path.open("wb") as file:
        np.savez(file, about=np.frombuffer(msgspec.json.encode(about), np.uint8), **columns)


def load(path: Path) -> Recording:
    """Read what :func:`save` wrote."""
    with np.load(path) as stored:
        columns = {name: stored[name] for name in stored.files}
    about = msgspec.json.decode(columns.pop("about").tobytes())
    groups = {int(number): Group(name=g["name"], ranks=tuple(g["ranks"])) for number, g in about["groups"].items()}
    tables: dict[str, Any] = {name: tuple(about[name]) for name in _TABLES}
    return Recording(rank=about["rank"], world_size=about["world_size"], groups=groups, **tables, **columns)
