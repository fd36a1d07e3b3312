"""What there is on this machine, without a judgement: hardware, drivers, torch, limits, programs, other work.

Facts name no host and no user, and variables no paths: they are made to be pasted into a bug report.
"""

import os
import platform
import re
import resource
import shutil
import time
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
import torch

from refshard.errors import RefshardError
from refshard.fakecuda import build
from refshard.measure.environment import tf32_allowed, variables
from refshard.measure.load import available_cores, cpu_name
from refshard.measure.nvml import GpuCondition, GpuReading, GpuSensors
from refshard.records import GpuSettings
from refshard.specs.hardware import profile_of_device
from refshard.strategies.table import ROWS
from refshard.version import __version__

_PROGRAMS = ("ip", "tc", "sbatch")
_SAMPLES = 5
_WINDOW_S = 1.0
"""How long readings of GPUs, and the CPU time of other work, are taken for."""
_PATH = re.compile(r"(?<![\w.])~?/[^\s,:;=]+")


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU of the machine, as NVML tells it; ``readings`` are spread over a second."""

    settings: GpuSettings = GpuSettings()
    condition: GpuCondition = GpuCondition()
    readings: tuple[GpuReading, ...] = ()


class TorchGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that torch sees. ``profile`` is that of its peaks, if there is one."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    profile: str | None = None


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch. ``toolkit`` is ``CUDA 12.8`` or ``ROCm 6.4``, and empty of a CPU build; ``error`` is what
    torch says when it cannot use GPUs; ``architectures`` are those that its kernels are built for.
    """

    version: str
    toolkit: str = ""
    error: str = ""
    architectures: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    tf32: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. A limit of None is no limit; other values of None are unknown.

    ``cores`` are those that this process may use, and ``busy_cores`` how many of them other processes kept busy for a
    second. ``pci_gpus`` counts NVIDIA GPUs on the PCI bus, with a driver or without; ``driver`` is NVIDIA's version,
    and ``driver_cuda`` the newest CUDA that it supports, 1000 * major + 10 * minor. ``nvml`` says that nvidia-ml-py is
    installed. ``dry_run_obstacle`` is why the fake device cannot be made here; ``unavailable`` says why strategies
    cannot run here why.
    """

    refshard: str
    python: str
    os: str
    cpu: str
    physical_cores: int
    cores: int
    memory_bytes: int
    busy_cores: float
    shm_bytes: int | None
    open_files: int | None
    locked_bytes: int | None
    root: bool
    torch: TorchFacts
    pci_gpus: int = 0
    amd_gpus: bool = False
    driver: str = ""
    driver_cuda: int | None = None
    nvml: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    variables: dict[str, str] = {}
    programs: tuple[str, ...] = ()
    hta: bool = False
    dry_run_obstacle: str = ""
    strategies: int = 0
    unavailable: dict[str, str] = {}


def gather(sensors: GpuSensors | None) -> Facts:
    """All facts; takes about a second. ``sensors`` are those of all GPUs of the machine."""
    gpus, busy_cores = _watch(sensors)
    found = torch_facts()  # last: torch may make this process one that uses the GPUs
    return Facts(
        refshard=__version__,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        cores=available_cores(),
        memory_bytes=psutil.virtual_memory().total,
        busy_cores=busy_cores,
        shm_bytes=_shm_bytes(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        root=os.geteuid() == 0,
        torch=found,
        pci_gpus=_pci_gpus(),
        amd_gpus=Path("/sys/class/kfd/kfd/topology").exists(),
        driver=sensors.driver() if sensors else _driver(),
        driver_cuda=sensors.cuda() if sensors else None,
        nvml=find_spec("pynvml") is not None,
        gpus=gpus,
        variables=without_places(variables(os.environ)),
        programs=tuple(name for name in _PROGRAMS if shutil.which(name)),
        hta=find_spec("hta") is not None,
        dry_run_obstacle=_dry_run_obstacle(),
        strategies=len(ROWS),
        unavailable={name: why for name, row in ROWS.items() if (why := row.unavailable(cuda=bool(found.gpus)))},
    )


def without_places(given: Mapping[str, str]) -> dict[str, str]:
    """Variables without paths and hosts.

    >>> without_places({"NCCL_TOPO_FILE": "/home/me/topology.xml", "NCCL_HOSTID": "node7", "NCCL_ALGO": "Ring"})
    {'NCCL_TOPO_FILE': '<path>', 'NCCL_ALGO': 'Ring'}
    """
    return {name: _PATH.sub("<path>", value) for name, value in given.items() if name != "NCCL_HOSTID"}


def torch_facts() -> TorchFacts:
    """The installed torch, and the GPUs that it sees."""
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else ""
    toolkit = toolkit or (f"CUDA {torch.version.cuda}" if torch.version.cuda else "")
    error = _torch_error() if toolkit else ""
    gpus = []
    for index in range(0 if error else torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        capability, profile = (one.major, one.minor), profile_of_device(one.name)
        gpus.append(TorchGpu(name=one.name, memory_bytes=one.total_memory, capability=capability, profile=profile))
    return TorchFacts(
        version=str(torch.__version__),
        toolkit=toolkit,
        error=error,
        architectures=tuple(torch.cuda.get_arch_list()) if gpus else (),
        gpus=tuple(gpus),
        tf32=tf32_allowed(os.environ),
    )


def _torch_error() -> str:
    """The first line of what torch says when it cannot use a GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _PATH.sub("<path>", str(error).splitlines()[0] if str(error) else type(error).__name__)
    return ""


def _watch(sensors: GpuSensors | None) -> tuple[tuple[GpuFacts, ...], float]:
    """What each GPU says during a second, and how many cores other processes keep busy meanwhile."""
    every = range(sensors.count if sensors else 0)
    readings: list[list[GpuReading]] = [[] for _ in every]
    psutil.cpu_percent(percpu=True)
    began, own = time.perf_counter(), time.process_time()
    for _ in range(_SAMPLES):
        time.sleep(_WINDOW_S / _SAMPLES)
        if sensors is not None:
            for gpu in every:
                readings[gpu].append(sensors.reading(gpu))
    percents = dict(enumerate(psutil.cpu_percent(percpu=True)))
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else percents.keys()
    busy = sum(percents.get(core, 0.0) for core in mine) / 100
    used = (time.process_time() - own) / (time.perf_counter() - began)
    if sensors is None:
        return (), max(0.0, busy - used)
    gpus = tuple(
        GpuFacts(settings=sensors.settings(gpu), condition=sensors.condition(gpu), readings=tuple(readings[gpu]))
        for gpu in every
    )
    return gpus, max(0.0, busy - used)


def _shm_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _pci_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's devices (vendor 10de) that are display or 3D controllers (class 03)."""
    found = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's kernel module."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+[\d.]*)\s", version.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _dry_run_obstacle() -> str:
    try:
        build.check()
    except RefshardError as error:
        return str(error)
    return ""
