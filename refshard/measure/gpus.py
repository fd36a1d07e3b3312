"""What of the GPUs, their software and its configuration decides how fast a run is."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from refshard.measure.nvml import GpuSensors, gpu_sensors
from refshard.records import Environment, GpuSettings

_PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_")
_NAMES = (
    "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
_PLACES = ("CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_ROOT")
"""Variables that say only where files lie on somebody's machine."""
OF_ONE_PLACE = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")
"""Variables that differ between hosts or jobs that are alike."""
COMPARABLE = ("gpu_memory_bytes", "gpu_driver", "cuda", "nccl", "tf32", "gpu_settings")
"""Fields of the environment that must match between the hosts of a run, and between runs, where there are GPUs."""


def describe_gpus() -> dict[str, Any]:
    """Fields of :class:`Environment` about the GPUs that torch sees; none of them where it sees none."""
    count = torch.cuda.device_count()
    if not count:
        return {}
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    with gpu_sensors(visible_uuids()) as sensors:
        told = describe_sensors(sensors)
    return {
        "gpu_memory_bytes": tuple(each.total_memory for each in properties),
        "cuda": f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "",
        "nccl": _nccl(),
        "tf32": tf32_allowed(os.environ),
        "variables": variables(os.environ),
        **told,
    }


def describe_sensors(sensors: GpuSensors | None) -> dict[str, Any]:
    """Fields of :class:`Environment` that NVML fills; none without it."""
    if sensors is None:
        return {}
    return {
        "gpu_driver": sensors.driver(),
        "gpu_settings": tuple(sensors.settings(gpu) for gpu in range(sensors.count)),
        "gpu_throttled": tuple(sensors.reading(gpu).throttled for gpu in range(sensors.count)),
    }


def visible_uuids() -> list[str]:
    """UUIDs of the GPUs that torch sees, in its order."""
    count = torch.cuda.device_count()
    return [str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) for index in range(count)]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that configure CUDA, NCCL and torch's allocator, by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _PLACES
    }


def tf32_allowed(environment: Mapping[str, str]) -> bool:
    """Whether fp32 matrix products on GPUs may be TF32: torch allows it, and NVIDIA's variable does not forbid it."""
    return torch.get_float32_matmul_precision() != "highest" and environment.get("NVIDIA_TF32_OVERRIDE") != "0"


def shared_variables(environment: Environment) -> dict[str, str]:
    """The variables of an environment but those that differ between hosts or jobs that are alike."""
    return {name: value for name, value in environment.variables.items() if name not in OF_ONE_PLACE}


def setting_changes(before: tuple[GpuSettings, ...], now: tuple[GpuSettings, ...]) -> list[str]:
    """In words, what differs between the settings of GPUs, one after the other."""
    if len(before) != len(now):
        return [f"gpu_settings were known of {len(before)} GPUs and are of {len(now)}"]
    return [
        f"{field} of GPU {gpu} was {was!r} and is {is_!r}"
        for gpu, (one, other) in enumerate(zip(before, now))
        for field in GpuSettings.__struct_fields__
        if (was := getattr(one, field)) != (is_ := getattr(other, field))
    ]


def _nccl() -> str:
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):  # a build without NCCL, or the fake device
        return ""
    return ".".join(map(str, found))
