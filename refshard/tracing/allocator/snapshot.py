"""What a CUDA memory snapshot tells: what is held and reserved, now and at the peak, by whom, and what is lost to
fragmentation.

The segments say what is there now, exactly. The history says what was asked for and given back before; what was there
when it began follows from what is there now. It has the sizes that were asked for, not those the allocator rounds to.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.tracing.allocator.snapshot_file import NO_SITE, AllocatorHistory, Block, MemorySnapshot, Segment, Site

_Rows = npt.NDArray[np.intp]
ALLOCATED, INACTIVE = "active_allocated", "inactive"
_TAKEN, _GIVEN_BACK = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_MOST = 100


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """Where reserved memory is, in bytes; all but ``largest_free_bytes`` add up to it.

    ``requested_bytes`` were asked for, and ``rounding_bytes`` added to that, in blocks that tensors use.
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
    """``blocks`` blocks of ``size`` bytes as they were asked for."""

    size: int
    blocks: int


class OomFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that failed: what was asked for, and what was there, in bytes. ``time_us`` is since 1970."""

    asked_bytes: int
    device_free_bytes: int
    requested_bytes: int
    reserved_bytes: int
    time_us: int | None
    site: Site | None


class HistoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded history of ``entries`` calls tells; sizes are those that were asked for.

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


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a snapshot. ``lines`` and ``sizes`` are of the history's peak, of now without a history; the
    largest first. Both add up to what is requested, unless there are more than a hundred.
    """

    device: int
    fragmentation: Fragmentation
    pools: tuple[PoolFigures, ...]
    history: HistoryFigures | None
    lines: tuple[LineFigures, ...]
    sizes: tuple[SizeFigures, ...]


def snapshot_figures(snapshot: MemorySnapshot) -> tuple[DeviceFigures, ...]:
    """The figures of each device that has segments or a history, by its number."""
    devices = sorted({segment.device for segment in snapshot.segments} | snapshot.histories.keys())
    return tuple(_device(snapshot, device) for device in devices)


def _device(snapshot: MemorySnapshot, device: int) -> DeviceFigures:
    mine = [place for place, segment in enumerate(snapshot.segments) if segment.device == device]
    segments = [snapshot.segments[place] for place in mine]
    now = _Now([(segment, snapshot.block_sites[place]) for segment, place in zip(segments, mine)])
    recorded = snapshot.histories.get(device)
    fragmentation = _fragmentation(segments)
    if recorded is None:
        history, held = None, list(zip(now.sizes.tolist(), now.sites.tolist()))
    else:
        history, held = _follow(recorded, now, fragmentation, snapshot.sites)
    return DeviceFigures(
        device=device,
        fragmentation=fragmentation,
        pools=_pools(segments),
        history=history,
        lines=_lines(held, snapshot.sites),
        sizes=tuple(
            SizeFigures(size=size, blocks=blocks)
            for size, blocks in sorted(Counter(n for n, _ in held).items(), key=lambda item: -item[0] * item[1])[:_MOST]
        ),
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


def _pools(segments: Sequence[Segment]) -> tuple[PoolFigures, ...]:
    groups: dict[tuple[str, bool, bool, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        private = any(segment.segment_pool_id)
        groups[segment.segment_type, segment.is_expandable, private, segment.stream].append(segment)
    found = [
        PoolFigures(
            kind=kind, expandable=expandable, private=private, stream=stream, segments=len(members),
            fragmentation=_fragmentation(members),
        )
        for (kind, expandable, private, stream), members in groups.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda pool: -pool.fragmentation.reserved_bytes))


class _Now:
    """The blocks that tensors use now, as columns of one length: their sizes as they were asked for. ``pending_bytes``
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


def _asked(block: Block) -> int:
    return block.size if block.requested_size is None else block.requested_size


def _lines(held: Iterable[tuple[int, int]], sites: Sequence[Site]) -> tuple[LineFigures, ...]:
    sizes, counts = Counter[int](), Counter[int]()
    for size, site in held:
        sizes[site] += size
        counts[site] += 1
    return tuple(
        LineFigures(site=None if site == NO_SITE else sites[site], bytes=size, blocks=counts[site])
        for site, size in sizes.most_common(_MOST)
    )


def _follow(
    history: AllocatorHistory, now: _Now, fragmentation: Fragmentation, sites: Sequence[Site]
) -> tuple[HistoryFigures, list[tuple[int, int]]]:
    """What the history tells, and size and line of each block that is held at its peak."""
    gone = _gone(history, now)
    used = _course(history, ("alloc",), ("free_requested",), int(now.sizes.sum()) + gone)
    at = int(np.argmax(used))
    reserved = _course(history, _TAKEN, _GIVEN_BACK, fragmentation.reserved_bytes)
    pending = _course(history, ("free_requested",), ("free_completed",), now.pending_bytes)
    made, early = _held(history, now, at)
    calls = np.flatnonzero(history.of("alloc"))
    late = np.arange(len(history.actions)) >= (calls[len(calls) // 2] if len(calls) else 0)
    taken, given_back = history.of(*_TAKEN), history.of(*_GIVEN_BACK)
    requested = int(used[at])
    figures = HistoryFigures(
        entries=len(history.actions),
        allocations=len(calls),
        peak_time_us=_time(history, at - 1),
        peak_after_entries=at,
        requested_bytes=requested,
        pending_bytes=int(pending[at]),
        reserved_bytes=int(reserved[at]),
        most_reserved_bytes=int(reserved.max()),
        early_bytes=requested - sum(size for size, _ in made),
        segments_taken=int(taken.sum()),
        segments_given_back=int(given_back.sum()),
        late_segments_taken=int((taken & late).sum()),
        late_segments_given_back=int((given_back & late).sum()),
        ooms=_ooms(history, used, reserved, sites),
        gone_bytes=gone,
    )
    unknown = figures.early_bytes - sum(size for size, _ in early)
    return figures, [*made, *early, *([(unknown, NO_SITE)] if unknown > 0 else [])]


def _gone(history: AllocatorHistory, now: _Now) -> int:
    """Bytes of blocks that the history leaves in use and that are not there now."""
    end = len(history.actions)
    rows = _made(history, end)
    return int(history.sizes[rows[~np.isin(history.addresses[rows], now.addresses)]].sum())


def _course(history: AllocatorHistory, more: Sequence[str], less: Sequence[str], last: int) -> npt.NDArray[np.int64]:
    """Bytes before the first entry and after each, where ``last`` are there after the last."""
    changes = np.where(history.of(*more), history.sizes, 0) - np.where(history.of(*less), history.sizes, 0)
    course = np.concatenate(([0], np.cumsum(changes)))
    return np.asarray(course - course[-1] + last)


def _held(history: AllocatorHistory, now: _Now, at: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Size and line of each block that is held after ``at`` entries: those made in the history, and earlier ones."""
    order, is_made, same = _by_address(history)
    alive = _made(history, at)
    made = list(zip(history.sizes[alive].tolist(), history.sites[alive].tolist()))
    # A block from before that is freed later: only where it was freed is known. Of one still there, where it was made.
    freed = order[~is_made & ~np.append(False, same & is_made[:-1])]
    early = [(size, NO_SITE) for size in history.sizes[freed[freed >= at]].tolist()]
    kept = ~np.isin(now.addresses, history.addresses[order[is_made]])
    early += list(zip(now.sizes[kept].tolist(), now.sites[kept].tolist()))
    return made, early


def _by_address(history: AllocatorHistory) -> tuple[_Rows, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Entries that take or free a block, by its address; which take it; and which have the address of the next one."""
    rows = np.flatnonzero(history.of("alloc", "free_requested"))
    order = rows[np.argsort(history.addresses[rows], kind="stable")]
    addresses = history.addresses[order]
    return order, history.of("alloc")[order], addresses[1:] == addresses[:-1]


def _made(history: AllocatorHistory, at: int) -> _Rows:
    """Entries that took the blocks of the history that are in use after ``at`` entries."""
    order, is_made, same = _by_address(history)
    never = len(history.actions)
    ends = np.where(np.append(same, False), np.append(order[1:], never), never)
    return order[is_made & (order < at) & (ends >= at)]


def _ooms(
    history: AllocatorHistory, used: npt.NDArray[np.int64], reserved: npt.NDArray[np.int64], sites: Sequence[Site]
) -> tuple[OomFigures, ...]:
    return tuple(
        OomFigures(
            asked_bytes=int(history.sizes[row]),
            device_free_bytes=int(history.addresses[row]),
            requested_bytes=int(used[row]),
            reserved_bytes=int(reserved[row]),
            time_us=_time(history, row),
            site=None if history.sites[row] == NO_SITE else sites[history.sites[row]],
        )
        for row in np.flatnonzero(history.of("oom")).tolist()
    )


def _time(history: AllocatorHistory, row: int) -> int | None:
    return int(history.times[row]) if row >= 0 and history.times[row] >= 0 else None
