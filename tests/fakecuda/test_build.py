"""The fake device's library is kept where only the environment that built it looks for it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from refshard.fakecuda.build import extension
from tests.fakecuda.needs import needs_device

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@needs_device
def test_another_installation_of_the_same_torch_builds_its_own(tmp_path: Path) -> None:
    """The library has the path of torch's libraries: it must not outlive the torch that it was built against."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (tmp_path / "torch").symlink_to(Path(torch.origin).parent)
    extension()
    own = checked(ROOT)
    other = checked(tmp_path, ROOT)
    assert own.returncode == 0, own.stderr
    assert other.returncode == 1
    assert "building the fake CUDA device needs a C++ compiler" in other.stderr


def checked(*paths: Path) -> "subprocess.CompletedProcess[str]":
    """Whether the device is there or could be built, where nothing compiles."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "CXX": "there-is-no-such-compiler"}
    code = "from refshard.fakecuda.build import check; check()"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
