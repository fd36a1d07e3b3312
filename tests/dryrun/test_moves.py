"""What memory-bound operators take: their bytes at the memory's rate, times what was measured of their kernels."""

import pytest

from refshard.costs import STRIDED_PER_MULTIPROCESSOR
from refshard.dryrun.price import NARROWED, TIMES, WIDENED, operator_seconds
from refshard.dryrun.recording import Flag
from refshard.specs.hardware import HardwareSpec, Rate

RATE = Rate(peak=1e12, efficiency=1.0)
GPU = HardwareSpec(
    device="cuda", memory_bytes=10**9, memory_bytes_per_s=1e9, kernel_s=1e-6, host_s=1e-6, multiprocessors=100,
    matmul={"fp32": RATE}, attention={"fp32": RATE},
    sources=dict.fromkeys(
        ("memory_bytes", "memory_bytes_per_s", "kernel_s", "host_s", "multiprocessors", "matmul", "attention"), "made"
    ),
)  # fmt: skip


def seconds(operator: str, signature: str, flags: int = 0, reads: int = 10**6, writes: int = 10**6) -> float:
    return operator_seconds(GPU, operator, signature, flags, reads, writes) - GPU.kernel_s


def test_an_operator_takes_its_bytes_times_what_its_kernel_makes_of_them() -> None:
    assert seconds("aten::relu", "fp32[8] -> fp32[8]") == pytest.approx(2e-3)
    assert seconds("aten::_log_softmax", "fp32[8] -> fp32[8]") == pytest.approx(TIMES["_log_softmax"] * 2e-3)


def test_the_losss_gradient_is_written_only() -> None:
    assert seconds("aten::nll_loss_backward", "fp32[] -> fp32[8]", reads=10**9) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("signature", "times"),
    [("fp32[8] bf16[8]", WIDENED), ("bf16[8] fp32[8]", NARROWED), ("bf16[8] bf16[8]", 1.0), ("bf16[8] fp16[8]", 1.0)],
)
def test_a_copy_to_a_wider_dtype_is_slow(signature: str, times: float) -> None:
    assert seconds("aten::copy_", signature) == pytest.approx(times * 2e-3)


def test_a_strided_kernel_goes_by_elements_unless_its_bytes_take_longer() -> None:
    elements = 10**9
    signature, rate = f"bf16[{elements}] bf16[{elements}]", STRIDED_PER_MULTIPROCESSOR * 100
    by_elements = operator_seconds(GPU, "aten::copy_", signature, Flag.STRIDED, 10**3, 10**3)
    assert by_elements == pytest.approx(elements / rate)
    assert seconds("aten::copy_", "bf16[8] bf16[8]", Flag.STRIDED) == pytest.approx(2e-3)
