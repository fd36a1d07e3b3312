"""Compiled code and Triton kernels in a dry run: launches, bytes, FLOPs, modules, without a compiled kernel."""

import math
import re
from typing import Any

import pytest
import torch

from refshard.dryrun.recording import GRAPH_LAUNCH, Flag, Phase
from refshard.dryrun.work import work_of
from refshard.fakecuda.flex_attention import view_of
from tests.fakecuda.fresh import Seen, see

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROWS, COLUMNS = 4096, 1024
WHOLE = ROWS * COLUMNS * 4
"""Bytes of one tensor in fp32."""
HEADS, WIDTH, BLOCK = 2 * 8, 128, 128
"""Of attention: heads of all sequences, the head dimension, and queries and keys in a block of the mask."""


@pytest.fixture(scope="module")
def seen() -> Seen:
    pytest.importorskip("triton")
    return see("tests.fakecuda.compiled_checks", mode="dry")


def moved(launches: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["read"], one["write"]) for one in launches]


@pytest.mark.parametrize(
    ("what", "reads", "writes"),
    [
        ("pointwise", 2 * WHOLE, WHOLE),
        ("broadcast", WHOLE + COLUMNS * 4, WHOLE),
        ("of_a_slice", WHOLE // 4, WHOLE // 4),
        ("in_place", WHOLE, WHOLE),
        ("softmax", WHOLE, WHOLE),
        ("embedding", ROWS * 8 + WHOLE, WHOLE),  # the rows that are looked up, not the table
        ("dynamic_shapes", WHOLE, WHOLE),
    ],
)
def test_a_generated_kernel_moves_what_it_touches(seen: Seen, what: str, reads: int, writes: int) -> None:
    found = seen(what)
    assert moved(found) == [(reads, writes)]
    assert found[0]["name"].startswith("inductor::triton_")
    assert found[0]["flags"] == Flag.COMPILED


def test_a_generated_kernel_has_its_operators_and_tensors(seen: Seen) -> None:
    (found,) = seen("pointwise")
    assert found["name"] == "inductor::triton_poi_fused_add_gelu_mul_0"
    shape = f"fp32[{ROWS},{COLUMNS}]"
    assert found["signature"] == f"{shape} {shape} -> {shape}"


def test_products_stay_operators(seen: Seen) -> None:
    product, pointwise = seen("product_and_sum")
    assert product["name"] == "aten::mm"
    assert moved([pointwise]) == [(WHOLE, WHOLE)]


def test_max_autotune_takes_cublas_where_it_can(seen: Seen) -> None:
    assert [one["name"].partition("::")[0] for one in seen("autotuned")] == ["aten", "inductor"]


def test_reduce_overhead_copies_its_inputs_and_replays_a_graph(seen: Seen) -> None:
    found = seen("reduce_overhead")
    replayed = [one["name"] for one in found if one["flags"] & Flag.OF_GRAPH]
    others = [one["name"] for one in found if not one["flags"] & Flag.OF_GRAPH]
    assert others == ["aten::_foreach_copy_", GRAPH_LAUNCH]
    assert replayed == ["aten::mm", "inductor::triton_poi_fused_relu_0"]


def test_kernels_run_on_the_current_stream(seen: Seen) -> None:
    launch, side = seen("on_another_stream")
    assert launch["stream"] == side != 0


def test_a_compiled_optimizer_moves_each_tensor_once(seen: Seen) -> None:
    found = [one for one in seen("optimizer") if one["read"] > WHOLE]
    assert [one["name"].startswith("inductor::triton_for_fused") for one in found] == [True]
    steps = 2 * 4  # two step counts, which it may read and write
    assert found[0]["read"] == pytest.approx(2 * 4 * WHOLE, abs=4 * steps)  # parameter, gradient, two moments
    assert found[0]["write"] == pytest.approx(2 * 3 * WHOLE, abs=4 * steps)


@pytest.mark.parametrize("way", [0, 1, 2], ids=["whole", "in place", "wrapped"])
def test_kernels_belong_to_modules_and_passes(seen: Seen, way: int) -> None:
    found = [one for one in seen("modules")[way] if one["name"] == "aten::mm"]
    forward = [one["module"] for one in found if one["phase"] == Phase.FORWARD]
    backward = [one["module"] for one in found if one["phase"] == Phase.BACKWARD]
    assert forward == ["layers.0.up", "layers.1.up"]
    assert backward == ["layers.1.up"] * 2 + ["layers.0.up"] * 2


def blocks_of_window() -> int:
    """A query sees 256 keys: those of its own block, of the one before, and of the one before that."""
    return sum(min(block, 2) + 1 for block in range(ROWS // BLOCK))


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        ("causal", math.comb(ROWS // BLOCK + 1, 2)),
        ("window", blocks_of_window()),
        ("full", (ROWS // BLOCK) ** 2),
        ("projected", math.comb(ROWS // BLOCK + 1, 2)),
        ("shared", math.comb(ROWS // BLOCK + 1, 2)),
        ("shared_by_two", math.comb(ROWS // BLOCK + 1, 2)),
    ],
)
def test_attention_computes_the_blocks_that_its_mask_leaves(seen: Seen, mask: str, blocks: int) -> None:
    forward, backward = seen(f"flex_{mask}")
    product = 2 * HEADS * blocks * BLOCK * BLOCK * WIDTH
    assert (forward["size"], backward["size"]) == (2 * product, 5 * product)
    assert not (forward["flags"] | backward["flags"]) & Flag.VALUE_UNKNOWN
    work = work_of(backward["name"], backward["signature"], backward["flags"], backward["size"])
    assert work.kind == "attention"
    assert work.scores is not None
    assert (work.scores.pairs, work.scores.length) == (HEADS * blocks * BLOCK * BLOCK, ROWS)
    assert not work.doubt


def test_a_tensor_of_varying_size_is_found_in_its_buffer_by_the_order_of_dimensions() -> None:
    """Sizes and strides are those that inductor saw first; heads lie behind tokens."""
    at = {"fixed": False, "offset": [0], "size": [2, 8, 16, 4], "stride": [512, 4, 32, 1]}
    assert view_of(torch.empty(2, 64, 8, 4), at).shape == (2, 8, 64, 4)
    with pytest.raises(NotImplementedError, match="dynamic=False"):
        view_of(torch.empty(128, 32), at)


def test_a_mask_that_was_not_computed_counts_as_half_and_says_so(seen: Seen) -> None:
    for launch, products in zip(seen("flex_unknown"), (2, 5), strict=True):
        assert launch["size"] == products * HEADS * ROWS * ROWS * WIDTH
        assert "mask" in work_of(launch["name"], launch["signature"], launch["flags"], launch["size"]).doubt


def test_a_kernel_by_hand_reads_and_writes_the_tensors_that_it_loads_and_stores(seen: Seen) -> None:
    found = seen("by_hand")
    assert [one["name"] for one in found] == ["triton::add_kernel", "triton::scale_kernel"]
    assert moved(found) == [(2 * WHOLE, WHOLE), (WHOLE, WHOLE)]


def test_a_kernel_by_hand_runs_in_compiled_code(seen: Seen) -> None:
    found = [one for one in seen("by_hand_in_compiled_code") if "_kernel" in one["name"]]
    assert [one["write"] for one in found] == [WHOLE, WHOLE]
    assert all(one["name"].startswith("inductor::") for one in found)


def test_a_kernel_that_multiplies_matrices_is_uncertain(seen: Seen) -> None:
    (found,) = seen("by_hand_with_a_product")
    assert found["flags"] & Flag.PRODUCTS
    assert "FLOPs are not known" in work_of(found["name"], found["signature"], found["flags"]).doubt


def test_graph_breaks_and_recompilations_have_lines(seen: Seen) -> None:
    found = seen("summary")
    assert found["graphs"] == 4
    ((line, reason, count),) = found["breaks"]
    assert line.startswith("tests/fakecuda/compiled_checks.py:")
    assert line.endswith(" in breaks")
    assert "graph_break()" in reason
    assert count == 2
    assert "size mismatch at index 0. expected 16, actual 32" in found["recompiled"][0][1]


def test_a_large_graph_is_named_while_it_compiles(seen: Seen) -> None:
    large, small = seen("progress")
    ways = [re.sub(r"\d+", "N", line) for line in large]
    assert ways == [f"refshard: torch.compile: {way} graph of N operators" for way in ("forward", "backward")]
    assert small == []


def test_a_wrapper_in_cpp_is_refused_by_name(seen: Seen) -> None:
    assert "cpp_wrapper" in seen("wrapper_in_cpp")


def test_what_follows_from_a_choice_is_computed_in_generated_kernels(seen: Seen) -> None:
    found = seen("chosen_counts")
    counts, ends = found["balanced"][0]
    assert counts == [2 * ROWS // 16] * 16
    assert ends == [2 * ROWS // 16 * place for place in range(1, 17)]
    assert found["worst"][0][0] == [ROWS, ROWS] + [0] * 14
    assert all(compiled == eager for compiled, eager in found.values())


def test_compiling_is_no_work_of_a_step(seen: Seen) -> None:
    first, second = seen("host_work")
    assert first < second + 1000
