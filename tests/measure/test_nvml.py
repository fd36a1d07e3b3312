"""What NVML answers becomes settings, readings and conditions; what it does not answer is unknown."""

import inspect

import pytest

from refshard.measure.nvml import GpuCondition, GpuReading, Nvml, gpu_sensors
from refshard.records import GpuSettings
from tests.measure.sensors import H100, FakeLibrary, bus


def sensors(*gpus: dict[str, object]) -> Nvml:
    return Nvml(FakeLibrary(list(gpus)), range(len(gpus)))


def test_settings_are_in_watts_and_megahertz() -> None:
    found = sensors(H100).settings(0)
    assert found == GpuSettings(
        power_limit_w=500.0, default_power_limit_w=700.0, max_sm_clock_mhz=1980, max_memory_clock_mhz=2619,
        application_sm_clock_mhz=1200, application_memory_clock_mhz=2619, ecc=True, mig=False,
    )  # fmt: skip


def test_application_clocks_that_nobody_set_are_none() -> None:
    default = {**H100, "nvmlDeviceGetApplicationsClock": H100["nvmlDeviceGetDefaultApplicationsClock"]}
    found = sensors(default).settings(0)
    assert (found.application_sm_clock_mhz, found.application_memory_clock_mhz) == (None, None)


def test_a_reading_names_what_holds_the_clock_down() -> None:
    assert sensors(H100).reading(0) == GpuReading(
        power_w=498.5, sm_clock_mhz=1155, throttled=("power cap", "temperature (hardware)"), capped=True
    )
    idle = {**H100, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x01}
    assert sensors(idle).reading(0).throttled == ()


def test_a_condition_has_links_to_the_host_errors_and_what_others_use() -> None:
    assert sensors(H100).condition(0) == GpuCondition(
        name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, used_memory_bytes=2**30, utilisation=7, processes=2,
        pcie_width=8, own_pcie_width=16, pcie_generation=4, own_pcie_generation=5, corrected_ecc_errors=3,
        uncorrected_ecc_errors=1,
    )  # fmt: skip


def test_what_a_gpu_does_not_answer_is_unknown() -> None:
    silent = sensors({})
    assert (silent.driver(), silent.cuda()) == ("", None)
    assert silent.settings(0) == GpuSettings()
    assert silent.reading(0) == GpuReading()
    assert silent.condition(0) == GpuCondition()


def test_nvlinks_are_counted_by_the_other_end() -> None:
    """Two links to the other GPU, one to a GPU that this process does not see; and a machine with a switch."""
    there, elsewhere = bus("00000000:06:00.0"), bus("00000000:07:00.0")
    first = {
        **H100, "nvmlDeviceGetNvLinkState": {0: 1, 1: 1, 2: 0, 3: 1},
        "nvmlDeviceGetNvLinkRemoteDeviceType": {0: 0, 1: 0, 3: 0},
        "nvmlDeviceGetNvLinkRemotePciInfo": {0: there, 1: there, 3: elsewhere},
    }  # fmt: skip
    second = {
        **H100, "nvmlDeviceGetPciInfo": there, "nvmlDeviceGetNvLinkState": {0: 1, 1: 1, 2: 1},
        "nvmlDeviceGetNvLinkRemoteDeviceType": {0: 2, 1: 2, 2: 2},
    }  # fmt: skip
    found = sensors(first, second)
    assert found.settings(0).nvlinks == {"GPU 1": 2, "GPU elsewhere": 1}
    assert found.settings(1).nvlinks == {"switch": 3}


def test_without_a_driver_there_are_no_sensors() -> None:
    with gpu_sensors() as found:
        assert found is None or found.count > 0


def test_the_library_has_every_function_that_is_asked_for() -> None:
    """The fake library answers any name, so a misspelt one would go unnoticed."""
    pynvml = pytest.importorskip("pynvml", reason="it comes with the extra 'cuda'")
    library = FakeLibrary([{**H100, "nvmlDeviceGetNvLinkState": {0: 1}}])
    asked = Nvml(library, [0])
    for ask in (asked.driver, asked.cuda):
        ask()
    for ask_gpu in (asked.settings, asked.reading, asked.condition):
        ask_gpu(0)
    assert len(library.asked) > 20
    for name in library.asked:
        assert inspect.isfunction(getattr(pynvml, name))
    for name in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_VOLATILE_ECC", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"):
        assert getattr(pynvml, name) == getattr(library, name)
    assert pynvml.NVML_NVLINK_MAX_LINKS >= 18
    bits = {"SwPowerCap": 0x04, "HwSlowdown": 0x08, "SwThermalSlowdown": 0x20, "HwThermalSlowdown": 0x40}
    for name, bit in {**bits, "HwPowerBrakeSlowdown": 0x80, "ApplicationsClocksSetting": 0x02}.items():
        assert getattr(pynvml, f"nvmlClocksThrottleReason{name}") == bit
