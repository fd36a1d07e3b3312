"""NVIDIA GPUs through NVML: settings, clocks, power, throttling, links, errors.

It comes with the optional package nvidia-ml-py. Without it, without a GPU or on the fake device there are no sensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from refshard.fakecuda.activate import is_active
from refshard.records import GpuSettings

THROTTLING = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons that hold clocks below the requested ones, and their names here."""
_CAPPED = 0x02
"""The bit that says that somebody set or locked the clocks."""
_GPU, _SWITCH = 0, 2
"""What NVML says is at the other end of a link: nvmlIntNvLinkDeviceType_t."""
_NO_SUCH_LINK = "GPU elsewhere"


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment; None if unknown. ``capped``: somebody set or locked its clocks."""

    power_w: float | None = None
    sm_clock_mhz: int | None = None
    throttled: tuple[str, ...] = ()
    capped: bool = False


class GpuCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What else may make one GPU slow or unreliable; None if unknown.

    ``pcie_generation`` is the highest of GPU and slot together (the current one falls when the GPU is idle),
    ``own_pcie_generation`` the GPU's. ECC errors count since the last boot.
    """

    name: str = ""
    memory_bytes: int | None = None
    used_memory_bytes: int | None = None
    utilisation: int | None = None
    processes: int | None = None
    pcie_width: int | None = None
    own_pcie_width: int | None = None
    pcie_generation: int | None = None
    own_pcie_generation: int | None = None
    corrected_ecc_errors: int | None = None
    uncorrected_ecc_errors: int | None = None


class GpuSensors(ABC):
    """Reads the GPUs 0 to ``count - 1``, in torch's order if torch sees them."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of GPUs."""

    @abstractmethod
    def driver(self) -> str:
        """Version of the driver."""

    @abstractmethod
    def cuda(self) -> int | None:
        """The newest CUDA version that the driver supports, 1000 * major + 10 * minor."""

    @abstractmethod
    def settings(self, gpu: int) -> GpuSettings:
        """How a GPU is set up."""

    @abstractmethod
    def reading(self, gpu: int) -> GpuReading:
        """Power, clock and throttling at this moment."""

    @abstractmethod
    def condition(self, gpu: int) -> GpuCondition:
        """Memory in use, links to the host and errors."""


def visible_uuids() -> list[str]:
    """UUIDs of the GPUs that torch sees, in its order."""
    count = torch.cuda.device_count()
    return [str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) for index in range(count)]


@contextmanager
def gpu_sensors(uuids: Sequence[str] | None = None) -> Iterator[GpuSensors | None]:
    """The GPUs with these UUIDs, as torch writes them, or all of the machine; None without NVML, or if it fails."""
    if is_active() or find_spec("pynvml") is None:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        yield None
        return
    try:
        if uuids is None:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        else:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    except pynvml.NVMLError:
        handles = []
    try:
        yield Nvml(pynvml, handles) if handles else None
    finally:
        pynvml.nvmlShutdown()


class Nvml(GpuSensors):
    """The GPUs of ``handles``, read through ``library``, the module ``pynvml``.

    Each query is made on its own: many GPUs support only some.
    """

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = list(handles)

    @property
    def count(self) -> int:
        return len(self._handles)

    def driver(self) -> str:
        return str(self._ask(self._library.nvmlSystemGetDriverVersion) or "")

    def cuda(self) -> int | None:
        return self._ask(self._library.nvmlSystemGetCudaDriverVersion)

    def settings(self, gpu: int) -> GpuSettings:
        nvml, handle = self._library, self._handles[gpu]

        def clocks(question: Callable[..., int]) -> list[int | None]:
            return [self._ask(question, handle, kind) for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)]

        max_sm, max_memory = clocks(nvml.nvmlDeviceGetMaxClockInfo)
        application = clocks(nvml.nvmlDeviceGetApplicationsClock)
        if application == clocks(nvml.nvmlDeviceGetDefaultApplicationsClock):
            application = [None, None]  # nobody set them
        ecc, mig = (self._ask(ask, handle) for ask in (nvml.nvmlDeviceGetEccMode, nvml.nvmlDeviceGetMigMode))
        return GpuSettings(
            power_limit_w=self._watts(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            default_power_limit_w=self._watts(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
            max_sm_clock_mhz=max_sm,
            max_memory_clock_mhz=max_memory,
            application_sm_clock_mhz=application[0],
            application_memory_clock_mhz=application[1],
            ecc=None if ecc is None else bool(ecc[0]),
            mig=None if mig is None else bool(mig[0]),
            nvlinks=self._nvlinks(handle),
        )

    def reading(self, gpu: int) -> GpuReading:
        nvml, handle = self._library, self._handles[gpu]
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return GpuReading(
            power_w=self._watts(nvml.nvmlDeviceGetPowerUsage, handle),
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            throttled=tuple(reason for bit, reason in THROTTLING.items() if bits & bit),
            capped=bool(bits & _CAPPED),
        )

    def condition(self, gpu: int) -> GpuCondition:
        nvml, handle = self._library, self._handles[gpu]
        queries = (
            nvml.nvmlDeviceGetMemoryInfo,
            nvml.nvmlDeviceGetUtilizationRates,
            nvml.nvmlDeviceGetComputeRunningProcesses,
        )
        memory, busy, processes = (self._ask(ask, handle) for ask in queries)
        corrected, uncorrected = (
            self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
            for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        )
        return GpuCondition(
            name=str(self._ask(nvml.nvmlDeviceGetName, handle) or ""),
            memory_bytes=memory.total if memory else None,
            used_memory_bytes=memory.used if memory else None,
            utilisation=busy.gpu if busy else None,
            processes=None if processes is None else len(processes),
            pcie_width=self._ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            own_pcie_width=self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            pcie_generation=self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            own_pcie_generation=self._ask(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle),
            corrected_ecc_errors=corrected,
            uncorrected_ecc_errors=uncorrected,
        )

    def _nvlinks(self, handle: Any) -> dict[str, int]:
        """Active links of a GPU by what is at their other end."""
        nvml, found = self._library, dict[str, int]()
        places = {self._bus(one): f"GPU {gpu}" for gpu, one in enumerate(self._handles)}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link):
                continue
            kind = self._ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            remote = self._ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link) if kind in (None, _GPU) else None
            end = "switch" if kind == _SWITCH else places.get(remote.busId if remote else None, _NO_SUCH_LINK)
            found[end] = found.get(end, 0) + 1
        return found

    def _bus(self, handle: Any) -> object:
        info = self._ask(self._library.nvmlDeviceGetPciInfo, handle)
        return info.busId if info else handle

    def _watts(self, question: Callable[..., Any], handle: Any) -> float | None:
        milliwatts = self._ask(question, handle)
        return None if milliwatts is None else milliwatts / 1000

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any | None:
        """The answer; None if this GPU or this driver has none."""
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None
