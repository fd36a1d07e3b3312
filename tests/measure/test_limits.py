"""Limits on memory. The process and its limit are real."""

import resource
from pathlib import Path

import pytest
import torch

from refshard.measure.rank import limited_memory
from refshard.quantities import GIB

CPU = torch.device("cpu")


def data_bytes() -> int:
    """What counts toward the limit now."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def test_an_allocation_beyond_the_limit_fails_until_it_is_lifted() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(data_bytes() + GIB // 4, CPU):
        torch.empty(GIB // 8, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(GIB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(GIB, dtype=torch.uint8)


def test_a_thread_that_cannot_start_is_a_want_of_memory_only_under_a_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    says = r"no room for the stack of a thread \(can't start new thread\)"
    with pytest.raises(MemoryError, match=says), limited_memory(data_bytes() + GIB, CPU):
        raise RuntimeError("can't start new thread")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(RuntimeError, match="can't start new thread"), limited_memory(None, CPU):
        raise RuntimeError("can't start new thread")
