"""What a GPU's memory holds in a window, on a device of 200 MiB of which the allocator may have 170."""

from contextlib import suppress
from typing import Any

import msgspec
import torch

from refshard.quantities import MIB
from refshard.records import GpuMemory
from refshard.tracing.memory import GpuPeaks, gpu_memory
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
