"""A trace of inference made by hand: batches in annotations, and no ProfilerStep."""

from pathlib import Path
from typing import Any

from tests.analysis.handmade import event, note, write


def batch(name: str, start: float, end: float, *, tid: int = 1) -> dict[str, Any]:
    return note(name, start, end - start, tid=tid)


def kernel(number: int, launch: float, start: float, end: float, name: str = "gemm", stream: int = 7) -> list[Any]:
    """A launch of 1 us, and the kernel that it launches."""
    return [
        event("cudaLaunchKernel", launch, 1, cat="cuda_runtime", correlation=number),
        event(name, start, end - start, cat="kernel", tid=stream, correlation=number, device=0, stream=stream),
    ]


def inference(path: Path) -> Path:
    """A prefill and two decodes, with a kernel between the windows, which belongs to none.

    On the device: the prefill from 10 (announced, nothing runs) to 60, with 10 of communication exposed; the sampling
    from 62 to 66; a decode announced at 50 from 66 (when the device is free) to 76, 6 of it compute; another one from
    100 (announced late) to 110, 5 of it compute.
    """
    events = [
        batch("step[EXTEND bs=2 toks=900]", 10, 40), *kernel(1, 12, 20, 50),
        *kernel(2, 14, 50, 60, name="ncclDevKernel_AllReduce_Sum_f16_RING_LL()", stream=20),
        *kernel(3, 44, 62, 66, name="sample"), batch("step[DECODE bs=8]", 50, 60), *kernel(4, 52, 70, 76),
        batch("step[DECODE bs=9]", 100, 112), *kernel(5, 103, 105, 110),
    ]  # fmt: skip
    return write(path, events)
