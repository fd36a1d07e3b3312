"""What a GPU's memory holds in a window, on a device of 200 MiB of which the allocator may have 170."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from refshard.analysis.recording import GpuPeaks, gpu_memory
from refshard.analysis.snapshot import read_snapshot, snapshot_figures
from refshard.quantities import MIB
from refshard.records import GpuMemory
from tests.fakecuda.child import check

DEVICE = torch.device("cuda", 0)


def mebibytes(n: int, less: int = 0) -> torch.Tensor:
    return torch.empty(n * MIB - less, dtype=torch.uint8, device=DEVICE)


def fields(memory: GpuMemory | None) -> dict[str, Any]:
    assert memory is not None
    return msgspec.structs.asdict(memory)


@check
def kinds() -> dict[str, Any]:
    """12 MiB held before; in the window 24 MiB are kept, and 30 of which 100 bytes are not asked for come and go."""
    torch.cuda.empty_cache()
    base = mebibytes(12)
    peaks = GpuPeaks(DEVICE)
    kept = mebibytes(24)
    early = mebibytes(60)
    del early
    torch.cuda.empty_cache()
    with peaks.window():
        passing = mebibytes(30, less=100)
        del passing
    del base, kept
    return fields(peaks.memory)


@check
def freed_while_another_stream_uses_it() -> dict[str, Any]:
    """16 MiB stay active while 20 more are allocated."""
    torch.cuda.empty_cache()
    peaks = GpuPeaks(DEVICE)
    side = torch.cuda.Stream()
    with peaks.window():
        shared = mebibytes(16)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(100):
                shared.add_(1)
        shared.record_stream(side)
        del shared
        other = mebibytes(20)
    del other
    torch.cuda.synchronize()
    return fields(peaks.memory)


@check
def retries() -> dict[str, Any]:
    """One retry before the window and two in it, and one allocation for which there is no room at all."""
    torch.cuda.empty_cache()
    peaks = GpuPeaks(DEVICE)

    def retry() -> None:
        cached = mebibytes(100)
        del cached
        larger = mebibytes(150)
        del larger
        torch.cuda.empty_cache()

    retry()
    with peaks.window():
        retry()
        retry()
        with suppress(torch.OutOfMemoryError):
            mebibytes(190)
    return fields(peaks.memory)


@check
def now() -> dict[str, Any]:
    """Without a window: since the peaks were last reset, over nothing."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    held = mebibytes(26)
    found = gpu_memory(DEVICE)
    del held
    return fields(found)


@check
def on_a_cpu() -> bool:
    """Whether a window on a CPU finds nothing."""
    peaks = GpuPeaks(torch.device("cpu"))
    with peaks.window():
        pass
    return peaks.memory is None


@check
def snapshot() -> dict[str, Any]:
    """What the allocator counts, and what a snapshot of the same moment tells: odd sizes, a stream that still uses a
    block, free parts of segments in use, and a segment of which nothing is used.
    """
    torch.cuda.empty_cache()
    kept = [mebibytes(n, less=100 * n) for n in (3, 1, 7)]
    passing = [mebibytes(2, less=1), mebibytes(4), mebibytes(30)]
    small = [torch.empty(n, dtype=torch.uint8, device=DEVICE) for n in (100, 700, 5000)]
    side = torch.cuda.Stream()
    shared = mebibytes(5, less=3)
    with torch.cuda.stream(side):
        shared.add_(1)
        elsewhere = mebibytes(6)
    shared.record_stream(side)
    del shared
    passing.clear()
    del small[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        counted = torch.cuda.memory_stats(DEVICE)
        (found,) = snapshot_figures(read_snapshot(path))
    del kept, small, elsewhere
    now = found.fragmentation
    names = ("allocated", "active", "reserved", "inactive_split")
    told = (now.allocated_bytes, now.active_bytes, now.reserved_bytes, now.split_bytes)
    return {
        "counted": {name: counted[f"{name}_bytes.all.current"] for name in names},
        "told": dict(zip(names, told)),
        "requested": [counted["requested_bytes.all.current"], now.requested_bytes, now.rounding_bytes],
        "pending": now.pending_bytes,
        "unused": now.unused_bytes,
        "streams": len({pool.stream for pool in found.pools}),
        "kinds": sorted({pool.kind for pool in found.pools}),
        "history": found.history,
    }
