"""The tests of GPUs, on a node of eight fake ones: in host compute those of values, in a dry run those of memory."""

import os
import subprocess
import sys

import pytest

from tests.fakecuda.fresh import needs_device

pytestmark = pytest.mark.processes

VALUES, OF_RANKS, MEMORY = (
    ["test_nccl.py", "test_streams.py"],
    ["test_failing_rank.py", "test_ranks.py"],
    ["test_memory.py"],
)


@pytest.mark.parametrize(
    ("mode", "files", "least"),
    [
        pytest.param("host", VALUES, 45, marks=pytest.mark.full),
        pytest.param("host", OF_RANKS, 15, marks=pytest.mark.full),
        pytest.param("dry", MEMORY, 3, marks=pytest.mark.full),
    ],
    ids=["values", "ranks", "memory"],
)
def test_tests_of_gpus_pass_on_fake_ones(mode: str, files: list[str], least: int) -> None:
    """``least`` is how many have to pass: one that does not see the device skips."""
    needs_device()
    asked = ["-q", "-m", "gpu", "-p", "no:cacheprovider", *(f"tests/gpu/{file}" for file in files)]
    command = [sys.executable, "-m", "tests.fakecuda.under", mode, *asked]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1]) if " passed" in done.stdout else 0
    assert done.returncode == 0, done.stdout[-4000:]
    assert passed >= least
