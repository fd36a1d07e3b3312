"""What ``torch._C`` has in a CUDA build: the functions below ``torch.cuda``, so its own Python code runs unchanged.

They are set on ``torch._C`` just before ``torch.cuda`` is imported.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from refshard.fakecuda.graphs import OWN_POOL, PoolId, graphs

CUDA_VERSION = "12.8"
"""What the fake device says torch was built for."""
NCCL_VERSION = (2, 27, 5)
_CUDA = 1
"""c10::DeviceType::CUDA."""
_ARCHITECTURES = "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"
_MOST_PLACES = 8
_WRAPPERS = f"{os.sep}typing_extensions.py"
"""Wraps torch's deprecated functions."""
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


def install(ext: ModuleType) -> None:
    """Give ``torch._C`` its CUDA functions; ``ext`` is the extension."""
    import torch
    import torch.version

    for name, value in {
        **_devices(ext),
        **_streams(ext),
        **_libraries(ext),
        **_attention(ext),
        **_refused(),
        **_memory(ext),
        **graphs(ext),
    }.items():
        setattr(torch._C, name, value)
    torch._C._has_cuda = torch._C._has_cudnn = True
    torch.version.cuda = CUDA_VERSION
    _storages(ext)
    ext.set_site_callback(site)


def _storages(ext: ModuleType) -> None:
    """Storages that Python code makes or resizes: torch's CPU build has none for CUDA."""
    import torch

    storage: Any = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **options) if device is None else make(cls, *args, device=device, **options)
        if args and not isinstance(args[0], int):
            return make(cls, *args, **options).to(device)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)  # type: ignore[no-any-return]
        ext.resize_storage(self._cdata, size)
        return self

    storage.__new__, storage.resize_ = new, resize_


def site() -> str:
    """The innermost line that is neither torch's nor this project's, as ``train.py:31 in train``."""
    frame = script_frame()
    return "" if frame is None else _line(frame)


def places() -> str:
    """The lines of the script that lead here, one a line, the innermost first. In autograd's own thread, those that
    called backward.
    """
    found = list(_script_frames(sys._getframe()))
    if not found:
        found = list(_script_frames(sys._current_frames()[threading.main_thread().ident or 0]))
    own = [frame for frame in found if not frame.f_code.co_filename.endswith(_WRAPPERS)]
    return "\n".join(map(_line, own[:_MOST_PLACES]))


def script_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor this project's; None if only autograd's own thread calls."""
    return next(_script_frames(sys._getframe()), None)


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_internal(path: str) -> bool:
    """Whether a source file is torch's, Python's or this project's."""
    if path.startswith(os.environ.get("TORCHINDUCTOR_CACHE_DIR", _PACKAGE)):
        return True
    if path.startswith(_STANDARD_LIBRARY):
        return not path.startswith(_installed()) or path.startswith(_torch())
    return path.startswith((_PACKAGE, _torch(), "<frozen"))


@cache
def _torch() -> str:
    return f"{Path(sys.modules['torch'].__path__[0])}{os.sep}"


@cache
def _installed() -> tuple[str, str]:
    """Folders of installed packages within the standard library's."""
    return f"{_STANDARD_LIBRARY}site-packages{os.sep}", f"{_STANDARD_LIBRARY}dist-packages{os.sep}"


def short(path: str) -> str:
    """A source file's path from its package on, or relative to here."""
    for parent in ("site-packages", "dist-packages"):
        if f"{os.sep}{parent}{os.sep}" in path:
            return path.rpartition(f"{os.sep}{parent}{os.sep}")[2]
    return os.path.relpath(path) if path.startswith(str(Path.cwd())) else path


def visible_devices(variable: str | None) -> int | None:
    """How many GPUs ``CUDA_VISIBLE_DEVICES`` names, up to the first that is none; None where it is not set.

    >>> [visible_devices(text) for text in (None, "3", "0,1", "GPU-1f", "0,-1,2", "")]
    [None, 1, 2, 1, 1, 0]
    """
    if variable is None:
        return None
    named = [name.strip() for name in variable.split(",")]
    return len([*takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), named)])


def _devices(ext: ModuleType) -> dict[str, Any]:
    import torch

    @cache
    def properties(index: int) -> SimpleNamespace:
        return _properties(ext, index)

    def device_count() -> int:
        if not torch.cuda.is_initialized():
            visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
            if visible == 0:
                return 0
            if visible is not None:
                ext.show_devices(visible)
        count: int = ext.device_count()
        return count

    def init() -> None:
        if not device_count():
            raise RuntimeError("No CUDA GPUs are available")
        torch.cuda.default_generators = tuple(ext.default_generator(i) for i in range(ext.device_count()))
        torch.cuda._get_device_properties = properties  # type: ignore[attr-defined]

    return {
        "_cuda_init": init,
        "_cuda_getDeviceCount": device_count,
        "_cuda_getDevice": ext.current_device,
        "_cuda_setDevice": ext.set_device,
        "_cuda_exchangeDevice": lambda index: ext.exchange_device(index) if index >= 0 else -1,
        "_cuda_maybeExchangeDevice": lambda index: ext.exchange_device(index) if index >= 0 else -1,
        "_cuda_synchronize": ext.synchronize,
        "_cuda_sleep": lambda cycles: None,  # noqa: ARG005
        "_cuda_getArchFlags": lambda: _ARCHITECTURES,
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_hasPrimaryContext": lambda index: True,  # noqa: ARG005
        "_cuda_set_sync_debug_mode": lambda mode: None,  # noqa: ARG005
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_isHistoryEnabled": lambda: False,
        "_CudaDeviceProperties": SimpleNamespace,
        "_cudart": _cudart(ext),
        "_nvtx": _nvtx(),
        "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
        "_cuda_getCurrentBlasHandle": lambda: 1,
    }


def _properties(ext: ModuleType, index: int) -> SimpleNamespace:
    """As ``torch.cuda.get_device_properties()`` gives them."""
    capability = ext.capability()
    return SimpleNamespace(
        name=capability.name, major=capability.major, minor=capability.minor,
        total_memory=ext.memory_info(index)[1], multi_processor_count=capability.multiprocessors,
        is_integrated=0, is_multi_gpu_board=0, max_threads_per_multi_processor=2048, warp_size=32,
        gcnArchName=capability.name, uuid=f"fake-{index}", L2_cache_size=50 << 20, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        pci_bus_id=index, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _nvtx() -> SimpleNamespace:
    """Ranges that a profiler would show; nobody looks here."""
    return SimpleNamespace(
        rangePushA=lambda message: 0,  # noqa: ARG005
        rangePop=lambda: 0,
        rangeStartA=lambda message: 0,  # noqa: ARG005
        rangeEnd=lambda index: None,  # noqa: ARG005
        markA=lambda message: None,  # noqa: ARG005
        deviceRangeStart=lambda *_: 0,
        deviceRangeEnd=lambda *_: None,
    )


def _cudart(ext: ModuleType) -> SimpleNamespace:
    success = 0
    return SimpleNamespace(
        cudaMemGetInfo=ext.memory_info,
        cudaGetErrorString=str,
        cudaError=SimpleNamespace(success=success),
        cudaProfilerStart=lambda: success,
        cudaProfilerStop=lambda: success,
        cudaHostRegister=lambda *_: success,
        cudaHostUnregister=lambda *_: success,
    )


def _streams(ext: ModuleType) -> dict[str, Any]:
    import torch

    priorities: dict[int, int] = {}

    class CudaStreamBase(torch._C.Stream):
        """``torch.cuda.Stream`` derives from it."""

        def __new__(
            cls, priority: int = 0, stream_id: int | None = None, device_index: int = 0, **_: Any
        ) -> "CudaStreamBase":
            if stream_id is not None:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=_CUDA)
            made = super().__new__(cls, device=torch.device("cuda", ext.current_device()), priority=priority)
            priorities[made.stream_id] = priority
            return made

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return priorities.get(self.stream_id, 0)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class CudaEventBase(torch._C.Event):
        """``torch.cuda.Event`` derives from it."""

        timed: bool

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> "CudaEventBase":
            device = torch.device("cuda", ext.current_device())
            made = super().__new__(
                cls, device, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )
            made.timed = enable_timing
            return made

        def elapsed_time(self, end_event: "CudaEventBase") -> float:  # type: ignore[override]
            """1 ms: only a replay knows how long something takes."""
            if not (self.timed and end_event.timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self.event_id and end_event.event_id):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return 1.0

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

    return {
        "_CudaStreamBase": CudaStreamBase,
        "_CudaEventBase": CudaEventBase,
        "_cuda_getCurrentStream": ext.current_stream,
        "_cuda_getCurrentRawStream": lambda index: ext.current_stream(index)[0],
        "_cuda_getDefaultStream": ext.default_stream,
        "_cuda_getStreamFromExternal": lambda pointer, device_index: (pointer, device_index, _CUDA),
        "_cuda_setStream": lambda stream_id, device_index, device_type: ext.set_stream(stream_id, device_index),  # noqa: ARG005
    }


def _libraries(ext: ModuleType) -> dict[str, Any]:
    """The versions of cuDNN, and NVTX, which marks ranges for a profiler that is not there."""
    version = ext.capability().cudnn_version
    numbers = (version // 10000, version // 100 % 100, version % 100)
    cudnn = SimpleNamespace(
        is_cuda=True, getVersionInt=lambda: version, getRuntimeVersion=lambda: numbers,
        getCompileVersion=lambda: numbers, RNNMode=SimpleNamespace(rnn_relu=0, rnn_tanh=1, lstm=2, gru=3),
    )  # fmt: skip
    nvtx = SimpleNamespace(
        rangePushA=lambda text: 0, rangePop=lambda: 0, rangeStartA=lambda text: 0, rangeEnd=lambda handle: None,  # noqa: ARG005
        markA=lambda text: None, deviceRangeStart=lambda *_: None, deviceRangeEnd=lambda *_: None,  # noqa: ARG005
    )  # fmt: skip
    return {
        "_cudnn": cudnn,
        "_nvtx": nvtx,
        "_cuda_get_cudnn_benchmark_limit": lambda: 10,
        "_cuda_set_cudnn_benchmark_limit": lambda limit: None,  # noqa: ARG005
    }


def _attention(ext: ModuleType) -> dict[str, Any]:
    """What :mod:`torch.backends.cuda` says about the attention kernels that would take a call."""
    import torch

    def dense(tensor: torch.Tensor) -> torch.Tensor:
        """A jagged tensor as one sequence: only its heads and its dtype matter."""
        return tensor.transpose(1, 2).values().transpose(0, 1)[None] if tensor.is_nested else tensor

    def can_use(name: str) -> Callable[..., bool]:
        backend = int(getattr(torch._C._SDPBackend, name))

        def asked(params: Any, debug: bool = False) -> bool:  # noqa: ARG001
            jagged = params.query.is_nested
            if jagged and name == "CUDNN_ATTENTION":
                return False  # only with TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1
            return ext.is_dry() and ext.can_use_attention(  # type: ignore[no-any-return]
                backend, dense(params.query), dense(params.key), dense(params.value), params.attn_mask, params.dropout,
                params.is_causal, params.enable_gqa,
            )  # fmt: skip

        return asked

    return {
        "_can_use_flash_attention": can_use("FLASH_ATTENTION"),
        "_can_use_mem_efficient_attention": can_use("EFFICIENT_ATTENTION"),
        "_can_use_cudnn_attention": can_use("CUDNN_ATTENTION"),
    }


def _refused() -> dict[str, Any]:
    """What the device cannot do, each with its reason."""
    one_process = _refuse("copies between the GPUs of one process, as DataParallel makes; use DistributedDataParallel")
    copies = ("broadcast", "broadcast_out", "broadcast_coalesced", "scatter", "scatter_out", "gather", "gather_out")
    return {
        **{f"_{name}": one_process for name in copies},
        "_nccl_unique_id": _refuse("NCCL communicators outside of torch.distributed"),
    }


def _memory(ext: ModuleType) -> dict[str, Any]:
    not_here = _refuse("pluggable allocator")

    def snapshot(pool: tuple[int, int, bool] | None = None) -> dict[str, Any]:
        return {"segments": _snapshot(ext, pool[:2] if pool else OWN_POOL), "device_traces": []}

    return {
        "_cuda_memoryStats": ext.statistics,
        "_cuda_resetPeakMemoryStats": ext.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": ext.reset_accumulated,
        "_cuda_emptyCache": ext.empty_cache,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_setMemoryFraction": ext.set_memory_fraction,
        "_cuda_getMemoryFraction": ext.memory_fraction,
        "_cuda_record_memory_history": lambda *_, **__: None,
        "_cuda_record_memory_history_legacy": lambda *_, **__: None,
        "_cuda_attach_out_of_memory_observer": lambda observer: None,  # noqa: ARG005
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda on: None,  # noqa: ARG005
        "_cuda_customAllocator": not_here,
        "_cuda_changeCurrentAllocator": not_here,
        "_cuda_setMemoryMetadata": lambda text: None,  # noqa: ARG005
        "_cuda_getMemoryMetadata": lambda: "",
    }


def _snapshot(ext: ModuleType, pool: PoolId) -> list[dict[str, Any]]:
    devices = range(ext.device_count())
    return [{**segment, "device": index} for index in devices for segment in ext.snapshot(index, pool)]


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the fake CUDA device does not support {what}")

    return refuse
