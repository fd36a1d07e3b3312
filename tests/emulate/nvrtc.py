"""NVRTC and a driver for machines without a GPU: the one of the wheel, and one that runs kernels on the host."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

_DRIVER = Path(__file__).with_name("fake_driver.cpp")


def nvrtc_libraries() -> dict[str, Path]:
    """The wheel's libraries by name, without ``.so`` and what follows; skips where it is not installed."""
    try:
        files = distribution("nvidia-cuda-nvrtc").files or ()
    except PackageNotFoundError:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc (in refshard's extra 'test', on Linux)")
    return {file.name.partition(".so")[0]: Path(str(file.locate())) for file in files if ".so" in file.name}


def fake_driver(folder: Path) -> dict[str, str]:
    """Build the driver in ``folder``; returns the variables with which a process finds it, and NVRTC, by name."""
    libraries = nvrtc_libraries()
    (folder / "libnvrtc.so").symlink_to(libraries["libnvrtc"])
    builtins = libraries["libnvrtc-builtins"]
    (folder / builtins.name).symlink_to(builtins)
    compiler = os.environ.get("CXX", "g++")
    built = str(folder / "libcuda.so.1")
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", built, str(_DRIVER)], check=True)
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "FAKE_DRIVER_LOG": str(folder / "launches"),
    }
