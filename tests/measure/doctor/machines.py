"""Machines that exist on paper only."""

from typing import Any

from msgspec.structs import replace

from refshard.measure.doctor import Facts, GpuFacts, TorchFacts, TorchGpu
from refshard.measure.nvml import GpuCondition, GpuReading
from refshard.records import GpuSettings

GIB = 2**30
CPU_ONLY = Facts(
    refshard="0.1.0", python="3.11.7", os="Linux 6.8", cpu="EPYC", physical_cores=32, cores=64, memory_bytes=512 * GIB,
    busy_cores=0.2, shm_bytes=256 * GIB, open_files=2**20, locked_bytes=None, root=True,
    torch=TorchFacts(version="2.13.0+cpu"), programs=("ip", "tc"), strategies=28,
)  # fmt: skip
"""A quiet machine without a GPU: nothing is wrong with it."""
H100 = TorchGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85 * 10**9, capability=(9, 0), profile="h100-sxm-80gb")
GPU = GpuFacts(
    settings=GpuSettings(
        power_limit_w=700.0, default_power_limit_w=700.0, max_sm_clock_mhz=1980, ecc=True, mig=False,
        nvlinks={"switch": 18},
    ),
    condition=GpuCondition(
        name=H100.name, memory_bytes=80 * GIB, used_memory_bytes=600 * 2**20, utilisation=0, processes=0, pcie_width=16,
        own_pcie_width=16, pcie_generation=5, own_pcie_generation=5, corrected_ecc_errors=0, uncorrected_ecc_errors=0,
    ),
    readings=(GpuReading(power_w=70.0, sm_clock_mhz=1980),) * 5,
)  # fmt: skip
CUDA = TorchFacts(
    version="2.13.0+cu128", toolkit="CUDA 12.8", architectures=("sm_80", "sm_90", "sm_100", "compute_120"),
    gpus=(H100,) * 4,
)  # fmt: skip
DGX = replace(
    CPU_ONLY, torch=CUDA, pci_gpus=4, driver="570.86.15", driver_cuda=12080, nvml=True, gpus=(GPU,) * 4,
    dry_run_obstacle="the fake CUDA device needs torch's CPU build; create an environment",
)  # fmt: skip
"""Four H100s, with nothing wrong."""


def with_gpu(index: int, part: str, **changes: Any) -> Facts:
    """The machine with four GPUs, with ``changes`` in one ``part`` (settings, condition) of one of them."""
    changed = replace(GPU, **{part: replace(getattr(GPU, part), **changes)})
    return replace(DGX, gpus=tuple(changed if gpu == index else one for gpu, one in enumerate(DGX.gpus)))


def with_all(part: str, **changes: Any) -> Facts:
    """The machine with four GPUs, with ``changes`` in one ``part`` of all of them."""
    return replace(DGX, gpus=(replace(GPU, **{part: replace(getattr(GPU, part), **changes)}),) * 4)


def with_readings(index: int, *readings: GpuReading) -> Facts:
    """The machine with four GPUs, with other readings of one of them."""
    changed = replace(GPU, readings=readings)
    return replace(DGX, gpus=tuple(changed if gpu == index else one for gpu, one in enumerate(DGX.gpus)))


SHARED = replace(
    with_gpu(1, "settings", power_limit_w=500.0, mig=True), torch=replace(CUDA, tf32=True), busy_cores=8.0,
    variables={"NCCL_ALGO": "Ring", "CUDA_LAUNCH_BLOCKING": "1"}, programs=("ip", "sbatch"), root=False,
    unavailable={"yafsdp": "why", "megatron-fsdp": "why"},
)  # fmt: skip
"""Four H100s that others use, too."""
