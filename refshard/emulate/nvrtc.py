"""CUDA C++ compiled by NVRTC, NVIDIA's compiler as a library, which torch's CUDA builds load.

Source without ``#include`` needs nothing else: no CUDA toolkit, and no ``CUDA_HOME``, without which
``torch.cuda._compile_kernel`` fails even for such source.
"""

import ctypes

from refshard.errors import RefshardError


def compile_cubin(library: ctypes.CDLL, source: str, capability: tuple[int, int]) -> bytes:
    """Compile ``source`` for GPUs of this compute capability.

    ``library`` is NVRTC. Returns a binary (ELF) with an entry for each ``extern "C" __global__`` function.

    Raises:
        RefshardError: NVRTC rejects the source or does not know the architecture. The message holds its log.
    """
    architecture = "sm_{}{}".format(*capability)
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if status := library.nvrtcCompileProgram(program, len(options), options):
            raise RefshardError(
                f"NVRTC {_version(library)} cannot compile for {architecture}: {_reason(library, status)}; if it does "
                "not know the architecture, install a torch built for a newer CUDA\n"
                f"{_read(library, 'ProgramLog', program).rstrip(bytes(1)).decode()}"
            )
        return _read(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """What ``nvrtcGet<what>`` gives: NVRTC tells the size first."""
    size = ctypes.c_size_t()
    _check(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, library[f"nvrtcGet{what}"](program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise RefshardError(f"NVRTC {_version(library)} fails: {_reason(library, status)}")


def _reason(library: ctypes.CDLL, status: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    reason: bytes = library.nvrtcGetErrorString(status)
    return reason.decode()


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"
