"""Facts about the machine that runs the tests, and about files of others."""

import getpass
import platform
import re
from pathlib import Path

import msgspec
import pytest
import torch

from refshard.measure.doctor import Facts, _driver, _pci_gpus, gather
from refshard.measure.nvml import GpuReading
from refshard.records import GpuSettings
from refshard.resources import available_cores
from refshard.strategies.table import ROWS
from tests.measure.sensors import FakeSensors


@pytest.fixture(scope="module")
def facts() -> Facts:
    settings = GpuSettings(power_limit_w=500.0)
    return gather(FakeSensors([[GpuReading()], [GpuReading(power_w=70.0)]], [settings, GpuSettings()]))


@pytest.mark.processes
def test_facts_are_of_this_machine(facts: Facts) -> None:
    assert facts.python == platform.python_version()
    assert facts.cores == available_cores()
    assert 0 <= facts.busy_cores <= facts.cores
    assert facts.torch.version == torch.__version__
    assert len(facts.torch.gpus) == torch.cuda.device_count()
    assert facts.strategies == len(ROWS)
    assert "ddp" not in facts.unavailable


@pytest.mark.processes
def test_every_gpu_of_the_sensors_is_read_several_times(facts: Facts) -> None:
    first, second = facts.gpus
    assert first.settings.power_limit_w == 500.0
    assert second.readings == (GpuReading(power_w=70.0),) * 5
    assert (facts.driver, facts.driver_cuda) == ("570.86.15", 12080)


@pytest.mark.processes
def test_facts_name_no_host_no_user_and_no_home(facts: Facts) -> None:
    words = msgspec.json.encode(facts).decode()
    assert not re.search(rf"\b{re.escape(platform.node())}\b", words)
    assert str(Path.home()) + "/" not in words
    if getpass.getuser() != "root":
        assert getpass.getuser() not in words


def test_nvidias_gpus_are_counted_on_the_bus(tmp_path: Path) -> None:
    """Two GPUs (a 3D controller, a display), the second one's sound device, and another vendor's display."""
    devices = {"1": ("0x10de", "0x030200"), "2": ("0x10de", "0x030000"), "3": ("0x10de", "0x040300"),
               "4": ("0x8086", "0x030000")}  # fmt: skip
    for place, (vendor, kind) in devices.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "vendor").write_text(f"{vendor}\n")
        (tmp_path / place / "class").write_text(f"{kind}\n")
    assert _pci_gpus(tmp_path) == 2
    assert _pci_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    "first",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Jan 27 00:00:00 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.161.08  Release Build  (builder)",
    ],
)
def test_the_driver_is_told_without_nvml(tmp_path: Path, first: str) -> None:
    (tmp_path / "version").write_text(f"{first}\nGCC version:  gcc version 12.3.0\n")
    assert _driver(tmp_path / "version") == "535.161.08"
    assert _driver(tmp_path / "none") == ""
