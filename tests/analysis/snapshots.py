"""CUDA memory snapshots made by hand: a small allocator that keeps its own account of what it should be found to hold.

Blocks are multiples of 512 bytes, in segments of 8 KiB or as large as one block, first fit; neighbours that are free
become one, as in torch's allocator.
"""

import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEGMENT, UNIT, BASE = 8192, 512, 1 << 40
CPP = {"filename": "/pytorch/c10/cuda/CUDACachingAllocator.cpp", "line": 0, "name": "malloc"}
TORCH = {"filename": "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 5, "name": "forward"}


def frames(line: int) -> list[dict[str, Any]]:
    """A stack, innermost first, whose first line outside of torch is ``train.py:line``."""
    user = {"filename": "/home/me/project/train.py", "line": line, "name": "step"}
    main = {"filename": "/home/me/project/main.py", "line": 1, "name": "<module>"}
    return [CPP, TORCH, user, main]


@dataclass
class Part:
    """A block: ``state`` as snapshots spell it."""

    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    line: int = 0


@dataclass
class Allocator:
    """Follows calls, and records them as torch does."""

    segments: dict[int, list[Part]] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[int, int, int, Counter[int]]] = field(default_factory=list)
    """Before any call and after each: bytes asked for in use, pending, reserved, and by line."""
    clock: int = 1_700_000_000_000_000
    taken: int = BASE

    def __post_init__(self) -> None:
        self._remember()

    def allocate(self, requested: int, line: int) -> Part:
        size = -(-requested // UNIT) * UNIT
        fitting = (p for parts in self.segments.values() for p in parts if p.state == "inactive" and p.size >= size)
        part = next(fitting, None)
        if part is None:
            total, address = max(SEGMENT, size), self.taken
            self.taken += 1 << 20
            part = Part(address, total)
            self.segments[address] = [part]
            self._record("segment_alloc", address, total, line)
        parts = next(parts for parts in self.segments.values() if part in parts)
        if part.size > size:
            parts.insert(parts.index(part) + 1, Part(part.address + size, part.size - size))
        part.size, part.requested, part.state, part.line = size, requested, "active_allocated", line
        self._record("alloc", part.address, requested, line)
        return part

    def free(self, part: Part, *, pending: bool = False) -> None:
        part.state = "active_pending_free"
        self._record("free_requested", part.address, part.requested, 90)
        if not pending:
            self.complete(part)

    def complete(self, part: Part) -> None:
        requested = part.requested
        part.state, part.requested, part.line = "inactive", 0, 0
        for parts in self.segments.values():
            place = 0
            while place + 1 < len(parts):
                if parts[place].state == parts[place + 1].state == "inactive":
                    parts[place].size += parts.pop(place + 1).size
                else:
                    place += 1
        self._record("free_completed", part.address, requested, 90)

    def empty_cache(self) -> None:
        for address, parts in list(self.segments.items()):
            if all(part.state == "inactive" for part in parts):
                del self.segments[address]
                self._record("segment_free", address, sum(part.size for part in parts), 91)

    def fail(self, asked: int, free: int, line: int) -> None:
        self._record("oom", free, asked, line, where="device_free")

    def snapshot(self, *, entries: int | None = None, device: int = 0) -> dict[str, Any]:
        """As ``torch.cuda.memory._snapshot()`` gives it, with no more than the last ``entries``."""
        kept = self.entries if entries is None else self.entries[len(self.entries) - min(entries, len(self.entries)) :]
        self.clock += 1
        mark = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": self.clock}
        traces: list[list[dict[str, Any]]] = [[] for _ in range(device + 1)]
        traces[device] = [*kept, mark] if kept else []
        return {
            "segments": [self._segment(address, parts, device) for address, parts in self.segments.items()],
            "device_traces": traces,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "roundup_power2_divisions": {"1": 0}},
        }

    def _segment(self, address: int, parts: list[Part], device: int) -> dict[str, Any]:
        active = [part for part in parts if part.state != "inactive"]
        return {
            "device": device, "address": address, "total_size": sum(part.size for part in parts), "stream": 0,
            "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "allocated_size": sum(part.size for part in parts if part.state == "active_allocated"),
            "active_size": sum(part.size for part in active), "requested_size": sum(part.requested for part in active),
            "blocks": [
                {"address": part.address, "size": part.size, "requested_size": part.requested, "state": part.state,
                 "frames": frames(part.line) if part.line else []}
                for part in parts
            ],
        }  # fmt: skip

    def _record(self, action: str, address: int, size: int, line: int, *, where: str = "addr") -> None:
        self.clock += 1
        entry = {"action": action, where: address, "size": size, "stream": 0, "time_us": self.clock}
        self.entries.append({**entry, "frames": frames(line)})
        self._remember()

    def _remember(self) -> None:
        parts = [part for parts in self.segments.values() for part in parts]
        used = [part for part in parts if part.state == "active_allocated"]
        by_line = Counter[int]()
        for part in used:
            by_line[part.line] += part.requested
        pending = sum(part.requested for part in parts if part.state == "active_pending_free")
        reserved = sum(part.size for part in parts)
        self.states.append((sum(part.requested for part in used), pending, reserved, by_line))


def write(path: Path, snapshot: Any) -> Path:
    """As ``torch.cuda.memory._dump_snapshot`` writes it."""
    path.write_bytes(pickle.dumps(snapshot))
    return path
