"""Inductor on the fake CUDA device: real graphs, fusion and memory planning, kernels that compute nothing."""

import os
import tempfile
import types
from typing import Any

import torch


class _Kernel:
    """Stands in for a generated kernel."""

    fn = None

    def __init__(self, name: str, source: str) -> None:
        self.name, self.src = name, source

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        """Launch nothing."""

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Compile nothing."""


def activate() -> None:
    """Let ``torch.compile`` of this process run on the fake device; needs triton."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    import triton
    from torch._inductor import async_compile
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            properties = {
                "max_shared_mem": 232448, "multiprocessor_count": 132, "sm_clock_rate": 1980000,
                "mem_clock_rate": 2619000, "mem_bus_width": 5120, "max_num_regs": 65536, "warpSize": 32,
            }  # fmt: skip
            self.utils = types.SimpleNamespace(get_device_properties=lambda _: properties)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            return lambda *_, **__: 0.01

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_device_capability(self, *_: Any) -> tuple[int, int]:
            return (9, 0)

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    triton.runtime.driver.set_active(Driver())
    async_compile.AsyncCompile.triton = lambda _self, name, source, *_, **__: _Kernel(name, source)  # type: ignore[method-assign]
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = guards._empty_strided_cuda_pinned = empty
