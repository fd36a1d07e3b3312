"""The kernels of an emulated collective, compiled by NVRTC for GPUs that are not here: it needs no GPU, no CUDA toolkit
and no environment variable.
"""

import ctypes
import os
import re

import pytest

from refshard.emulate.kernels import HOLD, SOURCE, START
from refshard.emulate.nvrtc import compile_cubin
from refshard.errors import RefshardError
from tests.emulate.nvrtc import nvrtc_libraries

A100, H100, B200 = (8, 0), (9, 0), (10, 0)
_CUDA = 190
"""ELF's number for NVIDIA's GPUs (EM_CUDA)."""


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    """The library of the wheel, after what it opens by name, as a CUDA build of torch loads them on import."""
    libraries = nvrtc_libraries()
    ctypes.CDLL(str(libraries["libnvrtc-builtins"]))
    return ctypes.CDLL(str(libraries["libnvrtc"]))


@pytest.mark.parametrize("capability", [A100, H100, B200])
def test_both_kernels_compile_for_every_generation(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> None:
    cubin = compile_cubin(nvrtc, SOURCE, capability)
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == _CUDA
    entries = {name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)}
    assert entries == {START, HOLD}


def test_nothing_is_asked_of_the_environment(nvrtc: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose torch came by pip, without CUDA's toolkit; ``torch.cuda._compile_kernel`` fails there."""
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert compile_cubin(nvrtc, SOURCE, H100)
    assert dict(os.environ) == before


def test_a_kernel_that_is_wrong_is_refused_with_the_compilers_log(nvrtc: ctypes.CDLL) -> None:
    broken = SOURCE.replace("__nanosleep(100)", "__nanosloop(100)")
    with pytest.raises(RefshardError, match=r"cannot compile for sm_90: NVRTC_ERROR_COMPILATION") as raised:
        compile_cubin(nvrtc, broken, H100)
    assert 'identifier "__nanosloop" is undefined' in str(raised.value)
    line = broken.splitlines().index(next(line for line in broken.splitlines() if "__nanosloop" in line)) + 1
    assert f"source.cu({line})" in str(raised.value)


def test_an_architecture_that_the_compiler_does_not_know_is_named(nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(RefshardError, match=r"NVRTC \d+\.\d+ cannot compile for sm_990: .*INVALID_OPTION"):
        compile_cubin(nvrtc, SOURCE, (99, 0))
