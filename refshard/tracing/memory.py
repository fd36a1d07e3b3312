"""What a process's allocator holds within a step: its peak, and on a CPU its course.

On CUDA the caching allocator keeps the count. On a CPU no allocator of torch does: the profiler's memory events follow
each thread's own view, and miss what gloo's threads free. So the C library is asked how much it has handed out, after
every operator of one step that is not timed.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST_POINTS = 128
"""Of a course."""


class AllocatorPeak:
    """Allocated bytes of a window, over what was allocated when this object was made.

    Make it before the model is built. ``peak_bytes`` is None where the C library does not tell (glibc 2.33 or newer
    does), and before a window. ``course_bytes`` has the highest within each of up to :data:`MOST_POINTS` stretches of
    as many operators each, in their order; it is empty on CUDA, where nothing watches operators.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = _allocated_bytes()
        self._base = self._allocated() if self._allocated else 0
        self.peak_bytes: int | None = None
        self.course_bytes: tuple[int, ...] = ()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Watch what runs inside; on a CPU each operator then takes some microseconds longer."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._allocated is None:
            yield
        else:
            with _Sampler(self._allocated) as sampler:
                yield
            self.peak_bytes = max(sampler.samples) - self._base
            self.course_bytes = tuple(highest - self._base for highest in highest_of(sampler.samples))


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
