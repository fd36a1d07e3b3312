"""What retries of allocations are said to mean."""

from typing import Any

from refshard.measure.assemble import retry_warnings
from refshard.records import GpuMemory

NOTHING = dict.fromkeys(GpuMemory.__struct_fields__, 0)


def memory(**changes: Any) -> GpuMemory:
    return GpuMemory(**{**NOTHING, **changes})


def test_no_retries_are_no_warning() -> None:
    assert retry_warnings(()) == ()
    assert retry_warnings([memory(ooms=1), memory()]) == ()


def test_a_warning_says_how_many_on_which_ranks_and_what_to_do() -> None:
    assert retry_warnings([memory(), memory(retries=3), memory(retries=1)]) == (
        "GPU memory ran short 4 times during the measured steps (3 on rank 1, 1 on rank 2): the allocator then waits "
        "for the device, frees its cache and retries cudaMalloc, so steps stall; use less memory, or set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
    (once,) = retry_warnings([memory(retries=1)])
    assert once.startswith("GPU memory ran short 1 time during the measured steps (1 on rank 0): ")


def test_many_ranks_are_counted() -> None:
    (told,) = retry_warnings([memory(retries=2)] * 20)
    assert "ran short 40 times" in told
    assert "2 on rank 7, the others on 12 more)" in told
