"""Quantised weights and optimizers of torchao, and optimizers with little state: bytes by hand."""

import pytest

from tests.fakecuda.fresh import Seen, see

pytest.importorskip("torchao", reason="torchao comes with the extra 'peers'")
pytest.importorskip("transformers", reason="transformers comes with the extra 'peers'")
pytestmark = pytest.mark.processes

OUT, IN = 4096, 1024
ELEMENTS = OUT * IN


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.torchao_checks", mode="dry")


def test_optimizer_state_by_hand(seen: Seen) -> None:
    bf16, fp32 = 2, 4
    assert seen("optimizer_state") == {
        # Two moments: codes, a scale for each block, a table of the codes' values.
        "AdamW8bit": 2 * (ELEMENTS + fp32 * ELEMENTS // 256 + fp32 * 256),
        "AdamW4bit": 2 * (ELEMENTS // 2 + fp32 * ELEMENTS // 128 + fp32 * 16),
        "AdamWFp8": 2 * (ELEMENTS + fp32 * ELEMENTS // 256),
        "CPUOffloadOptimizer": 0,
        "Adafactor": bf16 * (OUT + IN),
        "Adafactor of transformers": fp32 * (OUT + IN + 1),  # and the parameter's norm
        "Muon": bf16 * ELEMENTS,
        "low rank": bf16 * 128 * (OUT + 2 * IN),
    }


def test_nf4_weights_by_hand(seen: Seen) -> None:
    scales = ELEMENTS // 64
    found = seen("nf4")
    # Packed weights; a byte a scale; for 256 of these a factor; their mean; 16 values.
    assert found["held"] == ELEMENTS // 2 + scales + 2 * scales // 256 + 2 + 2 * 16
    assert (found["out"], found["gradient"]) == ([512, OUT], [512, IN])


def test_products_of_float8_training_have_operands_in_fp8(seen: Seen) -> None:
    found = seen("float8")
    assert len(found) == 3
    assert found[0] == f"fp8e4m3[512,{IN}] fp8e4m3[{IN},{OUT}]"
    assert all(operand.startswith("fp8") for product in found for operand in product.split())
