"""Each finding from facts made by hand, and none from a machine with nothing wrong."""

import pytest
from msgspec.structs import replace

from refshard.measure.doctor import Facts, TorchGpu, findings
from refshard.measure.nvml import GpuReading
from tests.measure.doctor.machines import CPU_ONLY, CUDA, DGX, GIB, GPU, H100, with_all, with_gpu, with_readings

HOT = GpuReading(throttled=("temperature",))
CAPPED = GpuReading(capped=True)
UNSEEN = replace(DGX, torch=replace(CUDA, gpus=()))
CPU_BUILD = replace(CPU_ONLY, pci_gpus=4, driver="570.86.15", driver_cuda=12080, nvml=True, gpus=(GPU,) * 4)


@pytest.mark.parametrize("facts", [CPU_ONLY, DGX])
def test_a_machine_with_nothing_wrong_has_no_findings(facts: Facts) -> None:
    assert findings(facts) == ()


E, W, N = "error", "warning", "note"


@pytest.mark.parametrize(
    ("severity", "facts", "says", "remedy"),
    [
        (E, CPU_BUILD, "torch 2.13.0+cpu is a CPU build, but the machine has 4 NVIDIA GPUs: it would measure the CPU",
         "install the build for the GPU"),
        (E, replace(CPU_ONLY, amd_gpus=True),
         "torch 2.13.0+cpu is a CPU build, but the machine has an AMD GPU: it would "
         "measure the CPU", "install the build for the GPU"),
        (E, replace(UNSEEN, driver="", driver_cuda=None, gpus=(), pci_gpus=1),
         "the machine has 1 NVIDIA GPU, but NVIDIA's driver is not loaded", "install the driver"),
        (E, replace(UNSEEN, driver="470.1", driver_cuda=11040),
         "driver 470.1 supports CUDA 11.4, too old for torch's CUDA 12.8", "install a newer driver"),
        (E, replace(UNSEEN, torch=replace(CUDA, gpus=(), error="CUDA unknown error")),
         "torch is built for CUDA 12.8 and cannot use 4 NVIDIA GPUs: CUDA unknown error", "check CUDA_VISIBLE_DEVICES"),
        (E, replace(DGX, torch=replace(CUDA, architectures=("sm_80", "sm_100"))),
         "torch has no kernels for NVIDIA H100 80GB HBM3 (sm_90), only for sm_80, sm_100", "install a build of torch"),
        (E, with_gpu(1, "settings", mig=True),
         "GPU 1 is split by MIG: a run would measure one slice and compute MFU from the whole GPU's peak",
         "nvidia-smi -mig 0"),
        (E, with_gpu(2, "condition", processes=1, used_memory_bytes=20 * GIB, utilisation=97),
         "GPU 2 is in use: 1 process, 20.0 GiB, 97 % busy", "stop those processes"),
        (E, with_readings(3, HOT, HOT), "GPU 3 is throttled all the time (temperature)", "check cooling"),
        (E, with_gpu(0, "condition", uncorrected_ecc_errors=2, corrected_ecc_errors=9),
         "GPU 0 had 2 ECC errors that could not be corrected", "reset the GPU"),
        (E, replace(DGX, cores=3),
         "3 cores for 4 GPUs: ranks wait for each other's cores", "give the process more cores"),
        (E, replace(CPU_ONLY, busy_cores=32.0), "other processes keep 32.0 of 64 cores busy", "end them or wait"),
        (E, replace(DGX, variables={"CUDA_LAUNCH_BLOCKING": "1"}),
         "CUDA_LAUNCH_BLOCKING=1: kernels run one by one, and nothing overlaps", "unset CUDA_LAUNCH_BLOCKING"),
        (W, with_all("settings", power_limit_w=500.0), "GPUs 0, 1, 2, 3 are limited to 500 of 700 W", "nvidia-smi -pl"),
        (W, with_gpu(2, "settings", power_limit_w=350.0), "GPU 2 is limited to 350 of 700 W", "nvidia-smi -pl 700"),
        (W, with_gpu(1,
         "settings", application_sm_clock_mhz=1200), "GPU 1 is set to 1200 of 1980 MHz", "nvidia-smi -rac"),
        (W, with_readings(1, CAPPED, CAPPED), "GPU 1 is held at locked clocks", "nvidia-smi -rgc"),
        (W, with_gpu(1, "condition", corrected_ecc_errors=1), "GPU 1 had 1 corrected ECC error", "watch it"),
        (W, with_all("settings", nvlinks={}), "no NVLink between the 4 GPUs: they communicate over PCIe", "ignore if"),
        (W, with_gpu(3, "settings", nvlinks={"switch": 17}),
         "the GPUs have unequal numbers of active NVLinks (18, 18, 18, 17): the worst pair decides", "check nvidia"),
        (W, with_gpu(3, "condition", pcie_width=8), "GPU 3 is on PCIe x8", "put the card into a slot with 16 lanes"),
        (W, with_all("condition", pcie_generation=4),
         "GPUs 0, 1, 2, 3 are on PCIe 4, but the card supports PCIe 5", "check"),
        (W, replace(DGX, shm_bytes=64 * 2**20), "/dev/shm has 64.0 MiB: NCCL and data loaders may fail", "start the"),
        (W, replace(DGX, open_files=1024),
         "a process may open 1024 files: many ranks or large checkpoints may need more",
         "ulimit -n 4096"),
        (W, replace(DGX, locked_bytes=8 * 2**20), "a process may lock 8.00 MiB: NCCL over InfiniBand or RoCE fails",
         "ulimit -l unlimited"),
        (W, replace(CPU_ONLY, busy_cores=8.0), "other processes keep 8.0 of 64 cores busy", "end them or wait"),
        (W, replace(DGX, nvml=False, gpus=()), "nvidia-ml-py is not installed: power, clocks, throttling and links are "
         "unknown here and in records", "pip install -e '.[cuda]' in refshard's checkout"),
        (W, replace(CPU_ONLY, dry_run_obstacle="building needs a C++ compiler; install g++"),
         "no dry runs: building needs a C++ compiler", "install g++"),
        (W, replace(DGX, variables={"NCCL_P2P_DISABLE": "1"}),
         "NCCL_P2P_DISABLE=1: GPUs exchange data through the host's memory", "unset NCCL_P2P_DISABLE"),
        (N, replace(CPU_ONLY, torch=replace(CUDA, gpus=())),
         "torch is built for CUDA 12.8, but there is no GPU here", ""),
        (N, replace(DGX, torch=replace(CUDA, gpus=(H100,) * 2)), "torch sees 2 of the machine's 4 GPUs", ""),
        (N, replace(DGX, torch=replace(CUDA, gpus=(replace(H100, name="X1", profile=None),) * 4)),
         "no profile names 'X1', so its runs have no MFU", ""),
        (N, replace(DGX, torch=replace(CUDA, tf32=True)),
         "fp32 matrix products may use TF32: faster, but losses differ from those in full fp32", ""),
        (N, replace(CPU_ONLY, open_files=1024),
         "a process may open 1024 files: many ranks or large checkpoints may need "
         "more", ""),
    ],
)  # fmt: skip
def test_each_finding_has_its_severity_sentence_and_remedy(severity: str, facts: Facts, says: str, remedy: str) -> None:
    (found,) = findings(facts)
    assert (found.severity, found.says) == (severity, says)
    assert found.remedy.startswith(remedy)
    assert found.remedy


@pytest.mark.parametrize(
    "facts",
    [
        with_readings(0, HOT, GpuReading(), HOT),  # it comes and goes
        with_gpu(0, "condition", pcie_width=None, pcie_generation=None, utilisation=None, processes=None),
        with_gpu(0, "settings", power_limit_w=None, application_sm_clock_mhz=None, mig=None),
        replace(DGX, gpus=(replace(GPU, readings=()),) * 4),
        replace(DGX, variables={"CUDA_LAUNCH_BLOCKING": "0"}),
        replace(DGX, driver_cuda=12020),  # a driver runs every CUDA of its major version
        replace(DGX, gpus=DGX.gpus[:1], torch=replace(CUDA, gpus=(H100,))),
        replace(CPU_ONLY, locked_bytes=8 * 2**20, shm_bytes=64 * 2**20, cores=1, busy_cores=0.05),
    ],
)  # fmt: skip
def test_what_is_unknown_passing_or_harmless_is_no_finding(facts: Facts) -> None:
    assert findings(facts) == ()


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80", "sm_90"), (9, 0), True),
        (("sm_80",), (8, 9), True),  # a later minor version
        (("sm_90",), (8, 9), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),  # PTX is compiled as it is loaded
        (("sm_90a",), (9, 0), True),
        (("sm_100", "sm_120"), (12, 0), True),
        (("sm_100",), (12, 0), False),
    ],
)
def test_kernels_run_on_later_devices_of_their_major_version(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    gpu = TorchGpu(name="X", memory_bytes=1, capability=capability, profile="x")
    facts = replace(DGX, torch=replace(CUDA, architectures=architectures, gpus=(gpu,) * 4))
    assert any("no kernels" in finding.says for finding in findings(facts)) is not runs


def test_the_gravest_come_first() -> None:
    facts = replace(with_gpu(0, "settings", power_limit_w=500.0, mig=True), torch=replace(CUDA, tf32=True))
    assert [finding.severity for finding in findings(facts)] == ["error", "warning", "note"]
