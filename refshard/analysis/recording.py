"""Recordings of a rank that trains: a Kineto trace, the operators of a step, and the memory of its allocator."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refshard.records import Census, GpuMemory

WARMUP_STEPS = 1
"""Steps that the profiler runs through before it records, since its own start costs time."""


@contextmanager
def capture_steps(path: Path, steps: int, *, all_threads: bool = False) -> Iterator[profile]:
    """Profile ``WARMUP_STEPS + steps`` training steps; the caller calls ``step()`` on what is yielded after each.

    ``all_threads`` records threads too that Python started. The trace of the last ``steps`` is written to ``path``
    (gzipped Chrome JSON, as ``.json.gz``) and is there when the context ends.
    """

    def write(profiler: profile) -> None:
        # torch picks gzip by the suffix; a torn file never stands under the final name.
        unfinished = path.with_name(f"unfinished-{path.name}")
        try:
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        finally:  # on a full disk it would take the room in which to say so
            unfinished.unlink(missing_ok=True)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True) if all_threads else None,
    ) as profiler:
        yield profiler


class _Watching(TorchDispatchMode):
    """A mode beneath which compiled functions run, which torch refuses to one that does not allow it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let them run."""
        return True


class OperatorCensus(_Watching):
    """Notes what runs inside. Each operator then takes some microseconds longer, so no time is taken there.

    In compiled code it sees only the operators that remain, mostly collectives and matrix products, and the call of the
    compiled code as a whole: fused code has no operator, and its buffers are allocated without one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[Any] = []
        self._allocations = self._allocated_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operators.append(func)
        held = _storages((args, kwargs))
        for storage, size in _storages(result).items():
            if storage not in held:
                self._allocations += 1
                self._allocated_bytes += size
        return result

    @property
    def operators(self) -> tuple[str, ...]:
        """Their names in the host's order, such as ``aten.mm.default``."""
        return tuple(map(str, self._operators))

    @property
    def census(self) -> Census:
        """What they come to."""
        order = hashlib.sha256("\n".join(self.operators).encode()).hexdigest()
        return Census(
            operators=len(self._operators), allocations=self._allocations, allocated_bytes=self._allocated_bytes,
            order_sha256=order,
        )  # fmt: skip


def _storages(nested: Any) -> dict[int, int]:
    """Size in bytes of each storage that plain tensors in ``nested`` lie in, by its address; empty ones have none.

    A tensor of another class (a DTensor, say) wraps plain ones, and has no memory of its own.
    """
    tensors = (leaf for leaf in tree_leaves(nested) if type(leaf) in (Tensor, Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


MOST_POINTS = 128
"""Most points of a course."""


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
        allocated_bytes=allocated, active_bytes=active, reserved_bytes=now["reserved_bytes.all.peak"],
        requested_bytes=requested, retries=now["num_alloc_retries"] - begun.get("num_alloc_retries", 0),
        ooms=now["num_ooms"] - begun.get("num_ooms", 0), used_bytes=total - free,
        outside_bytes=total - free - now["reserved_bytes.all.current"], total_bytes=total,
    )  # fmt: skip


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


class _Sampler(_Watching):
    """Reads the allocated bytes after every operator; in compiled code, after the operators that remain."""

    def __init__(self, allocated: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocated = allocated
        self.samples = [allocated()]

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
