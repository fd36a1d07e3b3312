"""Reads what ``torch.cuda.memory._dump_snapshot`` writes, without running anything that the file could name.

A pickle may name any function for the reader to call. These need none: they hold dictionaries, lists, tuples, text and
numbers, and a file that names anything is refused. The schema is that of ``torch.cuda.memory._snapshot`` (torch 2.0 to
2.13); the lists of segments of ``torch.cuda.memory_snapshot`` are read too.
"""

import gzip
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, cast

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.errors import TraceError
from refshard.plain import plain

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
"""What an allocator records, by its code in :attr:`AllocatorHistory.actions`; anything else is left out."""
NO_SITE = -1
_PICKLE, _GZIP, _NEWEST_PROTOCOL = 0x80, b"\x1f\x8b", 5
_OF_TORCH = re.compile(r"(?:^|/)(?:site|dist)-packages/(?:torch|triton|functorch)/|(?:^|/)py?torch/torch/|^torch/")
_NO_PYTHON = re.compile(r"^\?\?$|^$|\.(?:c|cc|cpp|cu|h|hpp|cuh|so)(?:\.\d+)*$|^<frozen ")

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A line of Python."""

    file: str
    line: int
    function: str


class Block(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a segment. ``requested_size`` is what was asked for, ``frames`` where, if that was recorded."""

    size: _Bytes
    state: str
    address: _Bytes | None = None
    requested_size: _Bytes | None = None
    frames: Any = None


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator took from the device at once; of an expandable one, a mapped range."""

    address: _Bytes
    total_size: _Bytes
    stream: _Number
    segment_type: str
    blocks: list[Block]
    device: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    is_expandable: bool = False
    segment_pool_id: tuple[_Number, _Number] = (0, 0)


class _Entry(msgspec.Struct, kw_only=True, gc=False):
    action: str
    addr: _Bytes | None = None
    device_free: _Bytes | None = None
    size: _Bytes = 0
    stream: _Number = 0
    time_us: _Number | None = None
    frames: Any = None


class _Snapshot(msgspec.Struct, kw_only=True):
    segments: list[Segment]
    device_traces: list[list[_Entry]] = []
    allocator_settings: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocatorHistory:
    """What one device's allocator did, in its order, as columns.

    ``actions`` are codes of :data:`ACTIONS`, ``sizes`` bytes as they were asked for, ``times`` microseconds since 1970
    or -1, ``sites`` index :attr:`MemorySnapshot.sites` or are :data:`NO_SITE`. ``addresses`` are those of blocks and
    segments; of an ``oom``, the bytes that the device had free.
    """

    actions: npt.NDArray[np.int8]
    addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    sites: npt.NDArray[np.int32]

    def of(self, *actions: str) -> npt.NDArray[np.bool_]:
        """Which rows are one of these actions."""
        return np.isin(self.actions, [ACTIONS.index(action) for action in actions])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySnapshot:
    """A snapshot: its segments, the history of each device that has one, and what the allocator was told."""

    path: Path
    segments: tuple[Segment, ...]
    block_sites: dict[int, tuple[int, ...]]
    histories: dict[int, AllocatorHistory]
    sites: tuple[Site, ...]
    settings: dict[str, str | int | float]


def is_snapshot(path: Path) -> bool:
    """Whether a file is a pickle, by its first bytes; it may be gzipped."""
    if not os.path.isfile(path):  # noqa: PTH113 -- never raises; opening a pipe would wait for its writer
        return False
    try:
        with _opened(path) as file:
            head = file.read(2)
    except (OSError, EOFError, zlib.error):
        return False
    return len(head) == 2 and head[0] == _PICKLE and head[1] <= _NEWEST_PROTOCOL


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a snapshot; what it holds is checked, and nothing of it is run.

    Raises:
        TraceError: the file cannot be read, is damaged, holds more than plain values, or is no memory snapshot.
    """
    found = _plain(path)
    try:
        snapshot = msgspec.convert({"segments": found} if isinstance(found, list) else found, type=_Snapshot)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TraceError(
            f"{path}: not a CUDA memory snapshot ({error}); write one with torch.cuda.memory._dump_snapshot(FILE)"
        ) from None
    del found
    sites = _Sites()
    histories = {device: _history(entries, sites) for device, entries in enumerate(snapshot.device_traces) if entries}
    block_sites = {
        place: tuple(sites.of(block.frames) for block in segment.blocks)
        for place, segment in enumerate(snapshot.segments)
    }
    return MemorySnapshot(
        path=path,
        segments=tuple(snapshot.segments),
        block_sites=block_sites,
        histories=histories,
        sites=tuple(sites.table),
        settings={k: v for k, v in snapshot.allocator_settings.items() if isinstance(v, (str, int, float))},
    )


class _PlainUnpickler(pickle.Unpickler):
    """Refuses whatever is not a container, text or a number: only a name can make an unpickler call something."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse."""
        raise _NotPlainError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse."""
        raise _NotPlainError("an object kept elsewhere")


class _NotPlainError(Exception):
    """What a pickle asks for."""


def _plain(path: Path) -> Any:
    try:
        with _opened(path) as file:
            return _PlainUnpickler(file).load()
    except _NotPlainError as error:
        raise TraceError(
            f"{path}: is a pickle that asks for {plain(str(error))[:200]}; a CUDA memory snapshot holds plain values "
            "only, and anything else is not loaded, because it could run code"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise TraceError(f"{path}: does not fit into memory; record fewer entries (max_entries)") from None
    except Exception as error:
        reason = plain(str(error) or type(error).__name__)[:200]
        raise TraceError(f"{path}: damaged pickle ({reason}); copy or write it again") from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw


class _Sites:
    """Numbers the lines at which memory was asked for; a stack that many entries share is looked at once."""

    def __init__(self) -> None:
        self.table: dict[Site, int] = {}
        self._seen: dict[int, int] = {}

    def of(self, frames: Any) -> int:
        """The innermost frame that is not torch's own, else the innermost one of Python."""
        if not isinstance(frames, list) or not frames:
            return NO_SITE
        # The snapshot keeps every list alive, so that no two have one identity.
        if id(frames) not in self._seen:
            site = _site(frames)
            self._seen[id(frames)] = NO_SITE if site is None else self.table.setdefault(site, len(self.table))
        return self._seen[id(frames)]


def _site(frames: Sequence[Any]) -> Site | None:
    inside = None
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, line, function = frame.get("filename"), frame.get("line"), frame.get("name")
        if not isinstance(file, str) or not isinstance(line, int) or _NO_PYTHON.search(file):
            continue
        site = Site(file=file, line=line, function=str(function))
        if not _OF_TORCH.search(file):
            return site
        inside = inside or site
    return inside


def _history(entries: list[_Entry], sites: _Sites) -> AllocatorHistory:
    codes = {action: code for code, action in enumerate(ACTIONS)}
    kept = [entry for entry in entries if entry.action in codes]
    return AllocatorHistory(
        actions=np.array([codes[one.action] for one in kept], np.int8),
        addresses=np.array([(one.device_free if one.addr is None else one.addr) or 0 for one in kept], np.int64),
        sizes=np.array([one.size for one in kept], np.int64),
        times=np.array([-1 if one.time_us is None else one.time_us for one in kept], np.int64),
        sites=np.array([sites.of(one.frames) for one in kept], np.int32),
    )
