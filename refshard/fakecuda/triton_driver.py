"""Stands in for ``triton.backends.nvidia.driver``, whose own would build a library that calls CUDA.

It answers for the fake device, so that Triton and inductor choose as they would on the GPU. It compiles and launches
nothing: ``triton_kernels.py`` records launches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver


class CudaDriver(GPUDriver):  # type: ignore[misc]
    """The driver of one kind of GPU, that of the fake device."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = _Utils()

    @classmethod
    def is_active(cls) -> bool:
        """Always: this module is loaded only where the fake device is active."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a launcher's source would need it, and none is built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The architecture of the current device."""
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        """The current device."""
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        """``torch.cuda``."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """Times are all alike, so that autotuning takes the first configuration and runs none."""
        return lambda kernel_call, quantiles=(0.5,), **_: [1.0] * len(quantiles)  # noqa: ARG005


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        """What Triton asks a device."""
        found: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "multiprocessor_count": found.multi_processor_count,
            "max_num_regs": found.regs_per_multiprocessor,
            "warpSize": found.warp_size,
        }
