"""What a GPU runs at the start and at the end of an emulated collective: two CUDA kernels.

The first takes the link and writes down when the collective ends; the second holds multiprocessors until then. They
read ``%globaltimer``, so they need NVIDIA's hardware.
"""

import ctypes
from typing import Any

import torch

from refshard.emulate.nvrtc import compile_cubin
from refshard.errors import RefshardError, UnsupportedError

TICK_NS = 10
"""Unit of the kernels' durations."""
START, HOLD = "refshard_emulated_start", "refshard_emulated_hold"
"""The entries of :data:`SOURCE`. Figures of traces take kernels with such names for communication."""
SOURCE = (
    f"#define TICK_NS {TICK_NS}ull"
    """
__device__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

extern "C" __global__ void refshard_emulated_start(
    unsigned long long* free_at, unsigned long long* end, int link, int transfer, int latency) {
  unsigned long long seen, sent;
  do {
    seen = *(volatile unsigned long long*)(free_at + link);
    unsigned long long at = now();
    sent = (seen > at ? seen : at) + TICK_NS * transfer;
  } while (atomicCAS(free_at + link, seen, sent) != seen);
  *end = sent + TICK_NS * latency;
}

extern "C" __global__ void refshard_emulated_hold(const unsigned long long* end, unsigned long long* counts) {
  if (threadIdx.x == 0) {
    unsigned long long at = now();
    if (blockIdx.x == 0) {
      atomicAdd(counts, 1ull);
      if (at > *end) {
        atomicAdd(counts + 1, 1ull);
        atomicAdd(counts + 2, at - *end);
      }
    }
    while (now() < *end) __nanosleep(100);
  }
  __syncthreads();
}
"""
)
"""It includes nothing, so NVRTC needs no folder of headers."""
_THREADS = 512
"""Threads of a block that holds a multiprocessor, as many as NCCL's blocks have."""


class Kernels:
    """:data:`SOURCE`, compiled for ``device`` by the NVRTC that torch has loaded.

    Each method launches one kernel on the current stream and does not wait for it.

    Raises:
        UnsupportedError: the GPU is not NVIDIA's.
        RefshardError: there is no NVRTC, or it cannot compile for this GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.version.hip:
            raise UnsupportedError(
                "emulated cases run on NVIDIA's GPUs, since their kernels read %globaltimer; this torch is built for "
                f'ROCm {torch.version.hip}: set device = "cpu"'
            )
        cubin = compile_cubin(_nvrtc(), SOURCE, torch.cuda.get_device_capability(device))
        with torch.cuda.device(device):
            loaded: Any = torch.cuda._utils._cuda_load_module(cubin, [START, HOLD])
        self._start, self._hold = loaded[START], loaded[HOLD]

    def start(self, free_at: torch.Tensor, end: torch.Tensor, link: int, transfer: int, latency: int) -> None:
        """Take ``link`` as soon as it is free, for ``transfer`` ticks, and write to ``end`` when the collective ends.

        ``free_at``, int64 (links), holds when each link is free; ``end`` is int64 (1). Both are ns of the GPU's clock.
        The collective ends ``latency`` ticks after the link is given up.
        """
        self._start(grid=(1, 1, 1), block=(1, 1, 1), args=[free_at, end, link, transfer, latency])

    def hold(self, end: torch.Tensor, counts: torch.Tensor, multiprocessors: int) -> None:
        """Hold ``multiprocessors`` until ``end``, and count in ``counts``.

        ``counts``, int64 (3): collectives, how many started after their ``end``, and by how many ns in total.
        """
        self._hold(grid=(multiprocessors, 1, 1), block=(_THREADS, 1, 1), args=[end, counts])


def _nvrtc() -> ctypes.CDLL:
    try:
        return torch.cuda._utils._get_nvrtc_library()
    except OSError as error:
        raise RefshardError(
            f"emulated cases on a GPU need NVRTC for CUDA {torch.version.cuda}, which this torch came without; install "
            "it with: pip install nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)"
        ) from error
