"""NVML and torch agree on a real GPU, and watching it tells of power and clocks."""

import pytest
import torch

from refshard.fakecuda.activate import is_active
from refshard.measure.environment import describe_gpus
from refshard.measure.load import watched_gpus
from refshard.measure.nvml import gpu_sensors, visible_uuids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(is_active(), reason="the fake device has no sensors"),
]


def test_nvml_tells_of_the_gpus_that_torch_sees_in_its_order() -> None:
    pytest.importorskip("pynvml", reason="it comes with the extra 'cuda'")
    with gpu_sensors(visible_uuids()) as sensors:
        assert sensors is not None
        names = [sensors.condition(gpu).name for gpu in range(sensors.count)]
    assert names == [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def test_the_environment_has_memory_software_and_settings() -> None:
    pytest.importorskip("pynvml", reason="it comes with the extra 'cuda'")
    found = describe_gpus()
    assert len(found["gpu_settings"]) == len(found["gpu_memory_bytes"]) == torch.cuda.device_count()
    assert found["gpu_driver"]
    assert found["cuda"] == torch.version.cuda


def test_watching_tells_of_the_first_gpu() -> None:
    pytest.importorskip("pynvml", reason="it comes with the extra 'cuda'")
    a = torch.ones(4096, 4096, device="cuda")
    with watched_gpus(torch.device("cuda", 0)) as found:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
    (use,) = found
    assert (use.gpu, use.samples > 0) == (0, True)
    assert use.power_w is None or use.power_w > 0
    assert use.sm_clock_mhz is None or use.sm_clock_mhz > 0
