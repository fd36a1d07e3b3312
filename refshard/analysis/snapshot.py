"""Analyses CUDA memory snapshots and memory timelines: memory held and reserved, at the end and at the peak, who holds
it, and what is lost to fragmentation.

``torch.cuda.memory._dump_snapshot`` writes a snapshot; it is read without running code that its pickle names. The
segments are exact, as of the snapshot. The history has earlier allocations and frees; what was held when it began
follows from the segments. It has the requested sizes, not the allocator's rounded ones.

torch's profiler exports a timeline (``export_memory_timeline`` to a file that ends in ``.raw.json.gz``): an array of
``[ns, action, bytes, category]``. The category is the purpose of a tensor by torch's analysis of the graph of
operators. Bytes are negative for frees, and ns is -1 for tensors from before. A tensor that is written to is freed and
allocated again, maybe with another category.
"""

import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.memory_peaks import blocks_of
from refshard.errors import TraceError
from refshard.events.pickles import opened, read_pickle
from refshard.events.sites import Site, sites_of
from refshard.events.timeline import Ints, Mask, Rows

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
"""What an allocator records, by its code in :attr:`AllocatorHistory.actions`; anything else is left out."""
NO_SITE = -1
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Block(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a segment. ``requested_size`` is the requested size, ``frames`` where, if recorded."""

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

    ``actions`` are codes of :data:`ACTIONS`, ``sizes`` bytes as requested, ``times`` microseconds since 1970
    or -1, ``sites`` index :attr:`MemorySnapshot.sites` or are :data:`NO_SITE`. ``addresses`` are those of blocks and
    segments; of an ``oom``, the bytes that the device had free.
    """

    actions: npt.NDArray[np.int8]
    addresses: Rows
    sizes: Rows
    times: Rows
    sites: Ints

    def of(self, *actions: str) -> Mask:
        """Which rows are one of these actions."""
        return np.isin(self.actions, [ACTIONS.index(action) for action in actions])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySnapshot:
    """A snapshot: its segments, the history of each device that has one, and the allocator's settings."""

    path: Path
    segments: tuple[Segment, ...]
    block_sites: dict[int, tuple[int, ...]]
    histories: dict[int, AllocatorHistory]
    sites: tuple[Site, ...]
    settings: dict[str, str | int | float]


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a snapshot; what it holds is checked, and nothing of it is run.

    Raises:
        TraceError: the file cannot be read, is damaged, holds more than plain values, or is no memory snapshot.
    """
    found = read_pickle(path, "a CUDA memory snapshot", "record fewer entries (max_entries)")
    try:
        snapshot = msgspec.convert({"segments": found} if isinstance(found, list) else found, type=_Snapshot)
    except (msgspec.ValidationError, RecursionError) as error:
        if isinstance(found, dict) and found.keys() >= {"entries", "pg_config"}:
            raise TraceError(f"{path}: is a flight recorder dump; analyse it with refshard trace --hang") from None
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
        path=path, segments=tuple(snapshot.segments), block_sites=block_sites, histories=histories,
        sites=tuple(sites.table),
        settings={k: v for k, v in snapshot.allocator_settings.items() if isinstance(v, (str, int, float))},
    )  # fmt: skip


class _Sites:
    """Numbers the lines that allocated memory; a stack that many entries share is looked at once."""

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


def _site(frames: Any) -> Site | None:
    inside = None
    for site in sites_of(frames):
        if not site.is_of_torch:
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


ALLOCATED, INACTIVE = "active_allocated", "inactive"
_TAKEN, _GIVEN_BACK = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_MOST = 100


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """Where reserved memory is, in bytes; all but ``largest_free_bytes`` add up to it.

    ``requested_bytes`` were requested, and ``rounding_bytes`` added to that, in blocks that tensors use.
    ``pending_bytes`` are blocks freed that another stream may still use. ``split_bytes`` are free, in segments that
    hold used blocks, so that they cannot be given back to the device; ``unused_bytes`` are segments that hold none.
    ``largest_free_bytes`` is the largest free block: a larger one needs new memory of the device.
    """

    requested_bytes: int
    rounding_bytes: int
    pending_bytes: int
    split_bytes: int
    unused_bytes: int
    largest_free_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """Blocks that tensors use, as ``torch.cuda.memory_allocated`` counts."""
        return self.requested_bytes + self.rounding_bytes

    @property
    def active_bytes(self) -> int:
        """The same and what is pending."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has of the device."""
        return self.active_bytes + self.split_bytes + self.unused_bytes


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of one stream: ``kind`` is ``small`` or ``large``; ``private`` if it is of a CUDA graph or a MemPool."""

    kind: str
    expandable: bool
    private: bool
    stream: int
    segments: int
    fragmentation: Fragmentation


class LineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one line of Python holds; ``site`` is None for what has no recorded stack."""

    site: Site | None
    bytes: int
    blocks: int


class SizeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks`` blocks of ``size`` bytes as requested."""

    size: int
    blocks: int


class OomFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that failed: what was requested, and what was free, in bytes. ``time_us`` is since 1970."""

    asked_bytes: int
    device_free_bytes: int
    requested_bytes: int
    reserved_bytes: int
    time_us: int | None
    site: Site | None


class HistoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded history of ``entries`` calls shows; sizes are the requested ones.

    The peak is the moment with most ``requested_bytes`` in blocks that tensors use; ``pending_bytes`` and
    ``reserved_bytes`` are of that moment, ``most_reserved_bytes`` of any. ``early_bytes`` of it were there before the
    history began. ``segments_taken`` and ``segments_given_back`` count the calls to the device for memory, ``late_*``
    those in the latter half of the allocations, when a program should have warmed up. ``peak_time_us`` is since 1970.
    ``gone_bytes`` are in use when the history ends and not in the segments: it ends before the snapshot was taken.
    """

    entries: int
    allocations: int
    peak_time_us: int | None
    peak_after_entries: int
    requested_bytes: int
    pending_bytes: int
    reserved_bytes: int
    most_reserved_bytes: int
    early_bytes: int
    segments_taken: int
    segments_given_back: int
    late_segments_taken: int
    late_segments_given_back: int
    ooms: tuple[OomFigures, ...]
    gone_bytes: int = 0


class FailureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was held when the last allocation failed, in ``lines`` and ``sizes``, ``early_bytes`` of it since before the
    history began, and ``free_bytes`` of what was reserved. ``changed`` if the allocator did anything between then and
    the snapshot: segments and their free blocks are then of a later moment, and ``free_bytes`` include what was lost to
    rounding.
    """

    free_bytes: int
    early_bytes: int
    changed: bool
    lines: tuple[LineFigures, ...]
    sizes: tuple[SizeFigures, ...]


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a snapshot. ``lines`` and ``sizes`` are of the history's peak, of now without a history; the
    largest first. Both add up to what is requested, unless there are more than a hundred. ``free_blocks`` are those of
    now, the largest first. ``failure`` is None where no allocation failed.
    """

    device: int
    fragmentation: Fragmentation
    pools: tuple[PoolFigures, ...]
    history: HistoryFigures | None
    lines: tuple[LineFigures, ...]
    sizes: tuple[SizeFigures, ...]
    free_blocks: tuple[SizeFigures, ...] = ()
    failure: FailureFigures | None = None


def snapshot_figures(snapshot: MemorySnapshot) -> tuple[DeviceFigures, ...]:
    """The figures of each device that has segments or a history, by its number."""
    found = []
    for device in sorted({segment.device for segment in snapshot.segments} | snapshot.histories.keys()):
        mine = _of_device(snapshot, device)
        segments, now, recorded = [one for one, _ in mine], _Now(mine), snapshot.histories.get(device)
        fragmentation = _fragmentation(segments)
        history, failure, held = None, None, now.held()
        if recorded is not None:
            past = _Past(recorded, now, fragmentation.reserved_bytes)
            history, held = _history_figures(past, snapshot.sites), past.held(past.peak)
            failure = _failure(past, fragmentation, snapshot.sites)
        groups = defaultdict[tuple[str, bool, bool, int], list[Segment]](list)
        for one in segments:
            groups[one.segment_type, one.is_expandable, any(one.segment_pool_id), one.stream].append(one)
        pools = [
            PoolFigures(
                kind=kind, expandable=expandable, private=private, stream=stream, segments=len(members),
                fragmentation=_fragmentation(members),
            )
            for (kind, expandable, private, stream), members in groups.items()
        ]  # fmt: skip
        free = Counter(block.size for one in segments for block in one.blocks if block.state == INACTIVE)
        found.append(
            DeviceFigures(
                device=device, fragmentation=fragmentation, history=history, failure=failure,
                pools=tuple(sorted(pools, key=lambda pool: -pool.fragmentation.reserved_bytes)),
                lines=_by_line(held, snapshot.sites), sizes=_by_size(held),
                free_blocks=tuple(SizeFigures(size=n, blocks=free[n]) for n in sorted(free, reverse=True)[:_MOST]),
            )
        )  # fmt: skip
    return tuple(found)


def held_at_failure(snapshot: MemorySnapshot, device: int) -> Counter[tuple[Site | None, int]]:
    """How many blocks of which requested size each line held when the last allocation failed; in the end if none
    did.
    """
    mine, recorded = _of_device(snapshot, device), snapshot.histories.get(device)
    now = _Now(mine)
    held = now.held()
    if recorded is not None:
        past = _Past(recorded, now, 0)
        held = past.held(past.failures[-1]) if past.failures else held
    return Counter((_site_at(snapshot.sites, site), size) for size, site in held)


def _of_device(snapshot: MemorySnapshot, device: int) -> list[tuple[Segment, tuple[int, ...]]]:
    return [(one, snapshot.block_sites[n]) for n, one in enumerate(snapshot.segments) if one.device == device]


_Held = list[tuple[int, int]]
"""Size and line of each block."""


def _by_line(held: _Held, sites: Sequence[Site]) -> tuple[LineFigures, ...]:
    of_line, blocks = Counter[int](), Counter(site for _, site in held)
    for size, site in held:
        of_line[site] += size
    return tuple(
        LineFigures(site=_site_at(sites, site), bytes=size, blocks=blocks[site])
        for site, size in of_line.most_common(_MOST)
    )


def _by_size(held: _Held) -> tuple[SizeFigures, ...]:
    sizes = sorted(Counter(size for size, _ in held).items(), key=lambda item: -item[0] * item[1])
    return tuple(SizeFigures(size=size, blocks=count) for size, count in sizes[:_MOST])


def _site_at(sites: Sequence[Site], place: int) -> Site | None:
    return None if place == NO_SITE else sites[place]


class _Past:
    """A history, and bytes before its first call and after each: ``used`` by tensors, ``reserved`` and ``pending``.

    ``peak`` is how many calls came before the peak, ``failures`` how many before each allocation that failed.
    """

    def __init__(self, history: AllocatorHistory, now: "_Now", reserved_bytes: int) -> None:
        self.history, self._now = history, now
        blocks = blocks_of(history.of("alloc").astype(np.int64) - history.of("free_requested"), history.addresses)
        self._made, self._freed, self._early = blocks.made, blocks.freed, blocks.early
        left = blocks.made[blocks.freed >= len(history.actions)]
        # Blocks that the history leaves in use and that are not there now.
        self.gone = int(history.sizes[left[~np.isin(history.addresses[left], now.addresses)]].sum())
        self.used = _course(history, ("alloc",), ("free_requested",), int(now.sizes.sum()) + self.gone)
        self.reserved = _course(history, _TAKEN, _GIVEN_BACK, reserved_bytes)
        self.pending = _course(history, ("free_requested",), ("free_completed",), now.pending_bytes)
        self.peak = int(np.argmax(self.used))
        self.failures = np.flatnonzero(history.of("oom")).tolist()

    def early_bytes(self, at: int) -> int:
        """What was there before the history began, of what was held after ``at`` calls."""
        return int(self.used[at]) - int(self.history.sizes[self._alive(at)].sum())

    def held(self, at: int) -> _Held:
        """What was held after ``at`` calls."""
        history, now, alive = self.history, self._now, self._alive(at)
        held = list(zip(history.sizes[alive].tolist(), history.sites[alive].tolist()))
        # A block from before that is freed later: only where it was freed is known. Of one still there, where it was
        # made.
        early = [(size, NO_SITE) for size in history.sizes[self._early[self._early >= at]].tolist()]
        kept = ~np.isin(now.addresses, history.addresses[self._made])
        early += list(zip(now.sizes[kept].tolist(), now.sites[kept].tolist()))
        unknown = self.early_bytes(at) - sum(size for size, _ in early)
        return [*held, *early, *([(unknown, NO_SITE)] if unknown > 0 else [])]

    def _alive(self, at: int) -> Rows:
        return self._made[(self._made < at) & (self._freed >= at)]


def _history_figures(past: _Past, sites: Sequence[Site]) -> HistoryFigures:
    history, at, used, reserved = past.history, past.peak, past.used, past.reserved
    calls, times = np.flatnonzero(history.of("alloc")), [None if t < 0 else t for t in history.times.tolist()]
    late = np.arange(len(history.actions)) >= (calls[len(calls) // 2] if len(calls) else 0)
    taken, given_back = history.of(*_TAKEN), history.of(*_GIVEN_BACK)
    ooms = [
        OomFigures(
            asked_bytes=int(history.sizes[row]), device_free_bytes=int(history.addresses[row]),
            requested_bytes=int(used[row]), reserved_bytes=int(reserved[row]), time_us=times[row],
            site=_site_at(sites, int(history.sites[row])),
        )
        for row in past.failures
    ]  # fmt: skip
    return HistoryFigures(
        entries=len(history.actions), allocations=len(calls), peak_time_us=times[at - 1] if at else None,
        peak_after_entries=at, requested_bytes=int(used[at]), pending_bytes=int(past.pending[at]),
        reserved_bytes=int(reserved[at]), most_reserved_bytes=int(reserved.max()), early_bytes=past.early_bytes(at),
        segments_taken=int(taken.sum()), segments_given_back=int(given_back.sum()),
        late_segments_taken=int((taken & late).sum()), late_segments_given_back=int((given_back & late).sum()),
        ooms=tuple(ooms), gone_bytes=past.gone,
    )  # fmt: skip


def _failure(past: _Past, now: Fragmentation, sites: Sequence[Site]) -> FailureFigures | None:
    if not past.failures:
        return None
    at = past.failures[-1]
    held, changed = past.held(at), at < len(past.history.actions) - 1
    free = int(past.reserved[at] - past.used[at] - past.pending[at]) if changed else now.split_bytes + now.unused_bytes
    return FailureFigures(
        free_bytes=free,
        early_bytes=past.early_bytes(at),
        changed=changed,
        lines=_by_line(held, sites),
        sizes=_by_size(held),
    )


def _fragmentation(segments: Iterable[Segment]) -> Fragmentation:
    requested = rounding = pending = split = unused = largest = 0
    for segment in segments:
        free = [block.size for block in segment.blocks if block.state == INACTIVE]
        if len(free) == len(segment.blocks):
            unused += segment.total_size
        else:
            split += sum(free)
        largest = max(largest, *free, 0)
        for block in segment.blocks:
            if block.state == ALLOCATED:
                requested += _asked(block)
                rounding += block.size - _asked(block)
            elif block.state != INACTIVE:
                pending += block.size
    return Fragmentation(
        requested_bytes=requested, rounding_bytes=rounding, pending_bytes=pending, split_bytes=split,
        unused_bytes=unused, largest_free_bytes=largest,
    )  # fmt: skip


class _Now:
    """The blocks that tensors use now, as columns of one length: their requested sizes. ``pending_bytes``
    are those of blocks that are freed and that another stream may still use.
    """

    def __init__(self, segments: Iterable[tuple[Segment, Sequence[int]]]) -> None:
        rows, self.pending_bytes = [], 0
        for segment, sites in segments:
            address = segment.address
            for block, site in zip(segment.blocks, sites):
                if block.state == ALLOCATED:
                    rows.append((address if block.address is None else block.address, _asked(block), site))
                elif block.state != INACTIVE:
                    self.pending_bytes += _asked(block)
                address += block.size
        self.addresses, self.sizes, self.sites = np.array(rows, np.int64).reshape(-1, 3).T

    def held(self) -> _Held:
        """Size and line of each."""
        return list(zip(self.sizes.tolist(), self.sites.tolist()))


def _asked(block: Block) -> int:
    return block.size if block.requested_size is None else block.requested_size


def _course(history: AllocatorHistory, more: Sequence[str], less: Sequence[str], last: int) -> Rows:
    """Bytes before the first entry and after each, where ``last`` are there after the last."""
    changes = np.where(history.of(*more), history.sizes, 0) - np.where(history.of(*less), history.sizes, 0)
    course = np.concatenate(([0], np.cumsum(changes)))
    return np.asarray(course - course[-1] + last)


CATEGORIES = (
    "parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd detail", "unknown",
)  # fmt: skip
"""By torch's numbers."""
_START = b"[["
_MOST_BYTES = 1 << 30
"""Most bytes of decompressed text: more would not fit where a trace does."""


class MemoryTimelineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one device: bytes by category, in all, and nanoseconds after the first event that has a time.

    ``before_bytes`` were there before the recording began.
    """

    events: int
    peak_bytes: int
    peak_ns: int
    before_bytes: int
    by_category: dict[str, int]


def is_memory_timeline(path: Path) -> bool:
    """Whether a file begins as such a timeline does; it may be gzipped."""
    if not os.path.isfile(path):  # noqa: PTH113 -- never raises; opening a pipe would wait for its writer
        return False
    try:
        with opened(path) as file:
            return file.read(64).lstrip().replace(b" ", b"").startswith(_START)
    except (OSError, EOFError, zlib.error):
        return False


def memory_timeline(path: Path) -> MemoryTimelineFigures:
    """The figures of a timeline.

    Raises:
        TraceError: the file cannot be read, is damaged, or is no memory timeline.
    """
    try:
        with opened(path) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise TraceError(f"{path}: expands to more than {_MOST_BYTES:,} bytes; record fewer steps")
        rows = msgspec.json.decode(text, type=list[tuple[int, int, int, int]])
        times, _, changes, categories = np.array(rows, np.int64).reshape(-1, 4).T
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise TraceError(
            f"{path}: an array of arrays, but no memory timeline of torch.profiler ({error}); a trace is an object "
            "with traceEvents, or an array of events"
        ) from None
    if not len(times) or categories.min() < 0 or categories.max() >= len(CATEGORIES):
        raise TraceError(
            f"{path}: no memory timeline of torch.profiler (no events, or categories that it does not have)"
        )
    order = np.argsort(times, kind="stable")
    times, changes, categories = times[order], changes[order], categories[order]
    held = np.cumsum(changes)
    # Within one moment a tensor may go and come again: what counts is what is held after it.
    last = np.append(times[1:] > times[:-1], True)
    at = int(np.flatnonzero(last)[np.argmax(held[last])])
    if held[at] <= 0:
        raise TraceError(f"{path}: no memory timeline of torch.profiler (it never holds anything)")
    sums = np.bincount(categories[: at + 1], weights=changes[: at + 1], minlength=len(CATEGORIES)).astype(np.int64)
    recorded = times[times >= 0]
    return MemoryTimelineFigures(
        events=len(times),
        peak_bytes=int(held[at]),
        peak_ns=max(0, int(times[at] - recorded[0])) if len(recorded) else 0,
        before_bytes=int(changes[times < 0].sum()),
        by_category={name: size for name, size in zip(CATEGORIES, sums.tolist()) if size},
    )
