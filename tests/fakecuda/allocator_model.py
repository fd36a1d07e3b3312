"""torch 2.13's caching allocator, written a second time: naively, by rules over one list of blocks.

Nothing is indexed and nothing is counted as it goes: every search is a scan, and after each elementary step all
statistics are summed anew over all blocks. Sizes are bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fakecuda.allocator_programs import MIB, NO_LIMIT, ModelSettings

COUNTED = ("allocation", "segment", "active", "inactive_split")
SUMMED = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
OVERSIZE = ("oversize_allocations", "oversize_segments")
POOLS = ("all", "small_pool", "large_pool")


class ModelOutOfMemoryError(Exception):
    """The device has no room for what was asked."""


@dataclass(eq=False)
class ModelSegment:
    """Memory of one ``cudaMalloc``, or a range of addresses to which pages are mapped."""

    serial: int
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool

    def page(self, settings: ModelSettings) -> int:
        return 2 * MIB if self.small else settings.large_segment


@dataclass(eq=False)
class ModelBlock:
    """A part of a segment; ``state`` is free, held, pending, unmapped or chosen (on its way from free to held)."""

    segment: ModelSegment
    address: int
    size: int
    state: str
    requested: int = 0
    name: int = 0
    streams: set[int] = field(default_factory=set)
    since: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def whole(self) -> bool:
        return self.size == self.segment.size


class ModelAllocator:
    """The same calls as the real one; ``position`` and ``passed`` say how far streams are, ``synchronise`` waits."""

    def __init__(
        self, base: int, capacity: int, total: int, settings: ModelSettings,
        position: Callable[[int], int], passed: Callable[[int, int], bool], synchronise: Callable[[], None],
    ) -> None:  # fmt: skip
        self.base, self.capacity, self.total, self.settings = base, capacity, total, settings
        self.limit = int(settings.fraction * total) if settings.fraction < 1 else None
        self.position, self.passed, self.synchronise = position, passed, synchronise
        self.blocks: list[ModelBlock] = []
        self.waits: list[tuple[int, int, ModelBlock]] = []
        self.names = self.serials = 0
        self.searches = {True: 0, False: 0}
        self.calls = dict.fromkeys(
            ("num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams", "num_device_alloc",
             "num_device_free"), 0)  # fmt: skip
        self.stats: dict[tuple[str, str], dict[str, int]] = {}
        self.observe()

    # What the program asks.

    def allocate(self, size: int, stream: int) -> tuple[int, int, int]:
        self.end_waits(self.passed)
        rounded = self.rounded(size)
        block = self.search(rounded, stream) or self.from_device(rounded, size, stream)
        if block is None:
            self.calls["num_ooms"] += 1
            raise ModelOutOfMemoryError(f"Tried to allocate {self.segment_size(rounded)}")
        rest = block.size - rounded
        eager = block.segment.small or self.settings.expandable
        if rest >= 512 if eager else (rounded < self.settings.max_split and rest > MIB):
            self.cut(block, rounded).state = "free"
        self.names += 1
        block.state, block.requested, block.name = "held", size, self.names
        self.observe()
        return block.address, block.size, block.name

    def free(self, address: int) -> int:
        block = self.held(address)
        block.state = "pending"
        self.waits += [(stream, self.position(stream), block) for stream in block.streams]
        name = block.name
        if not block.streams:
            self.to_pool(block)
        block.streams = set()
        self.observe()
        return name

    def record_stream(self, address: int, stream: int) -> None:
        block = self.held(address)
        block.streams |= {stream} - {block.segment.stream}

    def empty_cache(self) -> None:
        self.calls["num_sync_all_streams"] += 1
        if self.waits:
            self.synchronise()
        self.end_waits(lambda stream, ticket: True)  # noqa: ARG005
        for block in [block for block in self.blocks if block.state == "free"]:
            if block.segment.expandable:
                self.unmap(block)
            elif block.whole:
                self.release(block)

    def held(self, address: int) -> ModelBlock:
        return next(block for block in self.blocks if block.state == "held" and block.address == address)

    # Sizes.

    def rounded(self, size: int) -> int:
        parts = self.settings.divisions
        if parts > 1 and size > 512 * parts:
            power = 1 << (size.bit_length() - 1)
            steps = [power + power * part // parts for part in range(parts + 1)]
            return next(step for step in steps if step >= size)
        return max(512, -(-size // 512) * 512)

    def segment_size(self, rounded: int) -> int:
        if rounded <= MIB:
            return 2 * MIB
        return self.settings.large_segment if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB

    @property
    def reserved(self) -> int:
        return sum(block.size for block in self.blocks if block.state != "unmapped")

    # Free blocks.

    def pool(self, small: bool, stream: int, state: str) -> list[ModelBlock]:
        found = [b for b in self.blocks if b.state == state and b.segment.small == small and b.segment.stream == stream]
        return sorted(found, key=lambda block: (block.size, block.segment.serial, block.address))

    def search(self, rounded: int, stream: int) -> ModelBlock | None:
        small = rounded <= MIB
        if self.limit is not None and self.settings.threshold:
            self.searches[small] += 1
        found = [block for block in self.pool(small, stream, "free") if block.size >= rounded]
        if not found:
            return None
        best = found[0]
        for other in found[1:] if self.settings.expandable else []:
            if self.room(other) >= self.room(best):
                break
            best = other
        if (best.size >= self.settings.max_split) > (rounded >= self.settings.max_split):
            return None
        if rounded >= self.settings.max_split and best.size >= rounded + self.settings.max_rounding:
            return None
        best.state = "chosen"
        return best

    def room(self, block: ModelBlock) -> int:
        """The block's size with the addresses behind it that it could grow into."""
        behind = [b.size for b in self.blocks if b.state == "unmapped" and b.address == block.end and same(b, block)]
        return block.size + sum(behind)

    def to_pool(self, block: ModelBlock) -> None:
        block.state = "free"
        self.join(block)
        self.observe()

    def join(self, block: ModelBlock) -> ModelBlock:
        """Unite equal neighbours around a block; what results counts as new in the pool."""
        for other in [other for other in self.blocks if same(other, block) and other.state == block.state]:
            if other.end == block.address or block.end == other.address:
                block.address = min(block.address, other.address)
                block.size += other.size
                self.blocks.remove(other)
        block.since = self.searches[block.segment.small]
        return block

    def cut(self, block: ModelBlock, size: int) -> ModelBlock:
        rest = ModelBlock(block.segment, block.address + size, block.size - size, block.state)
        rest.since = self.searches[block.segment.small]
        block.size = size
        self.blocks.append(rest)
        return rest

    def end_waits(self, passed: Callable[[int, int], bool]) -> None:
        for wait in sorted(self.waits, key=lambda wait: wait[0]):  # stable: within a stream as they were freed
            stream, ticket, block = wait
            if passed(stream, ticket):
                self.waits.remove(wait)
                if not any(other is block for _, _, other in self.waits):
                    self.to_pool(block)

    # The device's memory.

    def from_device(self, rounded: int, size: int, stream: int) -> ModelBlock | None:
        def grow() -> ModelBlock | None:
            return self.grow(rounded, size, stream)

        if self.limit is not None and self.settings.threshold:
            self.collect_garbage(int(self.settings.threshold * self.limit))
        if block := grow():
            return block
        if self.release_oversize(rounded, stream) and (block := grow()):
            return block
        self.empty_cache()
        self.calls["num_alloc_retries"] += 1
        return grow()

    def grow(self, rounded: int, size: int, stream: int) -> ModelBlock | None:
        wanted = self.reserved + self.segment_size(rounded)
        if self.limit is not None and wanted > self.limit:
            return None
        if self.settings.rejects and wanted > self.settings.fraction * self.total:
            self.calls["num_oom_rejections"] += 1
            raise ModelOutOfMemoryError(f"Requested size: {size}")
        if self.settings.expandable:
            return self.grow_expandable(rounded, stream)
        if wanted > self.capacity:
            return None
        block = self.new_segment(self.segment_size(rounded), rounded <= MIB, stream, expandable=False)
        self.calls["num_device_alloc"] += 1
        self.observe()
        return block

    def grow_expandable(self, rounded: int, stream: int) -> ModelBlock | None:
        block = self.place(rounded, stream)
        while block.state == "unmapped" or block.size < rounded:
            hole, have = block, 0
            if block.state == "free":
                hole, have = next(b for b in self.blocks if same(b, block) and b.address == block.end), block.size
            page = hole.segment.page(self.settings)
            size = -(-min(rounded - have, hole.size) // page) * page
            if self.reserved + size > self.capacity:
                return None
            if size < hole.size:
                self.cut(hole, size)
            hole.state = "free"
            block = self.join(hole)
            self.calls["num_device_alloc"] += 1
            self.observe()
        block.state = "chosen"
        return block

    def place(self, rounded: int, stream: int) -> ModelBlock:
        """The lowest stretch of free and unmapped blocks that is long enough and has an unmapped one at its begin."""
        small = rounded <= MIB
        for hole in sorted(self.pool(small, stream, "unmapped"), key=lambda block: block.address):
            run = [hole]
            for block in sorted((b for b in self.blocks if same(b, hole)), key=lambda block: block.address):
                if block.state in ("free", "unmapped") and block.address == run[-1].end:
                    run.append(block)
            before = [b for b in self.blocks if same(b, hole) and b.end == hole.address and b.state == "free"]
            run = before + run
            if sum(block.size for block in run) >= rounded:
                return run[0]
        page = 2 * MIB if small else self.settings.large_segment
        return self.new_segment(-(-self.total * 9 // 8 // page) * page, small, stream, expandable=True)

    def new_segment(self, size: int, small: bool, stream: int, *, expandable: bool) -> ModelBlock:
        self.serials += 1
        address = next(address for address in self.starts() if self.is_unused(address, size))
        segment = ModelSegment(self.serials, address, size, stream, small, expandable)
        block = ModelBlock(segment, address, size, "unmapped" if expandable else "chosen")
        self.blocks.append(block)
        return block

    def starts(self) -> Iterator[int]:
        ends = {block.segment.address + block.segment.size for block in self.blocks}
        yield from sorted({self.base} | {-(-end // (2 * MIB)) * 2 * MIB for end in ends})

    def is_unused(self, address: int, size: int) -> bool:
        segments = {block.segment for block in self.blocks}
        return all(address + size <= s.address or s.address + s.size <= address for s in segments)

    def release(self, block: ModelBlock) -> None:
        self.synchronise()
        self.blocks.remove(block)
        self.calls["num_device_free"] += 1
        self.observe()

    def unmap(self, block: ModelBlock) -> None:
        page = block.segment.page(self.settings)
        offset = block.address - block.segment.address
        begin, end = -(-offset // page) * page, (offset + block.size) // page * page
        if begin >= end:
            return
        self.synchronise()
        if begin > offset:
            block = self.cut(block, begin - offset)
        if block.size > end - begin:
            self.cut(block, end - begin)
        block.state = "unmapped"
        self.join(block)
        if block.whole:
            self.blocks.remove(block)
        self.calls["num_device_free"] += 1
        self.observe()

    def collect_garbage(self, threshold: int) -> None:
        target = self.reserved - threshold
        while target > 0:
            idle = [b for b in self.blocks if b.state == "free" and not b.segment.small and b.whole]
            ages = [self.searches[False] - block.since for block in idle]
            aged = [b for b, age in zip(idle, ages) if age * len(ages) >= sum(ages) and not b.segment.expandable]
            if not aged:
                return
            for block in aged:
                target -= block.size
                self.release(block)

    def release_oversize(self, rounded: int, stream: int) -> bool:
        least = self.settings.max_split
        wanted = max(rounded, least)
        if least == NO_LIMIT:
            return False
        pool = [b for b in self.pool(rounded <= MIB, stream, "free") if b.size >= least]
        large_enough = [block for block in pool if block.size >= wanted]
        if large_enough and not large_enough[0].segment.expandable:
            self.release(large_enough[0])
            return True
        smaller = [b for b in pool if b.size < wanted and not b.segment.expandable]
        for block in reversed(smaller):
            if wanted > 0:
                wanted -= block.size
                self.release(block)
        return wanted <= 0

    # Statistics.

    def observe(self) -> None:
        for (name, pool), value in self.totals().items():
            stat = self.stats.setdefault((name, pool), dict.fromkeys(("current", "peak", "allocated", "freed"), 0))
            stat["allocated"] += max(value - stat["current"], 0)
            stat["freed"] += max(stat["current"] - value, 0)
            stat["current"] = value
            stat["peak"] = max(stat["peak"], value)

    def totals(self) -> dict[tuple[str, str], int]:
        least = self.settings.max_split
        totals = dict.fromkeys(((name, pool) for name in (*COUNTED, *SUMMED) for pool in POOLS), 0)
        totals |= {(name, ""): 0 for name in OVERSIZE}
        for block in self.blocks:
            for pool in ("all", "small_pool" if block.segment.small else "large_pool"):
                for name, amount in counts(block).items():
                    totals[name, pool] += amount
            totals["oversize_allocations", ""] += block.state == "held" and block.size >= least
        segments = {block.segment for block in self.blocks if not block.segment.expandable}
        totals["oversize_segments", ""] = sum(segment.size >= least for segment in segments)
        for segment in segments:
            for pool in ("all", "small_pool" if segment.small else "large_pool"):
                totals["segment", pool] += 1
        return totals

    def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: {pool: self.stats[name, pool] for pool in POOLS} for name in (*COUNTED, *SUMMED)}
        return found | {name: self.stats[name, ""] for name in OVERSIZE} | self.calls

    def layout(self) -> list[tuple[int, int, str, int]]:
        """Each block that has memory: its address, size, state and the bytes that were asked for."""
        names = {"free": "inactive", "held": "active_allocated", "pending": "active_pending_free"}
        mapped = sorted((b for b in self.blocks if b.state != "unmapped"), key=lambda block: block.address)
        return [(b.address, b.size, names[b.state], b.requested if b.state != "free" else 0) for b in mapped]


def same(block: ModelBlock, other: ModelBlock) -> bool:
    """Whether these are two blocks of one segment."""
    return block is not other and block.segment is other.segment


def counts(block: ModelBlock) -> dict[str, int]:
    """What one block adds to the statistics of its pool."""
    held, active = block.state == "held", block.state in ("held", "pending")
    stuck = block.state == "free" and not block.whole and not block.segment.expandable
    mapped = block.state != "unmapped"
    return {
        "allocation": held, "allocated_bytes": held * block.size, "active": active, "active_bytes": active * block.size,
        "inactive_split": stuck, "inactive_split_bytes": stuck * block.size, "reserved_bytes": mapped * block.size,
        "requested_bytes": active * block.requested,
    }  # fmt: skip
