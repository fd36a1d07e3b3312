"""A small calibration of the real GPUs, over NCCL where there are several."""

from pathlib import Path

import pytest
import torch

from refshard.fakecuda.activate import is_active
from refshard.measure.calibration.profile import measure, read_profile
from refshard.measure.launchers.local import LocalLauncher
from tests.measure.calibrations import calibration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(is_active(), reason="tests/measure/test_calibrating.py calibrates fake devices"),
]


def test_all_gpus_are_calibrated(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    assert measure(calibration(device="cuda", ranks=ranks), LocalLauncher(), tmp_path, print) is None
    profile = read_profile(tmp_path)
    assert not profile.not_measured
    assert (profile.library, profile.ranks_per_node, profile.nodes) == ("nccl", ranks, 1)
    hardware = profile.accelerator
    assert hardware.device_name == torch.cuda.get_device_name()
    assert hardware.matmul.keys() == hardware.matmul_burst.keys() == {"bf16", "fp32"}
    assert {(m.ranks, m.nodes) for m in profile.measured} == ({(ranks, 1)} if ranks > 1 else set())
