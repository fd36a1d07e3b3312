"""Activate the fake device in this process, before torch is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

from refshard.errors import RefshardError
from refshard.fakecuda.build import NAME, extension
from refshard.specs.hardware import HardwareSpec

DeviceMode = Literal["dry", "host"]
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def activate(
    hardware: HardwareSpec, *, mode: DeviceMode = "dry", devices: int = 8, unusable_bytes: int = 0
) -> ModuleType:
    """Give this process a node of ``devices`` fake GPUs of this ``hardware``, and return the extension.

    In mode ``dry`` nothing is computed; in mode ``host`` the CPU computes, in host memory. The allocator cannot use
    ``unusable_bytes`` of each GPU (CUDA's context, NCCL's buffers). ``PYTORCH_ALLOC_CONF`` configures it, as on a GPU.

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
    loaded = _load()
    capability = loaded.Capability()
    capability.name = hardware.device_name
    capability.major, capability.minor = hardware.capability
    capability.multiprocessors = hardware.multiprocessors
    configuration = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    try:
        loaded.create(mode == "dry", devices, hardware.memory_bytes, unusable_bytes, capability, configuration)
    except ValueError as error:
        raise RefshardError(f"PYTORCH_ALLOC_CONF: {error}") from None
    sys.modules[NAME] = loaded
    sys.meta_path.insert(0, _Interception(loaded))
    return loaded


def is_active() -> bool:
    """Whether this process has the fake device."""
    return NAME in sys.modules


def _load() -> ModuleType:
    path = str(extension())
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Interception(importlib.abc.MetaPathFinder):
    """Adds what torch's CPU build lacks to ``torch._C``, just before torch's own Python code looks for it there."""

    def __init__(self, loaded: ModuleType) -> None:
        from refshard.fakecuda import bitsandbytes, c10d, torch_c

        self._before: dict[str, Callable[[Any], None]] = {
            "torch.cuda": torch_c.install,
            "torch.distributed.constants": c10d.install,
            "torch.distributed.distributed_c10d": c10d.meet_nobody,
            "torch.distributed.checkpoint.filesystem": c10d.save_alone,
            "torch.distributed.pipelining.schedules": c10d.infer_nothing,
            "bitsandbytes.cextension": bitsandbytes.install,
        }
        self._loaded = loaded

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Always return None, so that the next finder finds the module."""
        if (install := self._before.pop(name, None)) is not None:
            install(self._loaded)
