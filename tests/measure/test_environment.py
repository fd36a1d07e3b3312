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
from refshard.measure.load import available_cores
from refshard.measure.nvml import GpuReading
from refshard.measure.store import read_run
from refshard.records import GpuSettings
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
    first, again = capture_environment(1), capture_environment(1)
    assert first.id == again.id
    assert capture_environment(2).id != first.id


@pytest.mark.processes
def test_times_over_a_network_are_not_comparable_with_others() -> None:
    alone, joined = capture_environment(1), capture_environment(1, "2 hosts joined at 2 Gbit/s")
    assert (alone.network, joined.network) == ("", "2 hosts joined at 2 Gbit/s")
    assert joined.id not in (alone.id, capture_environment(1, "2 hosts joined at 1 Gbit/s").id)


def test_gemm_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    measure_gemm(1, size=64, seconds=0.01)
    assert torch.get_num_threads() == before


BEFORE = replace(ENVIRONMENT, memory_bytes=10**9, git_commit="aa", git_dirty=False, code_sha256="c0")


@pytest.mark.parametrize(
    "now",
    [
        {"git_commit": "bb", "git_dirty": True},  # a page of documentation
        {"hostname": "other", "argv": ("refshard", "run", "--resume", "x"), "gemm_flops_per_s": 2e11},
        {"memory_bytes": 10**9 - 10**6},  # another boot of the same machine
    ],
)
def test_what_changes_no_measurement_is_no_change(now: dict[str, object]) -> None:
    assert changes(BEFORE, replace(BEFORE, **now)) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"code_sha256": "c1"}, "code_sha256 was 'c0' and is 'c1'"),  # an edit, committed or not
        ({"memory_bytes": 2 * 10**9}, "memory_bytes was 1000000000 and is 2000000000"),
        ({"network": "2 hosts"}, "network was '' and is '2 hosts'"),
        ({"packages": {"numpy": "2"}}, "packages was {} and is {'numpy': '2'}"),
    ],
)
def test_what_changes_a_measurement_is_told(now: dict[str, object], words: str) -> None:
    assert changes(BEFORE, replace(BEFORE, **now)) == [words]


def test_a_record_from_before_code_was_recorded_has_but_its_commit() -> None:
    older = replace(BEFORE, code_sha256="")
    assert changes(older, BEFORE) == []
    assert changes(older, replace(BEFORE, git_commit="bb")) == ["git_commit was 'aa' and is 'bb'"]


RECORDED = resources.root() / "profiles" / "recorded"
H100 = GpuSettings(power_limit_w=700.0, max_sm_clock_mhz=1980, nvlinks={"switch": 18})
WITH_GPUS = replace(
    BEFORE, gpus=("NVIDIA H100 80GB HBM3",) * 2, gpu_memory_bytes=(85,) * 2, gpu_driver="570.86.15", cuda="12.8",
    nccl="2.26.2", gpu_settings=(H100, H100), variables={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1"},
)  # fmt: skip


@pytest.mark.parametrize("run", ["epyc-2-cores/quickstart", "xeon-2-cores/engine_network", "dryrun/llama3_8b_h100"])
def test_the_id_of_a_recorded_machine_without_gpus_is_still_that(run: str) -> None:
    environment = read_run(RECORDED / run).header.environment
    assert id_of(environment) == environment.id
    assert (environment.gpu_settings, environment.gpu_memory_bytes) == ((), ())
    assert (environment.gpu_driver, environment.tf32, environment.variables) == ("", False, {})


@pytest.mark.parametrize(
    "now",
    [
        {"gpu_memory_bytes": (85, 84)},
        {"gpu_driver": "580.1"},
        {"cuda": "13.0"},
        {"nccl": "2.28"},
        {"tf32": True},
        {"gpu_settings": (H100, replace(H100, power_limit_w=500.0))},
        {"variables": {"NCCL_ALGO": "Tree", "CUDA_VISIBLE_DEVICES": "0,1"}},
    ],
)
def test_what_decides_how_fast_gpus_are_is_part_of_the_id_and_a_change(now: dict[str, object]) -> None:
    assert id_of(replace(WITH_GPUS, **now)) != id_of(WITH_GPUS)
    assert len(changes(WITH_GPUS, replace(WITH_GPUS, **now))) == 1


@pytest.mark.parametrize(
    "now",
    [
        {"gpu_throttled": (("power cap",), ())},
        {"variables": {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "6,7", "NCCL_HOSTID": "b"}},
    ],
)
def test_the_moment_and_the_place_are_no_part_of_it(now: dict[str, object]) -> None:
    assert id_of(replace(WITH_GPUS, **now)) == id_of(WITH_GPUS)
    assert changes(WITH_GPUS, replace(WITH_GPUS, **now)) == []


def test_a_change_of_one_gpus_settings_names_the_gpu_and_the_setting() -> None:
    slower = replace(WITH_GPUS, gpu_settings=(H100, replace(H100, power_limit_w=500.0)))
    assert differences(WITH_GPUS, slower) == ["power_limit_w of GPU 1 was 700.0 and is 500.0"]
    unknown = replace(WITH_GPUS, gpu_settings=())
    assert differences(WITH_GPUS, unknown) == [
        f"gpu_settings were known of {len(WITH_GPUS.gpu_settings)} GPUs and are of 0"
    ]


def test_a_change_of_a_variable_names_it() -> None:
    now = replace(WITH_GPUS, variables={"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"})
    assert changes(WITH_GPUS, now) == ["NCCL_DEBUG was not set and is INFO"]
    assert differences(WITH_GPUS, now) == []


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
