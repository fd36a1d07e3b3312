"""Warnings about the GPUs' memory during the measured steps."""

from collections.abc import Sequence

from refshard.records import GpuMemory

_MOST_RANKS = 8
"""A warning lists at most this many."""


def retry_warnings(ranks: Sequence[GpuMemory]) -> tuple[str, ...]:
    """In words, how many allocations of which ranks were retried; empty if none was."""
    retried = {rank: memory.retries for rank, memory in enumerate(ranks) if memory.retries}
    if not retried:
        return ()
    total = sum(retried.values())
    times = "time" if total == 1 else "times"
    listed = [f"{count} on rank {rank}" for rank, count in list(retried.items())[:_MOST_RANKS]]
    if len(retried) > _MOST_RANKS:
        listed.append(f"the others on {len(retried) - _MOST_RANKS} more")
    return (
        f"GPU memory ran short {total} {times} during the measured steps ({', '.join(listed)}): "
        "the allocator then waits for the device, frees its cache and retries cudaMalloc, so steps stall; use less "
        "memory, or set PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
