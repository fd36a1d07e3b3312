"""What would make measurements on this machine wrong or slow, and what can run here: from facts alone."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import msgspec

from refshard.measure.doctor.facts import Facts, GpuFacts, TorchGpu
from refshard.quantities import GIB, format_bytes
from refshard.resources import install_extra


class Ability(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that refshard does: whether it can here, and to what extent, or what it lacks."""

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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
Severity = Literal["error", "warning", "note"]
"""error: measurements would be wrong or impossible; warning: slower or less steady than the machine could be; note: all
else that is good to know.
"""
_LEAST_SHM = GIB
_LEAST_OPEN_FILES = 4096
_LEAST_LOCKED = 64 * 2**20
_BUSY_MEMORY = GIB
"""What a GPU may hold with nobody on it: the driver's own."""
_BUSY_PERCENT = 10
_POWER_TOLERANCE = 0.99


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    severity: Severity
    says: str
    remedy: str


def _error(says: str, remedy: str) -> Finding:
    return Finding(severity="error", says=says, remedy=remedy)


def _warning(says: str, remedy: str) -> Finding:
    return Finding(severity="warning", says=says, remedy=remedy)


def _note(says: str, remedy: str) -> Finding:
    return Finding(severity="note", says=says, remedy=remedy)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """All findings about a machine, the gravest first."""
    order = ("error", "warning", "note")
    found = [finding for check in _CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _torch_build(facts: Facts) -> Iterator[Finding]:
    """Whether torch can use the GPUs that are here at all."""
    seen, toolkit = facts.torch.gpus, facts.torch.toolkit
    nvidia = max(facts.pci_gpus, len(facts.gpus))
    if seen or not (nvidia or facts.amd_gpus or toolkit):
        return
    cuda, needed = facts.driver_cuda, int(toolkit[5:].split(".")[0]) if toolkit.startswith("CUDA ") else 0
    kind = f"{nvidia} NVIDIA GPU{'' if nvidia == 1 else 's'}" if nvidia else "an AMD GPU"
    if not nvidia and not facts.amd_gpus:
        yield _note(
            f"torch is built for {toolkit}, but there is no GPU here",
            "measure on the CPU, or install torch's CPU build, which dry runs need",
        )
    elif not toolkit:
        yield _error(
            f"torch {facts.torch.version} is a CPU build, but the machine has {kind}: it would measure the CPU",
            "install the build for the GPU: https://pytorch.org/get-started/locally",
        )
    elif nvidia and not facts.driver:
        yield _error(
            f"the machine has {kind}, but NVIDIA's driver is not loaded",
            "install the driver, or start the container with --gpus all",
        )
    elif cuda is not None and cuda // 1000 < needed:  # a driver runs every CUDA of its own major version
        supports = f"driver {facts.driver} supports CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        yield _error(
            f"{supports}, too old for torch's {toolkit}",
            "install a newer driver, or the build of torch for an older CUDA",
        )
    else:
        says = f"torch is built for {toolkit} and cannot use {kind}"
        yield _error(
            f"{says}: {facts.torch.error}" if facts.torch.error else says,
            "check CUDA_VISIBLE_DEVICES, the permissions of /dev/nvidia*, and that driver and libcuda match",
        )


def _architectures(facts: Facts) -> Iterator[Finding]:
    built = facts.torch.architectures
    for gpu in dict.fromkeys(facts.torch.gpus):
        if built and facts.torch.toolkit.startswith("CUDA") and not any(_runs(name, gpu) for name in built):
            yield _error(
                f"torch has no kernels for {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}), only for "
                f"{', '.join(built)}",
                "install a build of torch for a newer CUDA",
            )


def _runs(architecture: str, gpu: TorchGpu) -> bool:
    """Kernels (sm) run on later devices of the same major version; PTX (compute) on all later ones; sm_90a on one."""
    kind, _, digits = architecture.partition("_")
    if not digits.isdigit():
        return digits.rstrip("af") == "".join(map(str, gpu.capability))
    major, minor = int(digits[:-1]), int(digits[-1])
    return (major, minor) <= gpu.capability and (kind == "compute" or major == gpu.capability[0])


def _seen_in_part(facts: Facts) -> Iterator[Finding]:
    seen, there = len(facts.torch.gpus), len(facts.gpus)
    if 0 < seen < there:
        yield _note(
            f"torch sees {seen} of the machine's {there} GPUs", "set CUDA_VISIBLE_DEVICES if it should see others"
        )


def _profiles(facts: Facts) -> Iterator[Finding]:
    for name in dict.fromkeys(gpu.name for gpu in facts.torch.gpus if gpu.profile is None):
        yield _note(
            f"no profile names '{name}', so its runs have no MFU",
            "add the name to also_named in the file of profiles/hardware that has its peaks, or add a file",
        )


def _sensors(facts: Facts) -> Iterator[Finding]:
    if (facts.pci_gpus or facts.driver) and not facts.nvml:
        yield _warning(
            "nvidia-ml-py is not installed: power, clocks, throttling and links are unknown here and in records",
            install_extra("cuda"),
        )


def _throttled(facts: Facts) -> Iterator[Finding]:
    """In every reading: what comes and goes is what the steps of a run are watched for."""
    reasons = [
        set.intersection(*(set(one.throttled) for one in gpu.readings)) if gpu.readings else set() for gpu in facts.gpus
    ]
    for reason in sorted(set().union(*reasons)):
        which = _which(gpu for gpu, held in enumerate(reasons) if reason in held)
        yield _error(
            f"{which} throttled all the time ({reason})",
            "check cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE)",
        )


def _power(facts: Facts) -> Iterator[Finding]:
    for gpus, (limit, default) in _groups(
        facts, lambda g: (g.settings.power_limit_w, g.settings.default_power_limit_w)
    ):
        if limit and default and limit < _POWER_TOLERANCE * default:
            yield _warning(
                f"{_which(gpus)} limited to {limit:g} of {default:g} W",
                f"nvidia-smi -pl {default:g}, or say so with the results",
            )


def _clocks(facts: Facts) -> Iterator[Finding]:
    for gpus, (clock, most) in _groups(
        facts, lambda g: (g.settings.application_sm_clock_mhz, g.settings.max_sm_clock_mhz)
    ):
        if clock and most and clock < most:
            yield _warning(
                f"{_which(gpus)} set to {clock} of {most} MHz", "nvidia-smi -rac, or say so with the results"
            )
    locked = [
        gpu
        for gpu, one in enumerate(facts.gpus)
        if one.readings and all(r.capped for r in one.readings) and one.settings.application_sm_clock_mhz is None
    ]
    if locked:
        yield _warning(f"{_which(locked)} held at locked clocks", "nvidia-smi -rgc, or say so with the results")


def _busy(facts: Facts) -> Iterator[Finding]:
    for gpu, one in enumerate(facts.gpus):
        condition = one.condition
        used, percent, processes = (
            condition.used_memory_bytes or 0,
            condition.utilisation or 0,
            condition.processes or 0,
        )
        if used > _BUSY_MEMORY or percent >= _BUSY_PERCENT or processes:
            yield _error(
                f"GPU {gpu} is in use: {processes} process{'' if processes == 1 else 'es'}, {format_bytes(used)}, "
                f"{percent} % busy",
                "stop those processes (see nvidia-smi), or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )


def _ecc(facts: Facts) -> Iterator[Finding]:
    for gpu, one in enumerate(facts.gpus):
        corrected, wrong = one.condition.corrected_ecc_errors or 0, one.condition.uncorrected_ecc_errors or 0
        if wrong:
            yield _error(
                f"GPU {gpu} had {wrong} ECC error{'' if wrong == 1 else 's'} that could not be corrected",
                "reset the GPU (nvidia-smi -r) or the machine, and replace the GPU if they come again",
            )
        elif corrected:
            yield _warning(
                f"GPU {gpu} had {corrected} corrected ECC error{'' if corrected == 1 else 's'}",
                "watch it (nvidia-smi -q -d ECC): many of them slow memory down",
            )


def _mig(facts: Facts) -> Iterator[Finding]:
    if on := [gpu for gpu, one in enumerate(facts.gpus) if one.settings.mig]:
        yield _error(
            f"{_which(on)} split by MIG: a run would measure one slice and compute MFU from the whole GPU's peak",
            "nvidia-smi -mig 0, or take other GPUs",
        )


def _nvlinks(facts: Facts) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    links = [sum(one.settings.nvlinks.values()) for one in facts.gpus]
    if not any(links):
        yield _warning(
            f"no NVLink between the {len(links)} GPUs: they communicate over PCIe",
            "ignore if the cards have no NVLink; else check nvidia-smi nvlink -s and the fabric manager",
        )
    elif len(set(links)) > 1:
        counts = ", ".join(map(str, links))
        yield _warning(
            f"the GPUs have unequal numbers of active NVLinks ({counts}): the worst pair decides",
            "check nvidia-smi nvlink -s and nvidia-smi topo -m",
        )


def _pcie(facts: Facts) -> Iterator[Finding]:
    for gpus, width in _groups(facts, lambda g: g.condition.pcie_width):
        if width and width < 16:
            yield _warning(
                f"{_which(gpus)} on PCIe x{width}", "put the card into a slot with 16 lanes, unless it has fewer itself"
            )
    for gpus, (now, own) in _groups(facts, lambda g: (g.condition.pcie_generation, g.condition.own_pcie_generation)):
        if now and own and now < own:
            yield _warning(
                f"{_which(gpus)} on PCIe {now}, but the card supports PCIe {own}",
                "check the slot, the riser and the firmware's settings",
            )


def _host(facts: Facts) -> Iterator[Finding]:
    gpus = len(facts.torch.gpus)
    if gpus and facts.shm_bytes is not None and facts.shm_bytes < _LEAST_SHM:
        yield _warning(
            f"/dev/shm has {format_bytes(facts.shm_bytes)}: NCCL and data loaders may fail",
            "start the container with --shm-size=8g or --ipc=host",
        )
    if facts.open_files is not None and facts.open_files < _LEAST_OPEN_FILES:
        yield Finding(
            severity="warning" if gpus else "note",
            says=f"a process may open {facts.open_files} files: many ranks or large checkpoints may need more",
            remedy=f"ulimit -n {_LEAST_OPEN_FILES}",
        )
    if gpus and facts.locked_bytes is not None and facts.locked_bytes < _LEAST_LOCKED:
        yield _warning(
            f"a process may lock {format_bytes(facts.locked_bytes)}: NCCL over InfiniBand or RoCE fails",
            "ulimit -l unlimited, or start the container with --ulimit memlock=-1",
        )
    if facts.cores < gpus:
        yield _error(
            f"{facts.cores} cores for {gpus} GPUs: ranks wait for each other's cores",
            "give the process more cores, or use fewer GPUs",
        )


def _load(facts: Facts) -> Iterator[Finding]:
    part = facts.busy_cores / facts.cores
    if part >= 0.1:
        yield Finding(
            severity="error" if part >= 0.5 else "warning",
            says=f"other processes keep {facts.busy_cores:.1f} of {facts.cores} cores busy",
            remedy="end them or wait; each launch records how busy the machine was",
        )


def _dry_runs(facts: Facts) -> Iterator[Finding]:
    if facts.dry_run_obstacle and not facts.torch.toolkit:
        rule, _, remedy = facts.dry_run_obstacle.partition("; ")
        yield _warning(f"no dry runs: {rule}", remedy)


def _variables(facts: Facts) -> Iterator[Finding]:
    given = facts.variables
    for name, says, severity in _DOUBTFUL:
        if given.get(name, "0") not in ("0", ""):
            yield Finding(severity=severity, says=f"{name}={given[name]}: {says}", remedy=f"unset {name}")
    if facts.torch.tf32 and facts.torch.gpus:
        yield _note(
            "fp32 matrix products may use TF32: faster, but losses differ from those in full fp32",
            "for full fp32, unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        )


_DOUBTFUL: tuple[tuple[str, str, Severity], ...] = (
    ("CUDA_LAUNCH_BLOCKING", "kernels run one by one, and nothing overlaps", "error"),
    ("NCCL_P2P_DISABLE", "GPUs exchange data through the host's memory", "warning"),
    ("NCCL_SHM_DISABLE", "GPUs that have no direct link exchange data over the network", "warning"),
    ("NCCL_IB_DISABLE", "hosts exchange data over TCP", "warning"),
)
"""Variables that slow everything down when they are set, and how."""


def _groups(facts: Facts, key: Callable[[GpuFacts], T]) -> Iterator[tuple[list[int], T]]:
    """GPUs that have the same value, and the value."""
    for value in dict.fromkeys(map(key, facts.gpus)):
        yield [gpu for gpu, one in enumerate(facts.gpus) if key(one) == value], value


def _which(gpus: Iterable[int]) -> str:
    """The subject of a sentence that goes on with a participle."""
    numbers = list(gpus)
    return f"GPU {numbers[0]} is" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))} are"


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _torch_build, _architectures, _mig, _busy, _throttled, _ecc, _variables, _load, _host, _power, _clocks, _nvlinks,
    _pcie, _sensors, _dry_runs, _seen_in_part, _profiles,
)  # fmt: skip
