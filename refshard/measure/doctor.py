"""What this machine is, what can run on it, and what would make measurements wrong or slow.

Facts hold no judgement. They name no host and no user, and variables no paths: they are made to be pasted into a bug
report. Findings and abilities follow from facts alone.
"""

import os
import platform
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import torch

from refshard.errors import RefshardError
from refshard.fakecuda import build
from refshard.measure.environment import tf32_allowed, variables
from refshard.measure.load import cpu_name
from refshard.measure.nvml import GpuCondition, GpuReading, GpuSensors
from refshard.quantities import GIB, format_bytes
from refshard.records import GpuSettings
from refshard.resources import available_cores, install_extra
from refshard.specs.hardware import profile_of_device
from refshard.strategies.table import ROWS
from refshard.version import __version__

_PROGRAMS = ("ip", "tc", "sbatch")
_SAMPLES, _WINDOW_S = 5, 1.0
"""How often, and for how long, GPUs and other processes are watched."""
_PATH = re.compile(r"(?<![\w.])~?/[^\s,:;=]+")
_LEAST_SHM = GIB
_LEAST_OPEN_FILES = 4096
_LEAST_LOCKED = 64 * 2**20
_BUSY_MEMORY = GIB
"""What the driver itself may hold on an idle GPU."""
_BUSY_PERCENT = 10
_POWER_TOLERANCE = 0.99


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU of the machine, from NVML; ``readings`` are spread over a second."""

    settings: GpuSettings = GpuSettings()
    condition: GpuCondition = GpuCondition()
    readings: tuple[GpuReading, ...] = ()


class TorchGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that torch sees. ``profile`` holds its peaks, if there is one."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    profile: str | None = None


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch. ``toolkit`` is ``CUDA 12.8`` or ``ROCm 6.4``, and empty for a CPU build; ``error`` says why
    it cannot use GPUs; its kernels are built for ``architectures``.
    """

    version: str
    toolkit: str = ""
    error: str = ""
    architectures: tuple[str, ...] = ()
    gpus: tuple[TorchGpu, ...] = ()
    tf32: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. A limit of None is no limit; other values of None are unknown.

    This process may use ``cores``; for a second, other processes kept ``busy_cores`` of them busy. ``pci_gpus`` counts
    NVIDIA GPUs on the PCI bus, with a driver or without; ``driver_cuda`` is the newest CUDA that NVIDIA's ``driver``
    supports, 1000 * major + 10 * minor. ``nvml``: nvidia-ml-py is installed. ``dry_run_obstacle`` says why the fake
    device cannot be made here, ``unavailable`` why strategies cannot run.
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
    """All facts, in about a second. ``sensors`` are of all GPUs of the machine."""
    gpus, busy_cores = _watch(sensors)
    try:
        dry_run_obstacle = ""
        build.check()
    except RefshardError as error:
        dry_run_obstacle = str(error)
    try:
        shm_bytes = psutil.disk_usage("/dev/shm").total
    except OSError:
        shm_bytes = None
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
        shm_bytes=shm_bytes,
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
        dry_run_obstacle=dry_run_obstacle,
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
    error, gpus = "", []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if toolkit:
                torch.cuda.init()
    except (RuntimeError, AssertionError) as refused:
        error = _PATH.sub("<path>", (str(refused).splitlines() or [type(refused).__name__])[0])
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


def _watch(sensors: GpuSensors | None) -> tuple[tuple[GpuFacts, ...], float]:
    """Every GPU during a second, and how many cores other processes kept busy meanwhile."""
    every = range(sensors.count if sensors else 0)
    readings = []
    psutil.cpu_percent(percpu=True)
    began, own = time.perf_counter(), time.process_time()
    for _ in range(_SAMPLES):
        time.sleep(_WINDOW_S / _SAMPLES)
        readings.append([sensors.reading(gpu) for gpu in every] if sensors else [])
    percents = dict(enumerate(psutil.cpu_percent(percpu=True)))
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else percents.keys()
    busy = sum(percents.get(core, 0.0) for core in mine) / 100
    used = (time.process_time() - own) / (time.perf_counter() - began)
    gpus = tuple(
        GpuFacts(settings=sensors.settings(gpu), condition=sensors.condition(gpu), readings=of_gpu)
        for gpu, of_gpu in enumerate(zip(*readings))
        if sensors
    )
    return gpus, max(0.0, busy - used)


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


class Ability(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that refshard does: whether it can here, and how much, or what it lacks."""

    name: str
    possible: bool
    about: str


def abilities(facts: Facts) -> tuple[Ability, ...]:
    """Everything that depends on the machine."""
    gpus, slurm = facts.torch.gpus, "sbatch" in facts.programs
    missing = [f"the program {name}" for name in ("ip", "tc") if name not in facts.programs]
    lacking = missing if facts.root else ["root", *missing]
    here = facts.strategies - len(facts.unavailable)
    but = f"; not {', '.join(facts.unavailable)} (refshard list strategies says why)" if facts.unavailable else ""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    rows = (
        ("measured on GPUs", bool(gpus),
         f"up to {_count(len(gpus), 'rank')}: {names}" if gpus else "torch sees no GPU"),
        ("measured on CPUs", True, f"up to {_count(facts.cores, 'rank')} of one thread, over gloo"),
        ("emulated", True, "any world size, one real rank on " + ("a GPU or the CPU" if gpus else "the CPU")),
        ("dry runs", not facts.dry_run_obstacle, facts.dry_run_obstacle or "any script, cluster and world size"),
        ("plans", True, "any world size"),
        ("network emulation", not lacking,
         f"lacks {', '.join(lacking)}" if lacking else "hosts on this machine, joined by a limited link"),
        ("Slurm", slurm, 'launcher = "slurm"' if slurm else "sbatch not found; run refshard on a login node"),
        ("cross-check of traces", facts.hta,
         "refshard trace --cross-check hta" if facts.hta else f"lacks HTA: {install_extra('hta')}"),
        ("strategies", here > 0, f"{here} of {facts.strategies}{but}"),
    )  # fmt: skip
    return tuple(Ability(name=name, possible=possible, about=about) for name, possible, about in rows)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


Severity = Literal["error", "warning", "note"]
"""error: measurements are wrong or impossible; warning: slower or less steady than possible; note: good to know.
"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    severity: Severity
    says: str
    remedy: str


def findings(facts: Facts) -> tuple[Finding, ...]:
    """All findings about a machine, the gravest first."""
    found = [
        Finding(severity=severity, says=says.format(**values), remedy=remedy.format(**values))
        for severity, cases, says, remedy in _FINDINGS
        for values in cases(facts)
    ]
    return tuple(sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity)))


Cases = Callable[[Facts], Iterable[Mapping[str, Any]]]
"""The values of a finding's sentence and remedy, once for each time that it applies."""


def _if(condition: Callable[[Facts], object], **values: Callable[[Facts], object]) -> Cases:
    """Once, if the condition holds."""
    return lambda f: [{name: value(f) for name, value in values.items()}] if condition(f) else []


def _unusable(problem: str) -> Cases:
    """If torch cannot use the GPUs that are here for this reason."""

    def cases(f: Facts) -> Iterator[Mapping[str, Any]]:
        toolkit, nvidia, cuda = f.torch.toolkit, max(f.pci_gpus, len(f.gpus)), f.driver_cuda
        needed = int(toolkit[5:].split(".")[0]) if toolkit.startswith("CUDA ") else 0
        if f.torch.gpus or not (nvidia or f.amd_gpus or toolkit):
            found = ""
        elif not nvidia and not f.amd_gpus:
            found = "no GPU"
        elif not toolkit:
            found = "CPU build"
        elif nvidia and not f.driver:
            found = "no driver"
        elif cuda is not None and cuda // 1000 < needed:  # a driver runs every CUDA of its own major version
            found = "old driver"
        else:
            found = "unknown"
        if found == problem:
            yield {
                "f": f,
                "kind": _count(nvidia, "NVIDIA GPU") if nvidia else "an AMD GPU",
                "cuda": f"{(cuda or 0) // 1000}.{(cuda or 0) % 1000 // 10}",
                "error": f": {f.torch.error}" if f.torch.error else "",
            }

    return cases


def _unbuilt(f: Facts) -> Iterator[Mapping[str, Any]]:
    """GPUs that torch has no kernels for. Kernels (sm) run on later devices of the same major version, PTX (compute) on
    all later ones, sm_90a on one.
    """

    def runs(architecture: str, capability: tuple[int, int]) -> bool:
        kind, _, digits = architecture.partition("_")
        if not digits.isdigit():
            return digits.rstrip("af") == "".join(map(str, capability))
        major, minor = int(digits[:-1]), int(digits[-1])
        return (major, minor) <= capability and (kind == "compute" or major == capability[0])

    built = f.torch.architectures
    for gpu in dict.fromkeys(f.torch.gpus):
        if built and f.torch.toolkit.startswith("CUDA") and not any(runs(name, gpu.capability) for name in built):
            sm = "sm_" + "".join(map(str, gpu.capability))
            yield {"name": gpu.name, "sm": sm, "built": ", ".join(built)}


def _throttled(f: Facts) -> Iterator[Mapping[str, Any]]:
    """Reasons that are in every reading; runs watch for reasons that come and go."""
    reasons = [set.intersection(*(set(r.throttled) for r in gpu.readings)) if gpu.readings else set() for gpu in f.gpus]
    for reason in sorted(set().union(*reasons)):
        yield {"which": _which(gpu for gpu, held in enumerate(reasons) if reason in held), "reason": reason}


def _gpus(key: Callable[[GpuFacts], Any], applies: Callable[[Any], object]) -> Cases:
    """Once for each value ``v`` of the key that applies, with the GPUs that have it."""

    def cases(f: Facts) -> Iterator[Mapping[str, Any]]:
        for value in dict.fromkeys(map(key, f.gpus)):
            if applies(value):
                yield {"which": _which(gpu for gpu, one in enumerate(f.gpus) if key(one) == value), "v": value}

    return cases


def _which(gpus: Iterable[int]) -> str:
    """The subject of a sentence that goes on with a participle."""
    numbers = list(gpus)
    return f"GPU {numbers[0]} is" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))} are"


def _lower(pair: tuple[float | None, float | None], tolerance: float = 1.0) -> bool:
    """Whether the first is lower than the second, if both are known."""
    value, most = pair
    return bool(value and most and value < tolerance * most)


def _busy(f: Facts) -> Iterator[Mapping[str, Any]]:
    for gpu, one in enumerate(f.gpus):
        c = one.condition
        used, percent, processes = c.used_memory_bytes or 0, c.utilisation or 0, c.processes or 0
        if used > _BUSY_MEMORY or percent >= _BUSY_PERCENT or processes:
            yield {"gpu": gpu, "n": _count(processes, "process", "es"), "used": format_bytes(used), "percent": percent}


def _ecc(*, corrected: bool) -> Cases:
    def cases(f: Facts) -> Iterator[Mapping[str, Any]]:
        for gpu, one in enumerate(f.gpus):
            fixed, wrong = one.condition.corrected_ecc_errors or 0, one.condition.uncorrected_ecc_errors or 0
            if fixed and not wrong and corrected:
                yield {"gpu": gpu, "n": _count(fixed, "corrected ECC error")}
            elif wrong and not corrected:
                yield {"gpu": gpu, "n": _count(wrong, "ECC error")}

    return cases


def _links(f: Facts) -> list[int]:
    """Active NVLinks of each GPU, if there are several."""
    return [sum(one.settings.nvlinks.values()) for one in f.gpus] if len(f.gpus) > 1 else []


def _set(*names: str) -> Cases:
    """Once for each of these variables that is set."""
    return lambda f: [{"name": n, "value": f.variables[n]} for n in names if f.variables.get(n, "0") not in ("0", "")]


def _other_work(least: float, most: float) -> Cases:
    return _if(lambda f: least <= f.busy_cores / f.cores < most, busy=lambda f: f.busy_cores, cores=lambda f: f.cores)


def _few_files(*, gpus: bool) -> Cases:
    return _if(
        lambda f: f.open_files is not None and f.open_files < _LEAST_OPEN_FILES and bool(f.torch.gpus) == gpus,
        n=lambda f: f.open_files,
    )


_FILES = "a process may open {n} files: many ranks or large checkpoints may need more"
_OTHER_WORK = "other processes keep {busy:.1f} of {cores} cores busy"
_WAIT = "end them or wait; each launch records how busy the machine was"
_FINDINGS: tuple[tuple[Severity, Cases, str, str], ...] = (
    ("note", _unusable("no GPU"), "torch is built for {f.torch.toolkit}, but there is no GPU here",
     "measure on the CPU, or install torch's CPU build, which dry runs need"),
    ("error", _unusable("CPU build"),
     "torch {f.torch.version} is a CPU build, but the machine has {kind}: it would measure the CPU",
     "install the build for the GPU: https://pytorch.org/get-started/locally"),
    ("error", _unusable("no driver"), "the machine has {kind}, but NVIDIA's driver is not loaded",
     "install the driver, or start the container with --gpus all"),
    ("error", _unusable("old driver"),
     "driver {f.driver} supports CUDA {cuda}, too old for torch's {f.torch.toolkit}",
     "install a newer driver, or the build of torch for an older CUDA"),
    ("error", _unusable("unknown"), "torch is built for {f.torch.toolkit} and cannot use {kind}{error}",
     "check CUDA_VISIBLE_DEVICES, the permissions of /dev/nvidia*, and that driver and libcuda match"),
    ("error", _unbuilt, "torch has no kernels for {name} ({sm}), only for {built}",
     "install a build of torch for a newer CUDA"),
    ("error", _if(lambda f: any(g.settings.mig for g in f.gpus),
                  which=lambda f: _which(i for i, g in enumerate(f.gpus) if g.settings.mig)),
     "{which} split by MIG: a run would measure one slice and compute MFU from the whole GPU's peak",
     "nvidia-smi -mig 0, or take other GPUs"),
    ("error", _busy, "GPU {gpu} is in use: {n}, {used}, {percent} % busy",
     "stop those processes (see nvidia-smi), or choose other GPUs with CUDA_VISIBLE_DEVICES"),
    ("error", _throttled, "{which} throttled all the time ({reason})",
     "check cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE)"),
    ("error", _ecc(corrected=False), "GPU {gpu} had {n} that could not be corrected",
     "reset the GPU (nvidia-smi -r) or the machine, and replace the GPU if they come again"),
    ("warning", _ecc(corrected=True), "GPU {gpu} had {n}",
     "watch it (nvidia-smi -q -d ECC): many of them slow memory down"),
    ("error", _set("CUDA_LAUNCH_BLOCKING"), "{name}={value}: kernels run one by one, and nothing overlaps",
     "unset {name}"),
    ("warning", _set("NCCL_P2P_DISABLE"), "{name}={value}: GPUs exchange data through the host's memory",
     "unset {name}"),
    ("warning", _set("NCCL_SHM_DISABLE"),
     "{name}={value}: GPUs that have no direct link exchange data over the network", "unset {name}"),
    ("warning", _set("NCCL_IB_DISABLE"), "{name}={value}: hosts exchange data over TCP", "unset {name}"),
    ("note", _if(lambda f: f.torch.tf32 and f.torch.gpus),
     "fp32 matrix products may use TF32: faster, but losses differ from those in full fp32",
     "for full fp32, unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    ("error", _other_work(0.5, float("inf")), _OTHER_WORK, _WAIT),
    ("warning", _other_work(0.1, 0.5), _OTHER_WORK, _WAIT),
    ("warning", _if(lambda f: f.torch.gpus and f.shm_bytes is not None and f.shm_bytes < _LEAST_SHM,
                    shm=lambda f: format_bytes(f.shm_bytes)),
     "/dev/shm has {shm}: NCCL and data loaders may fail", "start the container with --shm-size=8g or --ipc=host"),
    ("warning", _few_files(gpus=True), _FILES, f"ulimit -n {_LEAST_OPEN_FILES}"),
    ("note", _few_files(gpus=False), _FILES, f"ulimit -n {_LEAST_OPEN_FILES}"),
    ("warning", _if(lambda f: f.torch.gpus and f.locked_bytes is not None and f.locked_bytes < _LEAST_LOCKED,
                    locked=lambda f: format_bytes(f.locked_bytes)),
     "a process may lock {locked}: NCCL over InfiniBand or RoCE fails",
     "ulimit -l unlimited, or start the container with --ulimit memlock=-1"),
    ("error", _if(lambda f: f.cores < len(f.torch.gpus), cores=lambda f: f.cores, gpus=lambda f: len(f.torch.gpus)),
     "{cores} cores for {gpus} GPUs: ranks wait for each other's cores",
     "give the process more cores, or use fewer GPUs"),
    ("warning", _gpus(lambda g: (g.settings.power_limit_w, g.settings.default_power_limit_w),
                      lambda pair: _lower(pair, _POWER_TOLERANCE)),
     "{which} limited to {v[0]:g} of {v[1]:g} W", "nvidia-smi -pl {v[1]:g}, or say so with the results"),
    ("warning", _gpus(lambda g: (g.settings.application_sm_clock_mhz, g.settings.max_sm_clock_mhz), _lower),
     "{which} set to {v[0]} of {v[1]} MHz", "nvidia-smi -rac, or say so with the results"),
    ("warning", _gpus(lambda g: bool(g.readings) and all(r.capped for r in g.readings)
                      and g.settings.application_sm_clock_mhz is None, bool),
     "{which} held at locked clocks", "nvidia-smi -rgc, or say so with the results"),
    ("warning", _if(lambda f: _links(f) and not any(_links(f)), n=lambda f: len(f.gpus)),
     "no NVLink between the {n} GPUs: they communicate over PCIe",
     "ignore if the cards have no NVLink; else check nvidia-smi nvlink -s and the fabric manager"),
    ("warning", _if(lambda f: any(_links(f)) and len(set(_links(f))) > 1,
                    links=lambda f: ", ".join(map(str, _links(f)))),
     "the GPUs have unequal numbers of active NVLinks ({links}): the worst pair decides",
     "check nvidia-smi nvlink -s and nvidia-smi topo -m"),
    ("warning", _gpus(lambda g: g.condition.pcie_width, lambda width: width and width < 16),
     "{which} on PCIe x{v}", "put the card into a slot with 16 lanes, unless it has fewer itself"),
    ("warning", _gpus(lambda g: (g.condition.pcie_generation, g.condition.own_pcie_generation), _lower),
     "{which} on PCIe {v[0]}, but the card supports PCIe {v[1]}",
     "check the slot, the riser and the firmware's settings"),
    ("warning", _if(lambda f: (f.pci_gpus or f.driver) and not f.nvml),
     "nvidia-ml-py is not installed: power, clocks, throttling and links are unknown here and in records",
     install_extra("cuda")),
    ("warning", _if(lambda f: f.dry_run_obstacle and not f.torch.toolkit,
                    rule=lambda f: f.dry_run_obstacle.partition("; ")[0],
                    remedy=lambda f: f.dry_run_obstacle.partition("; ")[2]),
     "no dry runs: {rule}", "{remedy}"),
    ("note", _if(lambda f: 0 < len(f.torch.gpus) < len(f.gpus), seen=lambda f: len(f.torch.gpus),
                 there=lambda f: len(f.gpus)),
     "torch sees {seen} of the machine's {there} GPUs", "set CUDA_VISIBLE_DEVICES if it should see others"),
    ("note", lambda f: [{"name": n} for n in dict.fromkeys(g.name for g in f.torch.gpus if g.profile is None)],
     "no profile names '{name}', so its runs have no MFU",
     "add the name to also_named in the file of profiles/hardware that has its peaks, or add a file"),
)  # fmt: skip
"""Every finding: how grave it is, when it applies, and its sentence and remedy."""
