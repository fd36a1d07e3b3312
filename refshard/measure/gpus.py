"""What of the GPUs, their software and its configuration decides how fast a run is; and how they ran during the steps.

Throttling slows any strategy that runs while the GPU is hot, so a launch whose GPUs were throttled says so.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from threading import Event, Thread
from typing import Any

import msgspec
import torch

from refshard.fakecuda.activate import is_active
from refshard.measure.nvml import GpuReading, GpuSensors, gpu_sensors
from refshard.records import Environment, GpuMemory, GpuSettings, GpuUse

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


_INTERVAL_S = 0.25
"""Between two samples: a sample takes about a millisecond a GPU, of a thread that does not hold Python's lock."""


@contextmanager
def watched_gpus(device: torch.device) -> Iterator[list[GpuUse]]:
    """Put this context around the timed steps; when they end, the list holds what each GPU of this host did.

    The host's first rank watches all GPUs that its ranks use. Other ranks watch nothing, and no rank does without NVML.
    """
    if device.type != "cuda" or is_active() or os.environ.get("LOCAL_RANK", "0") != "0":
        yield []
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with gpu_sensors(visible_uuids()[:ranks]) as sensors, sampled(sensors) as found:
        yield found


@contextmanager
def sampled(sensors: GpuSensors | None, interval_s: float = _INTERVAL_S) -> Iterator[list[GpuUse]]:
    """Sample ``sensors`` every ``interval_s`` until the context ends, then put what they told into the list.

    There is at least one sample, from the end. After an error in the context the list stays empty.
    """
    found: list[GpuUse] = []
    if sensors is None:
        yield found
        return
    samples: list[list[GpuReading]] = []
    ended = Event()

    def readings() -> list[GpuReading]:
        return [sensors.reading(gpu) for gpu in range(sensors.count)]

    def sample() -> None:
        while not ended.wait(interval_s):
            samples.append(readings())

    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
        if not samples:
            samples.append(readings())
    finally:
        ended.set()
        thread.join()
    found.extend(use_of(gpu, own) for gpu, own in enumerate(zip(*samples)))


def use_of(gpu: int, readings: Sequence[GpuReading]) -> GpuUse:
    """What the samples of one GPU come to."""
    powers = [one.power_w for one in readings if one.power_w is not None]
    clocks = [one.sm_clock_mhz for one in readings if one.sm_clock_mhz is not None]
    reasons = [reason for one in readings for reason in one.throttled]
    return GpuUse(
        gpu=gpu,
        samples=len(readings),
        power_w=fmean(powers) if powers else None,
        max_power_w=max(powers, default=None),
        sm_clock_mhz=fmean(clocks) if clocks else None,
        min_sm_clock_mhz=min(clocks, default=None),
        throttled={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
    )


def of_all_hosts(ranks: Sequence[Sequence[GpuUse]]) -> tuple[GpuUse, ...]:
    """What the watching rank of each host saw, ``ranks`` being in order; those that saw nothing are empty."""
    watching = [uses for uses in ranks if uses]
    return tuple(msgspec.structs.replace(use, host=host) for host, uses in enumerate(watching) for use in uses)


def throttle_warnings(uses: Sequence[GpuUse]) -> tuple[str, ...]:
    """In words, which GPUs were held below their clocks, why, and how often."""
    several = any(use.host for use in uses)
    return tuple(
        f"GPU {use.gpu}{f' of host {use.host}' if several else ''} was throttled ({reason}) during the measured steps: "
        f"in {count} of {use.samples} sample{'' if use.samples == 1 else 's'}"
        for use in uses
        for reason, count in use.throttled.items()
    )


_MOST_RANKS = 8
"""A warning lists at most this many."""


def retry_warnings(ranks: Sequence[GpuMemory]) -> tuple[str, ...]:
    """In words, how many allocations of which ranks were retried; empty if none was."""
    retried = {rank: memory.retries for rank, memory in enumerate(ranks) if memory.retries}
    if not retried:
        return ()
    total = sum(retried.values())
    times = "time" if total == 1 else "times"
    listed = [f"{count} on rank {rank}" for rank, count in list(retried.items())[:_MOST_RANKS]]
    if len(retried) > _MOST_RANKS:
        listed.append(f"the others on {len(retried) - _MOST_RANKS} more")
    return (
        f"GPU memory ran short {total} {times} during the measured steps ({', '.join(listed)}): "
        "the allocator then waits for the device, frees its cache and retries cudaMalloc, so steps stall; use less "
        "memory, or set PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
