"""A dry run computes nothing: shapes, memory and what is known of values."""

import pytest

from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes

WIDE = 1 << 10


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.dry_checks", mode="dry")


def test_shapes_of_results_and_gradients(seen: Seen) -> None:
    found = seen("layers")
    assert found["linear"] == [[8, 2 * WIDE], [8, WIDE], [2 * WIDE, WIDE], [2 * WIDE]]
    assert found["convolution"] == [[2, 128, 16, 16], [2, 64, 32, 32], [128, 64, 3, 3], [128]]
    assert found["batch norm"] == found["group norm"] == [[2, 64, 32, 32], [2, 64, 32, 32], [64], [64]]
    assert found["rms norm"] == [[8, WIDE], [8, WIDE], [WIDE]]
    assert found["attention"][:2] == [[2, 128, 256]] * 2


def test_operators_that_torch_cannot_shape(seen: Seen) -> None:
    assert seen("sync_batch_norm_parts") == [[4, 1024, 64], *[[1024]] * 5]


def test_a_scalar_of_the_host_may_come_first(seen: Seen) -> None:
    assert seen("scalars_of_the_host") == 4 * [f"cuda:0 torch.bfloat16 [{WIDE}, {WIDE}]"]


def test_a_fused_optimizer_is_one_launch(seen: Seen) -> None:
    assert seen("optimizers") == {"AdamW": 1, "Adam": 1, "SGD": 1, "Adagrad": 1}


def test_pointwise_operators_on_tensors_that_lie_unlike_each_other_are_strided(seen: Seen) -> None:
    alike = ("alike", "with a scalar", "both transposed", "copy", "product")
    unlike = ("one transposed", "broadcast", "columns", "transposing copy", "expanding copy")
    assert seen("strided") == dict.fromkeys(alike, False) | dict.fromkeys(unlike, True)


def test_what_the_host_does_is_counted_alike_in_every_run(seen: Seen) -> None:
    found = seen("host_work")
    forward, backward = found["forward"], found["forward and backward"]
    assert forward == found["forward again"]
    assert found["with views"]["operators"] - forward["operators"] == 20
    assert (forward["nodes"], backward["nodes"]) == (0, 11)  # ten products and a sum
    assert (forward["dispatched"], found["under a mode"]["dispatched"]) == (0, 20)
    assert found["read that is told"]["calls"] == found["read"]["calls"] + 1  # the check's own function
    assert 10 < forward["calls"] < 20 < found["under a mode"]["calls"]  # ten of the step's own


def test_memory_has_addresses_without_pages(seen: Seen) -> None:
    assert seen("memory") == {"pages": True, "allocated": True}


def test_a_stream_that_waits_holds_memory_back(seen: Seen) -> None:
    assert seen("held_back") == [2 * 256, 256]


def test_what_record_stream_holds_is_recorded(seen: Seen) -> None:
    assert seen("holds") == {"streams": [True], "blocks": [True], "sizes": [1024, 1000]}


def test_an_allocator_like_the_device_s_has_its_settings(seen: Seen) -> None:
    found = seen("allocators_alike")
    assert (found["fraction"], found["taken"]) == (0.5, [40 << 20, 0])
    assert found["small"] == [12 << 20, 20 << 20]  # expandable segments grow by 20 MiB


def test_small_values_are_known_and_others_marked(seen: Seen) -> None:
    found = seen("values")
    assert found["known"] == [15, [0, 1, 2, 3, 4, 5], 5.0]
    assert found["unknown"] == [
        *[False] * 4,
        *[True] * 3,
    ]  # sum, list, a scalar there and back; two of the lost sum, a copy
    assert found["placeholders"] == [True, True]
    assert found["copied"] == [WIDE, WIDE]


def test_what_was_not_computed_reads_as_a_placeholder_that_checks_pass(seen: Seen) -> None:
    found = seen("placeholders")
    assert found["reads"] == dict.fromkeys(found["reads"], True)
    assert found["finite"] == dict.fromkeys(found["finite"], True)
    assert found["checks"] == [True, False, True]
    assert found["packed with what is known"] == 4096
    assert found["is an integer"]


def test_loss_scaling_and_clipping_find_nothing_that_is_not_finite(seen: Seen) -> None:
    assert seen("checks_of_gradients") == {"steps": 2, "scale": 65536.0, "norm is positive": True}


def test_reads_of_values_that_were_not_computed_are_told(seen: Seen) -> None:
    assert seen("unknown_reads") == [0.8125, 0.40625, None]


def test_an_operator_without_a_meta_kernel_is_named(seen: Seen) -> None:
    assert seen("refused") == (
        "aten::_to_sparse has no meta kernel, so the fake CUDA device cannot run it. Give it one that returns empty "
        'tensors of the right shapes: @torch.library.register_fake("aten::_to_sparse")'
    )


def test_groups_are_named_and_lists_are_gathered_by_way_of_one_tensor(seen: Seen) -> None:
    found = seen("groups")
    assert found["named"] == [True, True]
    assert found["taken"] == [8, 8]  # both at once: nobody has waited for the first
