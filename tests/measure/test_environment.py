"""The fingerprint of machine and software."""

import platform
import sys

import pytest
import torch
from msgspec.structs import replace

from refshard import resources
from refshard.measure.environment import (
    capture_environment,
    changes,
    describe_sensors,
    differences,
    id_of,
    measure_gemm,
    tf32_allowed,
    variables,
)
from refshard.measure.nvml import GpuReading
from refshard.measure.store import read_run
from refshard.records import GpuSettings
from refshard.resources import available_cores
from tests.measure.fakes import ENVIRONMENT
from tests.measure.sensors import FakeSensors


@pytest.mark.processes
def test_environment_describes_this_machine() -> None:
    found = capture_environment(threads_per_rank=1)
    assert found.python == platform.python_version()
    assert found.torch == torch.__version__
    assert found.logical_cores == available_cores() >= 1
    assert found.memory_bytes > 2**30
    assert "gloo" in found.backends
    assert found.argv == ("refshard", *sys.argv[1:])
    assert found.gemm_flops_per_s > 1e9


@pytest.mark.processes
def test_the_id_is_that_of_what_must_match_and_not_of_the_moment() -> None:
    first, other, joined = capture_environment(1), capture_environment(2), capture_environment(1, "2 hosts")
    assert (first.network, joined.network) == ("", "2 hosts")
    assert capture_environment(1).id == first.id
    assert len({first.id, other.id, joined.id, capture_environment(1, "3 hosts").id}) == 4


def test_gemm_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    measure_gemm(1, size=64, seconds=0.01)
    assert torch.get_num_threads() == before


RECORDED = resources.root() / "profiles" / "recorded"
H100 = GpuSettings(power_limit_w=700.0, max_sm_clock_mhz=1980, nvlinks={"switch": 18})
BEFORE = replace(ENVIRONMENT, memory_bytes=10**9, git_commit="aa", git_dirty=False, code_sha256="c0")
WITH_GPUS = replace(
    BEFORE, gpus=("NVIDIA H100 80GB HBM3",) * 2, gpu_memory_bytes=(85,) * 2, gpu_driver="570.86.15", cuda="12.8",
    nccl="2.26.2", gpu_settings=(H100, H100), variables={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1"},
)  # fmt: skip
SLOWER = (H100, replace(H100, power_limit_w=500.0))


@pytest.mark.parametrize("run", ["epyc-2-cores/quickstart", "xeon-2-cores/engine_network", "dryrun/llama3_8b_h100"])
def test_the_id_of_a_recorded_machine_without_gpus_is_still_that(run: str) -> None:
    environment = read_run(RECORDED / run).header.environment
    assert id_of(environment) == environment.id
    assert (environment.gpu_settings, environment.gpu_memory_bytes) == ((), ())
    assert (environment.gpu_driver, environment.tf32, environment.variables) == ("", False, {})


@pytest.mark.parametrize(
    "now",
    [
        {"git_commit": "bb", "git_dirty": True},  # a page of documentation
        {"hostname": "other", "argv": ("refshard", "run", "--resume", "x"), "gemm_flops_per_s": 2e11},
        {"memory_bytes": 10**9 - 10**6},  # another boot of the same machine
        {"gpu_throttled": (("power cap",), ())},
        {"variables": {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "6,7", "NCCL_HOSTID": "b"}},
    ],
)
def test_what_changes_no_measurement_is_no_change(now: dict[str, object]) -> None:
    assert changes(WITH_GPUS, replace(WITH_GPUS, **now)) == []
    assert id_of(replace(WITH_GPUS, **now)) == id_of(WITH_GPUS)


@pytest.mark.parametrize(
    ("now", "change", "comparable"),
    [
        ({"code_sha256": "c1"}, "code_sha256 was 'c0' and is 'c1'", True),  # an edit, committed or not
        ({"memory_bytes": 2 * 10**9}, "memory_bytes was 1000000000 and is 2000000000", True),
        ({"packages": {"numpy": "2"}}, "packages was {} and is {'numpy': '2'}", True),
        ({"network": "2 hosts"}, "network was '' and is '2 hosts'", False),
        ({"gpu_memory_bytes": (85, 84)}, "gpu_memory_bytes was (85, 85) and is (85, 84)", False),
        ({"gpu_driver": "580.1"}, "gpu_driver was '570.86.15' and is '580.1'", False),
        ({"cuda": "13.0"}, "cuda was '12.8' and is '13.0'", False),
        ({"nccl": "2.28"}, "nccl was '2.26.2' and is '2.28'", False),
        ({"tf32": True}, "tf32 was False and is True", False),
        ({"gpu_settings": SLOWER}, "power_limit_w of GPU 1 was 700.0 and is 500.0", False),
        ({"gpu_settings": ()}, "gpu_settings were known of 2 GPUs and are of 0", False),
        ({"variables": {"NCCL_ALGO": "Tree", "CUDA_VISIBLE_DEVICES": "0,1"}}, "NCCL_ALGO was Ring and is Tree", False),
        ({"variables": {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}}, "NCCL_DEBUG was not set and is INFO", False),
    ],
)
def test_what_changes_a_measurement_is_told_and_what_decides_its_times_is_part_of_the_id(
    now: dict[str, object], change: str, comparable: bool
) -> None:
    after = replace(WITH_GPUS, **now)
    assert changes(WITH_GPUS, after) == [change]
    assert (id_of(after) == id_of(WITH_GPUS)) is comparable
    among_hosts = not now.keys() & {"memory_bytes", "network", "variables"}
    assert differences(WITH_GPUS, after) == ([change] if among_hosts else [])


def test_a_record_from_before_code_was_recorded_has_but_its_commit() -> None:
    older = replace(BEFORE, code_sha256="")
    assert changes(older, BEFORE) == []
    assert changes(older, replace(BEFORE, git_commit="bb")) == ["git_commit was 'aa' and is 'bb'"]


def test_variables_are_those_of_cuda_nccl_and_the_allocator_without_where_files_lie() -> None:
    given = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "NCCL_ALGO": "Ring",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVIDIA_TF32_OVERRIDE": "0", "CUDA_HOME": "/me/cuda", "HOME": "/me",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert set(variables(given)) == {
        "PYTORCH_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS", "NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVIDIA_TF32_OVERRIDE",
    }  # fmt: skip


def test_tf32_is_allowed_by_torch_unless_nvidias_variable_forbids_it() -> None:
    assert not tf32_allowed({})
    torch.set_float32_matmul_precision("high")
    try:
        assert tf32_allowed({})
        assert not tf32_allowed({"NVIDIA_TF32_OVERRIDE": "0"})
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sensors_fill_settings_and_throttling_of_each_gpu() -> None:
    hot = GpuReading(throttled=("temperature",))
    assert describe_sensors(FakeSensors([[GpuReading()], [hot]], [H100, H100])) == {
        "gpu_driver": "570.86.15",
        "gpu_settings": (H100, H100),
        "gpu_throttled": ((), ("temperature",)),
    }
