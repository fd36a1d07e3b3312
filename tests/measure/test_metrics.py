"""The peak that MFU is held against, by device and by what a case computes in."""

from typing import Any

import pytest
from msgspec.structs import replace

from refshard.measure.assemble import peak_of
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
