"""GPUs that exist on paper only: sensors for the harness, and a library for what asks NVML."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from refshard.measure.nvml import GpuCondition, GpuReading, GpuSensors
from refshard.records import GpuSettings


class FakeSensors(GpuSensors):
    """``readings[gpu]`` are told one after the other; the last one again and again."""

    def __init__(self, readings: Sequence[Sequence[GpuReading]], settings: Sequence[GpuSettings] = ()) -> None:
        self._readings = [list(of_gpu) for of_gpu in readings]
        self._settings = list(settings) or [GpuSettings() for _ in readings]

    @property
    def count(self) -> int:
        return len(self._readings)

    def driver(self) -> str:
        return "570.86.15"

    def cuda(self) -> int | None:
        return 12080

    def settings(self, gpu: int) -> GpuSettings:
        return self._settings[gpu]

    def reading(self, gpu: int) -> GpuReading:
        left = self._readings[gpu]
        return left.pop(0) if len(left) > 1 else left[0]

    def condition(self, gpu: int) -> GpuCondition:
        return GpuCondition()


class NoAnswerError(Exception):
    """What the library raises for a question that a GPU does not answer."""


@dataclass
class FakeLibrary:
    """The part of pynvml that refshard calls. ``answers[gpu][function]`` are its answers; others are refused."""

    answers: list[dict[str, Any]]
    NVMLError: type[Exception] = NoAnswerError
    NVML_CLOCK_SM: int = 1
    NVML_CLOCK_MEM: int = 2
    NVML_VOLATILE_ECC: int = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED: int = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int = 1
    NVML_NVLINK_MAX_LINKS: int = 4
    asked: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(handle: int = 0, *arguments: Any) -> Any:
            self.asked.add(name)
            found = self.answers[handle].get(name)
            if isinstance(found, dict):
                found = found.get(arguments[0])
            if found is None:
                raise NoAnswerError(name)
            return found

        return answer


def bus(place: str) -> SimpleNamespace:
    """What NVML calls a place on the PCI bus."""
    return SimpleNamespace(busId=place)


H100 = {
    "nvmlSystemGetDriverVersion": "570.86.15",
    "nvmlSystemGetCudaDriverVersion": 12080,
    "nvmlDeviceGetEnforcedPowerLimit": 500_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 2619},
    "nvmlDeviceGetApplicationsClock": {1: 1200, 2: 2619},
    "nvmlDeviceGetDefaultApplicationsClock": {1: 1980, 2: 2619},
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x02 | 0x04 | 0x40,
    "nvmlDeviceGetPowerUsage": 498_500,
    "nvmlDeviceGetClockInfo": {1: 1155},
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=2**30),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7),
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1), SimpleNamespace(pid=2)],
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetTotalEccErrors": {0: 3, 1: 1},
    "nvmlDeviceGetPciInfo": bus("00000000:05:00.0"),
}
"""Every answer of one GPU."""
