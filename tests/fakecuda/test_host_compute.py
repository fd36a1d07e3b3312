"""What fake GPUs compute in host mode equals what the CPU computes."""

import importlib.util

import pytest

from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.host_compute_cases import CASES

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def seen() -> Seen:
    one_thread = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else workers start that have nothing to compile
    return see("tests.fakecuda.host_compute_checks", mode="host", environment=one_thread)


@pytest.mark.parametrize("name", CASES)
def test_training_s_parts_equal_the_cpu(seen: Seen, name: str) -> None:
    assert seen("cases")[name] == ""


def test_operators_equal_the_cpu(seen: Seen) -> None:
    found = seen("operators")
    assert found["wrong"] == {}
    assert found["compared"] > 1200


def test_random_numbers_are_drawn_anew_and_come_again(seen: Seen) -> None:
    found = seen("dropout")
    assert all(found.values()), found


def test_compiled_models(seen: Seen) -> None:
    found = seen("compiled")
    assert found["values"] is found["gradients"] is True
    if importlib.util.find_spec("triton") is None:
        assert found["inductor"].startswith("TritonMissing: Cannot find a working triton installation.")
    else:
        assert "the fake CUDA device does not compute Triton kernels on the host" in found["inductor"]


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("lstm", "aten::_thnn_fused_lstm_cell"),
        ("flash", "aten::_scaled_dot_product_flash_attention"),
        ("sparse", "aten::_to_sparse"),
    ],
)
def test_an_operator_without_a_kernel_is_named(seen: Seen, name: str, operator: str) -> None:
    assert seen("refused")[name] == (
        f"NotImplementedError: {operator} has no CPU kernel, so the fake CUDA device cannot run it on the host. Give "
        f'it one that computes the values: @torch.library.register_kernel("{operator}", "cpu")'
    )
