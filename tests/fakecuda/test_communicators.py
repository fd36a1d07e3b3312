"""NCCL takes device memory for each communicator, once its group communicates."""

from typing import Any

import pytest

from tests.fakecuda.fresh import see

pytestmark = pytest.mark.processes

MIB, GIB = 1 << 20, 1 << 30


def test_each_communicator_takes_memory_of_the_gpu() -> None:
    device: dict[str, Any] = {
        "memory_bytes": GIB,
        "context_bytes": 100 * MIB,
        "communicator_bytes": (200 * MIB, 100 * MIB),
    }
    found = see("tests.fakecuda.communicator_checks", mode="dry", ranks=4, alone=True, **device)("taken")
    first = found["free"]["init"]
    taken = {what: first - free for what, free in found["free"].items()}
    assert taken == {
        "init": 0, "first all-reduce": 200, "another collective": 200, "another group": 200,
        "its first collective": 300, "a batch of messages": 300, "a message": 400, "gloo": 400, "a barrier": 500,
    }  # fmt: skip
    assert found["refused"].startswith(
        "CUDA out of memory. Tried to allocate 100.00 MiB for an NCCL communicator. GPU 0 has a total capacity of "
    )
