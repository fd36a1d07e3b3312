"""bitsandbytes on the fake device: its operators' results, memory and launches, by hand and by its CPU kernels."""

import pytest

from tests.fakecuda.fresh import Seen, see

pytest.importorskip("bitsandbytes", reason="4-bit weights and 8-bit optimizers need the extra 'peers'")
pytestmark = pytest.mark.processes

OUT, IN = 4096, 1024
ELEMENTS = OUT * IN
PACKED = ELEMENTS // 2
SCALES = ELEMENTS // 64
CODES = 16 * 4  # of NF4


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.bitsandbytes_checks", mode="dry")


def test_a_layer_holds_its_packed_weight_and_its_scales(seen: Seen) -> None:
    found = seen("one_layer")
    assert found["single"]["held"] == PACKED + 4 * SCALES + CODES
    # With double quantisation scales take a byte, and 256 of them have a scale, a table and an offset of their own.
    assert found["double"]["held"] == PACKED + CODES + SCALES + 4 * SCALES // 256 + 4 * 256 + 4


def test_quantising_holds_the_whole_layer_beside_its_packed_weight(seen: Seen) -> None:
    found = seen("one_layer")
    whole = 2 * ELEMENTS + PACKED
    # NF4's codes are divided by the largest of their absolute values.
    assert found["single"]["peak"] == whole + 4 * SCALES + 2 * CODES + 4
    # Scales in fp32, these less their mean, and quantised.
    assert found["double"]["peak"] == whole + CODES + (4 + 4 + 1) * SCALES + 4 * SCALES // 256 + 4 * 256 + 4


def test_optimizer_state_by_hand(seen: Seen) -> None:
    found = seen("optimizer_state")
    state = ELEMENTS + 4 * ELEMENTS // 256 + 4 * 256  # a byte each, a scale for 256, a table
    assert found["AdamW8bit"] == [2 * state, 0]
    assert found["Lion8bit"] == found["SGD8bit"] == [state, 0]
    assert found["AdEMAMix8bit"] == [3 * state - 4 * 256, 0]  # its two momenta share a table
    assert found["AdamW32bit"] == [2 * 4 * ELEMENTS, 0]
    # State is in managed memory; scales and tables are not.
    assert found["PagedAdamW8bit"] == [2 * (state - ELEMENTS), 2 * ELEMENTS]
    assert found["PagedAdamW32bit"] == [0, 2 * 4 * ELEMENTS]


def test_an_update_reads_and_writes_weight_and_state(seen: Seen) -> None:
    blocks = ELEMENTS // 256
    eight, *paged = seen("optimizer_launches")
    n = ELEMENTS
    assert eight == [
        "optimizer_update_8bit_blockwise",
        f"bf16[{n}] bf16[{n}] uint8[{n}] uint8[{n}] fp32[256] fp32[256] fp32[{blocks}] fp32[{blocks}]",
        2 * n + 2 * n + 2 * n + 2 * 1024 + 2 * 4 * blocks,
        2 * n + 2 * n + 2 * 4 * blocks,
    ]
    assert paged == [
        ["fill", f" -> fp32[{n}]", 0, 4 * n],
        ["optimizer_update_32bit", f"bf16[{n}] bf16[{n}] fp32[{n}]", 8 * n, 6 * n],
    ]


def test_launches_that_quantise_and_dequantise_a_weight(seen: Seen) -> None:
    nested = SCALES // 256
    assert seen("weight_launches") == [
        ["quantize_4bit", f"bf16[{ELEMENTS}] -> uint8[{PACKED}] fp32[{SCALES}]", 2 * ELEMENTS, PACKED + 4 * SCALES],
        ["quantize_blockwise", f"fp32[{SCALES}] fp32[256] -> uint8[{SCALES}] fp32[{nested}]", 4 * SCALES + 1024,
         SCALES + 4 * nested],
        ["dequantize_blockwise", f"uint8[{SCALES}] fp32[{nested}] fp32[256] -> fp32[{SCALES}]",
         SCALES + 4 * nested + 1024, 4 * SCALES],
        ["dequantize_4bit", f"uint8[{PACKED}] fp32[{SCALES}] -> bf16[{ELEMENTS}]", PACKED + 4 * SCALES, 2 * ELEMENTS],
    ]  # fmt: skip


def test_products_are_fused_for_few_tokens_only(seen: Seen) -> None:
    found = seen("products")
    nested = SCALES // 256
    assert found["few"] == [
        f"gemm_4bit bf16[4,{IN}] uint8[{PACKED}] fp32[{nested}] uint8[{SCALES}] fp32[256] fp32[] -> bf16[4,{OUT}]"
    ]
    assert [launch.partition(" ")[0] for launch in found["many"]] == ["dequantize_blockwise", "dequantize_4bit"]


def test_results_are_shaped_as_those_of_the_cpu(seen: Seen) -> None:
    found = seen("results")
    assert found["cuda"] == found["cpu"]
    assert found["cuda"]["quantize_4bit"][0] == ["torch.uint8", PACKED, 1]


def test_the_host_learns_that_a_value_was_not_computed(seen: Seen) -> None:
    assert seen("values") == {"scale": True, "weight": False}


def test_a_function_without_a_model_is_named(seen: Seen) -> None:
    assert seen("not_supported") == "the fake CUDA device does not support bitsandbytes' function cigemm()"


def test_quantised_layers_train(seen: Seen) -> None:
    shapes = [[2048, IN], [8, IN]]
    assert seen("training") == {"4 bits": shapes, "8 bits": shapes}
