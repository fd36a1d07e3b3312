"""How busy the machine is while a launch is timed: a probe of its compute, and what other processes take of it.

Strategies that ran one after the other are compared as if the machine had been the same. On a shared one it is not, so
each launch measures it: every rank times one fixed matrix product right before and right after the timed steps, when no
step is watched, traced or timed; and the processors' busy time that the ranks did not use is that of others.
"""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from refshard.fakecuda.activate import is_active
from refshard.records import Load


def available_cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


_PRODUCTS = {"cpu": (512, 24), "cuda": (2048, 64)}
"""Size and number of the probe's fp32 products: some 50 ms of a core or a GPU, in little memory."""
_BUSY = (0, 1, 2, 5, 6, 7)
"""User, nice, system, irq, softirq and stolen time in ``/proc/stat`` (proc(5)): what keeps a core from being idle."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of the machine: its probes, s; over ``wall_s`` of timed steps the CPU time that it used itself,
    and that all processes of its host used (None where the system does not tell), s.
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


def load_of(ranks: Sequence[RankLoad | None]) -> Load | None:
    """What all ranks of a launch saw; None if one of them did not look."""
    known = [rank for rank in ranks if rank is not None]
    if not known or len(known) < len(ranks):
        return None
    hosts = [[rank for rank in known if rank.host == host] for host in dict.fromkeys(rank.host for rank in known)]
    others = [busy for host in hosts if (busy := _other_cores(host)) is not None]
    return Load(
        probe_before_s=max(rank.probe_before_s for rank in known),
        probe_after_s=max(rank.probe_after_s for rank in known),
        other_cores=max(others, default=None),
        cores=min(rank.cores for rank in known),
    )


def _other_cores(ranks: Sequence[RankLoad]) -> float | None:
    """Cores of one host that its ranks did not keep busy."""
    first = ranks[0]
    if first.host_cpu_s is None:
        return None
    return max(0.0, (first.host_cpu_s - sum(rank.own_cpu_s for rank in ranks)) / first.wall_s)


def _host_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU time that all processes of this host have used since it booted, s."""
    try:
        fields = stat.read_text().partition("\n")[0].split()[1:]
        return sum(int(fields[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
