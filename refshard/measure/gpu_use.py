"""Power, clocks and throttling of a host's GPUs while steps are timed, sampled by one of its ranks.

Throttling slows whichever strategy runs while the GPU is hot, so a launch whose GPUs were throttled says so.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from threading import Event, Thread

import msgspec
import torch

from refshard.fakecuda.activate import is_active
from refshard.measure.gpus import visible_uuids
from refshard.measure.nvml import GpuReading, GpuSensors, gpu_sensors
from refshard.records import GpuUse

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
    thread = Thread(target=_sample, args=(sensors, samples.append, ended, interval_s), daemon=True)
    thread.start()
    try:
        yield found
        if not samples:
            samples.append(_readings(sensors))
    finally:
        ended.set()
        thread.join()
    found.extend(use_of(gpu, readings) for gpu, readings in enumerate(zip(*samples)))


def _sample(sensors: GpuSensors, keep: Callable[[list[GpuReading]], None], ended: Event, interval_s: float) -> None:
    while not ended.wait(interval_s):
        keep(_readings(sensors))


def _readings(sensors: GpuSensors) -> list[GpuReading]:
    return [sensors.reading(gpu) for gpu in range(sensors.count)]


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
