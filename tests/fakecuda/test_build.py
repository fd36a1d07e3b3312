"""The fake device's library is shared by all environments with the same torch, and by wheels."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from refshard.fakecuda.build import build_name, extension
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
ROOT = Path(__file__).parents[2]
LOADS = "from refshard.fakecuda.activate import load; print(load().PLACEHOLDER)"


def installed_torch() -> Path:
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return Path(torch.origin).parent


def run(code: str, *paths: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run it where nothing compiles."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "CXX": "there-is-no-such-compiler"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env | variables, cwd=paths[0], capture_output=True, text=True)


def test_another_environment_with_the_same_torch_shares_the_library(tmp_path: Path) -> None:
    """It must not hold the path of the torch that it was built with, which may be deleted."""
    dynamic = subprocess.run(["readelf", "-d", extension()], capture_output=True, text=True, check=True).stdout
    assert "libtorch_python.so" in dynamic
    assert "PATH)" not in dynamic
    (tmp_path / "torch").symlink_to(installed_torch())
    done = run(LOADS, tmp_path, ROOT)
    assert (done.returncode, done.stdout) == (0, "0.8125\n"), done.stderr


def test_another_build_of_the_same_version_of_torch_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "version.py"):
        (tmp_path / "torch" / name).write_text((installed_torch() / name).read_text().replace("git_version = '", "'"))
    done = run("from refshard.fakecuda.build import check; check()", tmp_path, ROOT)
    assert done.returncode == 1
    assert "building the fake CUDA device needs a C++ compiler" in done.stderr


def test_a_library_that_cannot_be_loaded_says_what_to_delete(tmp_path: Path) -> None:
    folder = tmp_path / "refshard" / "fakecuda" / build_name()
    folder.mkdir(parents=True)
    (folder / extension().name).write_bytes(b"of another system")
    done = run(LOADS, ROOT, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"delete {folder}, so that it is built again" in done.stderr


def built_wheel(folder: Path, **variables: str) -> tuple[Path, str]:
    """The wheel of this checkout, and what its build said."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("refshard-*.whl")
    return wheel, done.stdout + done.stderr


@pytest.mark.full
def test_a_wheel_holds_the_library(tmp_path: Path) -> None:
    extension()
    wheel, _ = built_wheel(tmp_path)
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    with ZipFile(wheel) as packed:
        assert f"refshard/fakecuda/built/{build_name()}/{extension().name}" in packed.namelist()
        packed.extractall(tmp_path / "site")
    done = run(LOADS, tmp_path / "site", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert (done.returncode, done.stdout) == (0, "0.8125\n"), done.stderr


@pytest.mark.full
def test_a_wheel_built_without_a_compiler_says_so(tmp_path: Path) -> None:
    wheel, said = built_wheel(tmp_path, CXX="there-is-no-such-compiler", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (
        "no fake CUDA device in this wheel, dry runs will build it: building the fake CUDA device needs a C++" in said
    )
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]
