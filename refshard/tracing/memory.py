"""Peak of what a process's allocator holds within a step.

On CUDA the caching allocator keeps the count. On a CPU no allocator of torch does: the profiler's memory events follow
each thread's own view, and miss what gloo's threads free. So the C library is asked how much it has handed out, after
every operator of one step that is not timed.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AllocatorPeak:
    """Peak allocated bytes of a window, over what was allocated when this object was made.

    Make it before the model is built. ``peak_bytes`` is None where the C library does not tell (glibc 2.33 or newer
    does), and before a window.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = _allocated_bytes()
        self._base = self._allocated() if self._allocated else 0
        self.peak_bytes: int | None = None

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
            self.peak_bytes = sampler.peak - self._base


class _Sampler(TorchDispatchMode):
    """Asks for the allocated bytes after every operator."""

    def __init__(self, allocated: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocated = allocated
        self.peak = allocated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self._allocated())
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
