"""What a process's allocator holds: on a CPU within one step, on a GPU over a window of steps.

On CUDA the caching allocator keeps the count by itself, at no cost. On a CPU no allocator of torch does: the profiler's
memory events follow each thread's own view, and miss what gloo's threads free. So the C library is asked how much it
has handed out, after every operator of one step that is not timed.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.records import GpuMemory

MOST_POINTS = 128
"""Of a course."""


class AllocatorPeak:
    """Bytes that the C library has handed out in a window, over what it had when this object was made.

    Make it before the model is built. ``peak_bytes`` is None where the C library does not tell (glibc 2.33 or newer
    does), and before a window. ``course_bytes`` has the highest within each of up to :data:`MOST_POINTS` stretches of
    as many operators each, in their order.
    """

    def __init__(self) -> None:
        self._allocated = _allocated_bytes()
        self._base = self._allocated() if self._allocated else 0
        self.peak_bytes: int | None = None
        self.course_bytes: tuple[int, ...] = ()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Watch what runs inside; each operator then takes some microseconds longer."""
        if self._allocated is None:
            yield
            return
        with _Sampler(self._allocated) as sampler:
            yield
        self.peak_bytes = max(sampler.samples) - self._base
        self.course_bytes = tuple(highest - self._base for highest in highest_of(sampler.samples))


class GpuPeaks:
    """Memory of a GPU in a window, over what its caching allocator held when this object was made.

    Make it before the model is built. ``memory`` is None before a window, and on a CPU, where nothing is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = _statistics(device)
        self.memory: GpuMemory | None = None

    @contextmanager
    def window(self) -> Iterator[None]:
        """Forget the peaks so far, and read them again when the window ends."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        begun = _statistics(self._device)
        yield
        self.memory = gpu_memory(self._device, base=self._base, begun=begun)


def gpu_memory(
    device: torch.device, *, base: Mapping[str, int] | None = None, begun: Mapping[str, int] | None = None
) -> GpuMemory:
    """What a GPU's memory holds now, and its peaks since they were last reset.

    Args:
        device: a CUDA device.
        base: ``torch.cuda.memory_stats`` of before; what it held then is subtracted from the peaks, except from what is
            reserved.
        begun: the same of when the peaks were reset; retries and failures are counted from there.
    """
    now, base, begun = _statistics(device), base or {}, begun or {}
    free, total = torch.cuda.mem_get_info(device)
    allocated, active, requested = (
        now[f"{kind}_bytes.all.peak"] - base.get(f"{kind}_bytes.all.current", 0)
        for kind in ("allocated", "active", "requested")
    )
    return GpuMemory(
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=now["reserved_bytes.all.peak"],
        requested_bytes=requested,
        retries=now["num_alloc_retries"] - begun.get("num_alloc_retries", 0),
        ooms=now["num_ooms"] - begun.get("num_ooms", 0),
        used_bytes=total - free,
        outside_bytes=total - free - now["reserved_bytes.all.current"],
        total_bytes=total,
    )


def _statistics(device: torch.device) -> dict[str, int]:
    """The caching allocator's; empty on a CPU, and before CUDA is initialised."""
    return dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}


def highest_of(samples: Sequence[int]) -> tuple[int, ...]:
    """The highest of each of up to :data:`MOST_POINTS` stretches, which differ in length by one sample at most.

    >>> highest_of([1, 5, 2])
    (1, 5, 2)
    """
    count = min(len(samples), MOST_POINTS)
    bounds = [place * len(samples) // count for place in range(count + 1)] if count else []
    return tuple(max(samples[start:end]) for start, end in pairwise(bounds))


class _Sampler(TorchDispatchMode):
    """Asks for the allocated bytes after every operator; within what is compiled, after those that remain there."""

    supports_higher_order_operators = True

    def __init__(self, allocated: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocated = allocated
        self.samples = [allocated()]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run: torch refuses to beneath a mode that does not allow it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.samples.append(self._allocated())
        return result


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (mallinfo(3)); ``uordblks`` bytes in use in arenas, ``hblkhd`` in mappings."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _allocated_bytes() -> Callable[[], int] | None:
    """A function that gives the bytes handed out by the C library over all its arenas, or None without one."""
    query = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if query is None:
        return None
    query.restype = _Mallinfo2

    def allocated() -> int:
        info = query()
        return int(info.uordblks + info.hblkhd)

    return allocated
