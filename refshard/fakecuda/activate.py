"""Activate the fake device in this process, before torch is imported."""

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from refshard.errors import RefshardError
from refshard.fakecuda.build import NAME, extension, torch_library

if TYPE_CHECKING:  # building a wheel needs nothing but torch
    from refshard.specs.hardware import HardwareSpec

DeviceMode = Literal["dry", "host"]
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def activate(
    hardware: "HardwareSpec", *, mode: DeviceMode = "dry", devices: int = 8, context_bytes: int = 0,
    communicator_bytes: tuple[int, int] = (0, 0),
) -> ModuleType:  # fmt: skip
    """Give this process a node of ``devices`` fake GPUs of this ``hardware``, and return the extension.

    In mode ``dry`` nothing is computed; in mode ``host`` the CPU computes, in host memory. CUDA's context takes
    ``context_bytes`` of each GPU's memory; NCCL's first and each further communicator take ``communicator_bytes`` once
    their groups communicate. ``PYTORCH_ALLOC_CONF`` configures the allocator, as on a GPU.

    Raises:
        RefshardError: torch is imported already, the device cannot be built, or it exists already.
    """
    if is_active():
        raise RefshardError("the fake CUDA device is already active; activate it once per process")
    if "torch" in sys.modules:
        raise RefshardError(
            "the fake CUDA device must be activated before torch is imported; call refshard.fakecuda.activate() first, "
            "or start the script with `refshard dryrun -- SCRIPT`"
        )
    loaded = load()
    capability = loaded.Capability()
    capability.name = hardware.device_name
    capability.major, capability.minor = hardware.capability
    capability.multiprocessors = hardware.multiprocessors
    configuration = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    try:
        loaded.create(
            mode == "dry", devices, hardware.memory_bytes, context_bytes, communicator_bytes, capability, configuration
        )
    except ValueError as error:
        raise RefshardError(f"PYTORCH_ALLOC_CONF: {error}") from None
    loaded.hardware = hardware  # type: ignore[attr-defined]
    if mode == "host":  # torch's own Triton kernels would compute nothing there
        os.environ["TORCH_DISABLE_NATIVE_JIT"] = "1"
    sys.modules[NAME] = loaded
    sys.meta_path.insert(0, _Interception(loaded))
    return loaded


def is_active() -> bool:
    """Whether this process has the fake device."""
    return NAME in sys.modules


def load() -> ModuleType:
    """Load the extension, without a device.

    Raises:
        RefshardError: it cannot be built, or what was built on another system cannot be loaded on this one.
    """
    path = str(extension())
    ctypes.CDLL(str(torch_library()))
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise RefshardError(
            f"the fake CUDA device cannot be loaded: {error}; delete {Path(path).parent}, so that it is built again"
        ) from None
    return module


class _Interception(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported: adds what torch's CPU build lacks to ``torch._C`` just before torch's own
    Python code looks for it there, and puts this package's functions where other modules would call CUDA.
    """

    def __init__(self, loaded: ModuleType) -> None:
        from refshard.fakecuda import (
            bitsandbytes,
            c10d,
            flex_attention,
            inductor,
            torch_c,
            triton_kernels,
            without_triton,
        )

        self._before: dict[str, Callable[[Any], None]] = {
            "torch.cuda": torch_c.install,
            "torch._dynamo": without_triton.refuse_inductor,
            "torch.distributed.constants": c10d.install,
            "torch.distributed.distributed_c10d": c10d.meet_nobody,
            "torch.distributed.checkpoint.filesystem": c10d.save_alone,
            "torch.distributed.pipelining.schedules": c10d.infer_nothing,
            "bitsandbytes.cextension": bitsandbytes.install,
            "torch._inductor.compile_fx": inductor.install,
        }
        self._after: dict[str, Callable[[Any], None]] = {
            "torch._inductor.utils": inductor.take_peaks,
            "torch.nn.attention.flex_attention": flex_attention.compute_masks,
            "triton.runtime.jit": triton_kernels.install,
        }
        self._loaded = loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None, so that the next finder finds the module, except where this one has something to change in it."""
        if (install := self._before.pop(name, None)) is not None:
            install(self._loaded)
        if name == "triton.backends.nvidia.driver":
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name("triton_driver.py"))
        if (install := self._after.pop(name, None)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenInstall(spec.loader, functools.partial(install, self._loaded))
        return spec


class _ThenInstall(importlib.abc.Loader):
    """Loads a module as ``loader`` does, and then calls ``install``."""

    def __init__(self, loader: Any, install: Callable[[], None]) -> None:
        self._loader, self._install = loader, install

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._install()

    def __getattr__(self, name: str) -> Any:  # get_source, get_filename and the like
        return getattr(self._loader, name)
