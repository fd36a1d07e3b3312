"""How busy the machine is while a launch is timed: its cores, a probe of its compute, and how its GPUs ran.

Strategies that run one after the other are compared as if the machine had been the same. On a shared one it is not, so
each launch measures it: every rank times a fixed matrix product right before and right after the timed steps, when no
step is watched, traced or timed, and busy time of the cores that the ranks did not use is that of other processes.
Throttling slows any strategy that runs while the GPU is hot, so the first rank of each host samples its GPUs.
"""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

import msgspec
import torch

from refshard.fakecuda.activate import is_active
from refshard.measure.nvml import GpuReading, GpuSensors, gpu_sensors, visible_uuids
from refshard.records import GpuUse, Load

_PRODUCTS = {"cpu": (512, 24), "cuda": (2048, 64)}
"""Size and number of the probe's fp32 products: some 50 ms of a core or a GPU, in little memory."""
_BUSY = (0, 1, 2, 5, 6, 7)
"""User, nice, system, irq, softirq and stolen time in ``/proc/stat`` (proc(5)): what keeps a core from being idle."""
_INTERVAL_S = 0.25
"""Between two samples of GPUs: one takes about 1 ms a GPU, in a thread that does not hold Python's lock."""


def cpu_name() -> str:
    """The processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of the machine, s: its probes; over ``wall_s`` of timed steps the CPU time of its own process,
    and that of all processes of its host (None if the system does not tell).
    """

    host: str
    cores: int
    probe_before_s: float
    probe_after_s: float
    wall_s: float
    own_cpu_s: float
    host_cpu_s: float | None


@contextmanager
def watched_load(device: torch.device) -> Iterator[list[RankLoad]]:
    """Put this context around the timed steps; when they end, the list holds what this rank saw.

    On the fake device nothing is probed: there is no machine to be busy.
    """
    found: list[RankLoad] = []
    if is_active():
        yield found
        return
    probe_before_s = probe(device)
    wall, own, host = time.perf_counter(), time.process_time(), _host_cpu_s()
    yield found
    wall_s, own_cpu_s, host_after = time.perf_counter() - wall, time.process_time() - own, _host_cpu_s()
    found.append(
        RankLoad(
            host=platform.node(),
            cores=os.cpu_count() or 1,
            probe_before_s=probe_before_s,
            probe_after_s=probe(device),
            wall_s=wall_s,
            own_cpu_s=own_cpu_s,
            host_cpu_s=None if host is None or host_after is None else host_after - host,
        )
    )


def probe(device: torch.device) -> float:
    """Seconds that a fixed number of matrix products takes on ``device``, after one that warms up."""
    size, products = _PRODUCTS[device.type]
    a, b, out = (torch.ones(size, size, device=device) for _ in range(3))
    torch.mm(a, b, out=out)
    _synchronise(device)
    started = time.perf_counter()
    for _ in range(products):
        torch.mm(a, b, out=out)
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU time that all processes of this host have used since it booted, s. A rank has no psutil."""
    try:
        fields = stat.read_text().partition("\n")[0].split()[1:]
        return sum(int(fields[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def load_of(ranks: Sequence[RankLoad | None]) -> Load | None:
    """What all ranks of a launch saw; None if one of them did not look."""
    known = [rank for rank in ranks if rank is not None]
    if not known or len(known) < len(ranks):
        return None
    others = []
    for host in dict.fromkeys(rank.host for rank in known):
        own = [rank for rank in known if rank.host == host]
        if own[0].host_cpu_s is not None:
            others.append(max(0.0, (own[0].host_cpu_s - sum(rank.own_cpu_s for rank in own)) / own[0].wall_s))
    return Load(
        probe_before_s=max(rank.probe_before_s for rank in known),
        probe_after_s=max(rank.probe_after_s for rank in known),
        other_cores=max(others, default=None),
        cores=min(rank.cores for rank in known),
    )


@contextmanager
def watched_gpus(device: torch.device) -> Iterator[list[GpuUse]]:
    """Put this context around the timed steps; when they end, the list holds what each GPU of this host did.

    The host's first rank watches all GPUs that its ranks use. It stays empty on other ranks, and without NVML.
    """
    if device.type != "cuda" or is_active() or os.environ.get("LOCAL_RANK", "0") != "0":
        yield []
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with gpu_sensors(visible_uuids()[:ranks]) as sensors, sampled(sensors) as found:
        yield found


@contextmanager
def sampled(sensors: GpuSensors | None, interval_s: float = _INTERVAL_S) -> Iterator[list[GpuUse]]:
    """Sample ``sensors`` every ``interval_s`` until the context ends, then put the results into the list.

    There is at least one sample, from the end. After an error in the context the list stays empty.
    """
    found: list[GpuUse] = []
    if sensors is None:
        yield found
        return
    samples: list[list[GpuReading]] = []
    ended = Event()

    def take() -> None:
        samples.append([sensors.reading(gpu) for gpu in range(sensors.count)])

    def sample() -> None:
        while not ended.wait(interval_s):
            take()

    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
        if not samples:
            take()
    finally:
        ended.set()
        thread.join()
    found.extend(use_of(gpu, own) for gpu, own in enumerate(zip(*samples)))


def use_of(gpu: int, readings: Sequence[GpuReading]) -> GpuUse:
    """Means and extremes of the samples of one GPU."""
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
