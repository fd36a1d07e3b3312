"""Parts of a record: the peak for MFU, and warnings about GPUs."""

from typing import Any

import pytest
from msgspec.structs import replace

from refshard.measure.assemble import of_all_hosts, peak_of, retry_warnings, throttle_warnings
from refshard.records import GpuMemory, GpuUse
from refshard.specs.case import Case
from tests.measure.fakes import ENVIRONMENT


def case(**changes: Any) -> Case:
    fields = {"strategy": "ddp", "gpus": 2, "model": "llama-tiny", "global_batch": 2, "seq_len": 16}
    return Case.of(**{**fields, **changes})


@pytest.mark.parametrize(
    ("precision", "tf32", "peak", "begins"),
    [
        ("bf16", False, 989e12, "bf16, dense, profiles/hardware/h100-sxm-80gb.toml: peaks: NVIDIA H100 data sheet"),
        ("bf16", True, 989e12, "bf16, dense, profiles/hardware/h100-sxm-80gb.toml: "),
        ("fp32", False, 67e12, "fp32, dense, profiles/hardware/h100-sxm-80gb.toml: "),
        ("fp32", True, 494.5e12, "TF32 (allowed for fp32 products), dense, profiles/hardware/h100-sxm-80gb.toml: "),
    ],
)
def test_a_gpus_peak_is_the_dense_one_of_what_the_case_computes_in(
    precision: str, tf32: bool, peak: float, begins: str
) -> None:
    found = peak_of(case(precision=precision), "NVIDIA H100 80GB HBM3", replace(ENVIRONMENT, tf32=tf32))
    assert found["peak_flops_per_s"] == peak
    assert str(found["peak_source"]).startswith(begins)


def test_an_unknown_device_has_no_peak_and_the_source_says_what_to_add() -> None:
    assert peak_of(case(), "NVIDIA X1", ENVIRONMENT) == {
        "peak_flops_per_s": None,
        "peak_source": "no profile names 'NVIDIA X1': add it to also_named in the file of profiles/hardware that has "
        'its peaks, or add a file with device_name = "NVIDIA X1"',
    }


def test_a_cpus_peak_is_measured_with_a_ranks_threads() -> None:
    assert peak_of(case(), "cpu", ENVIRONMENT)["peak_flops_per_s"] == ENVIRONMENT.gemm_flops_per_s
    assert peak_of(case(threads_per_rank=2), "cpu", ENVIRONMENT) == {
        "peak_flops_per_s": None,
        "peak_source": "measured with 1 thread(s) only",
    }


NOTHING = dict.fromkeys(GpuMemory.__struct_fields__, 0)


def memory(**changes: Any) -> GpuMemory:
    return GpuMemory(**{**NOTHING, **changes})


def test_no_retries_are_no_warning() -> None:
    assert retry_warnings(()) == ()
    assert retry_warnings([memory(ooms=1), memory()]) == ()


def test_a_warning_says_how_many_on_which_ranks_and_what_to_do() -> None:
    assert retry_warnings([memory(), memory(retries=3), memory(retries=1)]) == (
        "GPU memory ran short 4 times during the measured steps (3 on rank 1, 1 on rank 2): the allocator then waits "
        "for the device, frees its cache and retries cudaMalloc, so steps stall; use less memory, or set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
    (once,) = retry_warnings([memory(retries=1)])
    assert once.startswith("GPU memory ran short 1 time during the measured steps (1 on rank 0): ")


def test_many_ranks_are_counted() -> None:
    (told,) = retry_warnings([memory(retries=2)] * 20)
    assert "ran short 40 times" in told
    assert "2 on rank 7, the others on 12 more)" in told


COOL = GpuUse(gpu=0, samples=1)
HOT = GpuUse(gpu=0, samples=1, throttled={"power cap": 1})


def test_hosts_are_counted_in_the_order_of_their_ranks() -> None:
    assert of_all_hosts([(COOL,), (), (HOT,), ()]) == (COOL, replace(HOT, host=1))


@pytest.mark.parametrize(
    ("uses", "warning"),
    [
        ([COOL, GpuUse(gpu=3, samples=2, throttled={"power cap": 1})],
         "GPU 3 was throttled (power cap) during the measured steps: in 1 of 2 samples"),
        ([COOL, replace(HOT, gpu=1, host=1)],
         "GPU 1 of host 1 was throttled (power cap) during the measured steps: in 1 of 1 sample"),
    ],
)  # fmt: skip
def test_throttling_is_told_by_gpu_and_by_host_if_there_are_several(uses: list[GpuUse], warning: str) -> None:
    assert throttle_warnings(uses) == (warning,)
