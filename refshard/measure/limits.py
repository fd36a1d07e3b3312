"""A limit on the memory of one rank."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NO_ROOM_FOR_A_STACK = ("Resource temporarily unavailable", "can't start new thread")
"""What errors say if the limit leaves no room for the stack of a new thread."""


@contextmanager
def limited_memory(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Let allocations beyond the limit fail: on a GPU, those that torch's allocator reserves; on a CPU, those of the
    whole process (``RLIMIT_DATA``). A limit above the GPU's memory limits nothing.

    Raises:
        MemoryError: a thread could not be started under the limit.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        before, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, most))
        try:
            yield
        except RuntimeError as error:
            if any(sign in str(error) for sign in _NO_ROOM_FOR_A_STACK):
                raise MemoryError(f"no room for the stack of a thread ({error})") from error
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (before, most))
