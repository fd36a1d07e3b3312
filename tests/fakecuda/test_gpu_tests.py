"""The tests of a GPU (``tests/gpu``) that ask for streams or the allocator alone, on a fake one."""

import os
import subprocess
import sys

import pytest

from tests.fakecuda.fresh import needs_device

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("mode", "files", "least"),
    [
        ("host", ["test_streams.py"], 28),
        pytest.param("dry", ["test_memory.py", "test_predicted_memory.py"], 13, marks=pytest.mark.full),
    ],
    ids=["streams", "memory"],
)
def test_tests_of_a_gpu_pass_on_a_fake_one(mode: str, files: list[str], least: int) -> None:
    """``least`` is how many have to pass: one that does not see the device skips."""
    needs_device()
    asked = ["-q", "-m", "gpu", "-p", "no:cacheprovider", *(f"tests/gpu/{file}" for file in files)]
    command = [sys.executable, "-m", "tests.fakecuda.under", mode, *asked]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1]) if " passed" in done.stdout else 0
    assert done.returncode == 0, done.stdout[-4000:]
    assert passed >= least
