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
    missing = [f"the program {name}" for name in ("ip", "tc") if name not in facts.programs]
    network = [*(() if facts.root else ("root",)), *missing]
    slurm = "sbatch" in facts.programs
    return (
        _on_gpus(facts),
        Ability(
            name="measured on CPUs",
            possible=True,
            about=f"up to {_count(facts.cores, 'rank')} of one thread, over gloo",
        ),
        Ability(
            name="emulated",
            possible=True,
            about="any world size, one real rank on " + ("a GPU or the CPU" if facts.torch.gpus else "the CPU"),
        ),
        Ability(
            name="dry runs",
            possible=not facts.dry_run_obstacle,
            about=facts.dry_run_obstacle or "any script, cluster and world size",
        ),
        Ability(name="plans", possible=True, about="any world size"),
        Ability(
            name="network emulation",
            possible=not network,
            about=f"lacks {', '.join(network)}" if network else "hosts on this machine, joined by a limited link",
        ),
        Ability(
            name="Slurm",
            possible=slurm,
            about='launcher = "slurm"' if slurm else "sbatch not found; run refshard on a login node",
        ),
        Ability(
            name="cross-check of traces",
            possible=facts.hta,
            about="refshard trace --cross-check hta" if facts.hta else f"lacks HTA: {install_extra('hta')}",
        ),
        _strategies(facts),
    )


def _on_gpus(facts: Facts) -> Ability:
    gpus = facts.torch.gpus
    if not gpus:
        return Ability(name="measured on GPUs", possible=False, about="torch sees no GPU")
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return Ability(
        name="measured on GPUs", possible=True, about=f"up to {_count(len(gpus), 'rank')}: {', '.join(names)}"
    )


def _strategies(facts: Facts) -> Ability:
    here = facts.strategies - len(facts.unavailable)
    lacking = f"; not {', '.join(facts.unavailable)} (refshard list strategies says why)" if facts.unavailable else ""
    return Ability(name="strategies", possible=here > 0, about=f"{here} of {facts.strategies}{lacking}")


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
    kind = f"{nvidia} NVIDIA GPU{'' if nvidia == 1 else 's'}" if nvidia else "an AMD GPU"
    if not nvidia and not facts.amd_gpus:
        yield Finding(
            severity="note",
            says=f"torch is built for {toolkit}, but there is no GPU here",
            remedy="measure on the CPU, or install torch's CPU build, which dry runs need",
        )
    elif not toolkit:
        yield Finding(
            severity="error",
            says=f"torch {facts.torch.version} is a CPU build, but the machine has {kind}: it would measure the CPU",
            remedy="install the build for the GPU: https://pytorch.org/get-started/locally",
        )
    elif nvidia and not facts.driver:
        yield Finding(
            severity="error",
            says=f"the machine has {kind}, but NVIDIA's driver is not loaded",
            remedy="install the driver, or start the container with --gpus all",
        )
    elif _too_old(facts):
        yield Finding(
            severity="error",
            says=f"driver {facts.driver} supports CUDA {_version(facts.driver_cuda)}, too old for torch's {toolkit}",
            remedy="install a newer driver, or the build of torch for an older CUDA",
        )
    else:
        says = f"torch is built for {toolkit} and cannot use {kind}"
        yield Finding(
            severity="error",
            says=f"{says}: {facts.torch.error}" if facts.torch.error else says,
            remedy="check CUDA_VISIBLE_DEVICES, the permissions of /dev/nvidia*, and that driver and libcuda match",
        )


def _too_old(facts: Facts) -> bool:
    """A driver runs every CUDA of its own major version."""
    name, _, version = facts.torch.toolkit.partition(" ")
    return name == "CUDA" and facts.driver_cuda is not None and facts.driver_cuda // 1000 < int(version.split(".")[0])


def _version(cuda: int | None) -> str:
    return "of unknown version" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"


def _architectures(facts: Facts) -> Iterator[Finding]:
    built = facts.torch.architectures
    for gpu in dict.fromkeys(facts.torch.gpus):
        if built and facts.torch.toolkit.startswith("CUDA") and not any(_runs(name, gpu) for name in built):
            yield Finding(
                severity="error",
                says=f"torch has no kernels for {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}), only for "
                f"{', '.join(built)}",
                remedy="install a build of torch for a newer CUDA",
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
        yield Finding(
            severity="note",
            says=f"torch sees {seen} of the machine's {there} GPUs",
            remedy="set CUDA_VISIBLE_DEVICES if it should see others",
        )


def _profiles(facts: Facts) -> Iterator[Finding]:
    for name in dict.fromkeys(gpu.name for gpu in facts.torch.gpus if gpu.profile is None):
        yield Finding(
            severity="note",
            says=f"no profile names '{name}', so its runs have no MFU",
            remedy="add the name to also_named in the file of profiles/hardware that has its peaks, or add a file",
        )


def _sensors(facts: Facts) -> Iterator[Finding]:
    if (facts.pci_gpus or facts.driver) and not facts.nvml:
        yield Finding(
            severity="warning",
            says="nvidia-ml-py is not installed: power, clocks, throttling and links are unknown here and in records",
            remedy=install_extra("cuda"),
        )


def _throttled(facts: Facts) -> Iterator[Finding]:
    """In every reading: what comes and goes is what the steps of a run are watched for."""
    reasons = [
        set.intersection(*(set(one.throttled) for one in gpu.readings)) if gpu.readings else set() for gpu in facts.gpus
    ]
    for reason in sorted(set().union(*reasons)):
        which = _which(gpu for gpu, held in enumerate(reasons) if reason in held)
        yield Finding(
            severity="error",
            says=f"{which} throttled all the time ({reason})",
            remedy="check cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE)",
        )


def _power(facts: Facts) -> Iterator[Finding]:
    for gpus, (limit, default) in _groups(
        facts, lambda g: (g.settings.power_limit_w, g.settings.default_power_limit_w)
    ):
        if limit and default and limit < _POWER_TOLERANCE * default:
            yield Finding(
                severity="warning",
                says=f"{_which(gpus)} limited to {limit:g} of {default:g} W",
                remedy=f"nvidia-smi -pl {default:g}, or say so with the results",
            )


def _clocks(facts: Facts) -> Iterator[Finding]:
    for gpus, (clock, most) in _groups(
        facts, lambda g: (g.settings.application_sm_clock_mhz, g.settings.max_sm_clock_mhz)
    ):
        if clock and most and clock < most:
            yield Finding(
                severity="warning",
                says=f"{_which(gpus)} set to {clock} of {most} MHz",
                remedy="nvidia-smi -rac, or say so with the results",
            )
    locked = [
        gpu
        for gpu, one in enumerate(facts.gpus)
        if one.readings and all(r.capped for r in one.readings) and one.settings.application_sm_clock_mhz is None
    ]
    if locked:
        yield Finding(
            severity="warning",
            says=f"{_which(locked)} held at locked clocks",
            remedy="nvidia-smi -rgc, or say so with the results",
        )


def _busy(facts: Facts) -> Iterator[Finding]:
    for gpu, one in enumerate(facts.gpus):
        condition = one.condition
        used, percent, processes = (
            condition.used_memory_bytes or 0,
            condition.utilisation or 0,
            condition.processes or 0,
        )
        if used > _BUSY_MEMORY or percent >= _BUSY_PERCENT or processes:
            yield Finding(
                severity="error",
                says=f"GPU {gpu} is in use: {processes} process{'' if processes == 1 else 'es'}, {format_bytes(used)}, "
                f"{percent} % busy",
                remedy="stop those processes (see nvidia-smi), or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )


def _ecc(facts: Facts) -> Iterator[Finding]:
    for gpu, one in enumerate(facts.gpus):
        corrected, wrong = one.condition.corrected_ecc_errors or 0, one.condition.uncorrected_ecc_errors or 0
        if wrong:
            yield Finding(
                severity="error",
                says=f"GPU {gpu} had {wrong} ECC error{'' if wrong == 1 else 's'} that could not be corrected",
                remedy="reset the GPU (nvidia-smi -r) or the machine, and replace the GPU if they come again",
            )
        elif corrected:
            yield Finding(
                severity="warning",
                says=f"GPU {gpu} had {corrected} corrected ECC error{'' if corrected == 1 else 's'}",
                remedy="watch it (nvidia-smi -q -d ECC): many of them slow memory down",
            )


def _mig(facts: Facts) -> Iterator[Finding]:
    if on := [gpu for gpu, one in enumerate(facts.gpus) if one.settings.mig]:
        yield Finding(
            severity="error",
            says=f"{_which(on)} split by MIG: a run would measure one slice and compute MFU from the whole GPU's peak",
            remedy="nvidia-smi -mig 0, or take other GPUs",
        )


def _nvlinks(facts: Facts) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    links = [sum(one.settings.nvlinks.values()) for one in facts.gpus]
    if not any(links):
        yield Finding(
            severity="warning",
            says=f"no NVLink between the {len(links)} GPUs: they communicate over PCIe",
            remedy="ignore if the cards have no NVLink; else check nvidia-smi nvlink -s and the fabric manager",
        )
    elif len(set(links)) > 1:
        counts = ", ".join(map(str, links))
        yield Finding(
            severity="warning",
            says=f"the GPUs have unequal numbers of active NVLinks ({counts}): the worst pair decides",
            remedy="check nvidia-smi nvlink -s and nvidia-smi topo -m",
        )


def _pcie(facts: Facts) -> Iterator[Finding]:
    for gpus, width in _groups(facts, lambda g: g.condition.pcie_width):
        if width and width < 16:
            yield Finding(
                severity="warning",
                says=f"{_which(gpus)} on PCIe x{width}",
                remedy="put the card into a slot with 16 lanes, unless it has fewer itself",
            )
    for gpus, (now, own) in _groups(facts, lambda g: (g.condition.pcie_generation, g.condition.own_pcie_generation)):
        if now and own and now < own:
            yield Finding(
                severity="warning",
                says=f"{_which(gpus)} on PCIe {now}, but the card supports PCIe {own}",
                remedy="check the slot, the riser and the firmware's settings",
            )


def _host(facts: Facts) -> Iterator[Finding]:
    gpus = len(facts.torch.gpus)
    if gpus and facts.shm_bytes is not None and facts.shm_bytes < _LEAST_SHM:
        yield Finding(
            severity="warning",
            says=f"/dev/shm has {format_bytes(facts.shm_bytes)}: NCCL and data loaders may fail",
            remedy="start the container with --shm-size=8g or --ipc=host",
        )
    if facts.open_files is not None and facts.open_files < _LEAST_OPEN_FILES:
        yield Finding(
            severity="warning" if gpus else "note",
            says=f"a process may open {facts.open_files} files: many ranks or large checkpoints may need more",
            remedy=f"ulimit -n {_LEAST_OPEN_FILES}",
        )
    if gpus and facts.locked_bytes is not None and facts.locked_bytes < _LEAST_LOCKED:
        yield Finding(
            severity="warning",
            says=f"a process may lock {format_bytes(facts.locked_bytes)}: NCCL over InfiniBand or RoCE fails",
            remedy="ulimit -l unlimited, or start the container with --ulimit memlock=-1",
        )
    if facts.cores < gpus:
        yield Finding(
            severity="error",
            says=f"{facts.cores} cores for {gpus} GPUs: ranks wait for each other's cores",
            remedy="give the process more cores, or use fewer GPUs",
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
        yield Finding(severity="warning", says=f"no dry runs: {rule}", remedy=remedy)


def _variables(facts: Facts) -> Iterator[Finding]:
    given = facts.variables
    for name, says, severity in _DOUBTFUL:
        if given.get(name, "0") not in ("0", ""):
            found: Severity = severity
            yield Finding(severity=found, says=f"{name}={given[name]}: {says}", remedy=f"unset {name}")
    if facts.torch.tf32 and facts.torch.gpus:
        yield Finding(
            severity="note",
            says="fp32 matrix products may use TF32: faster, but losses differ from those in full fp32",
            remedy="for full fp32, unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
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
