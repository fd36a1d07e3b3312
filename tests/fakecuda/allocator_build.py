"""Builds the simulated caching allocator alone, with g++ and the pybind11 that torch brings; torch is not loaded."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import refshard

NAME = "refshard_allocator"
SOURCES = Path(refshard.__file__).parent / "fakecuda" / "csrc"
PARTS = (
    "allocator_settings", "caching_allocator", "caching_allocator_device", "private_pools", "caching_allocator_binding",
)  # fmt: skip
MODULE = "".join(f'#include "{part}.cpp"\n' for part in PARTS) + (
    f"PYBIND11_MODULE({NAME}, m) {{ refshard::bind_caching_allocator(m); }}\n"
)
FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


@cache
def allocator_module() -> ModuleType:
    """The extension module, built on first use and kept by the hash of its sources; skips the tests without g++."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("the allocator's tests build it with g++, which is not installed (apt-get install g++)")
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    includes = [str(Path(torch.origin).parent / "include"), sysconfig.get_paths()["include"]]
    library = _cache_folder(includes) / f"{NAME}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers start together
        if not library.exists():
            _build(compiler, includes, library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache_folder(includes: list[str]) -> Path:
    digest = hashlib.sha256(repr((MODULE, FLAGS, includes)).encode())
    for path in [*sorted(SOURCES.glob("*alloc*")), SOURCES / "address_space.h", SOURCES / "private_pools.cpp"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "refshard" / "tests" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(compiler: str, includes: list[str], library: Path) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(MODULE)
    made = library.with_suffix(".tmp")
    paths = [f"-I{SOURCES}", *(f"-isystem{path}" for path in includes)]
    done = subprocess.run([compiler, *FLAGS, *paths, str(source), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made.replace(library)
