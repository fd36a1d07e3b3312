"""A dry run takes what training scripts use besides a transformer's operators, or refuses it by name."""

import pytest

from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes

WIDE = 1 << 10


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.breadth_checks", mode="dry")


def test_sizes_that_depend_on_values_are_the_largest(seen: Seen) -> None:
    every = WIDE * WIDE
    assert seen("sizes_by_value") == {
        "masked_select": [[every], [every]],
        "unique": [[every], [WIDE, WIDE], [every]],
        "unique of rows": [[WIDE, WIDE], [WIDE]],
        "consecutive": [[every], [every]],
        "bincount": [[8]],
    }


def test_losses_and_samples_without_meta_kernels(seen: Seen) -> None:
    assert seen("losses_and_samples") == {
        "ctc": [[50, 16, 20]],
        "margin": [[64, WIDE]],
        "dirichlet": [[64, WIDE]],
        "fake quantisation": [[64, WIDE]],
        "gru cell": [[8, WIDE]],
    }


def test_recurrent_layers_are_cudnns(seen: Seen) -> None:
    found = seen("recurrent")
    assert found["shapes"] == [[10, 4, 128], [10, 4, 64], [384, 64], [384, 128], [384], [384]]
    assert found["projected"] == [[10, 4, 256], [10, 4, 32], [34, 256]]
    assert found["launches"] == 2  # one forward and one backward
    assert found["kept"]
    assert found["buffers"] == 1


def test_routers_choose_all_experts_evenly(seen: Seen) -> None:
    assert seen("experts") == {"counts": [128] * 16, "drawn": 15, "highest": [15, 15, 0]}


def test_comparisons_of_unknown_values_hold_for_placeholders(seen: Seen) -> None:
    assert seen("comparisons") == [True, False, True, True, False, True]


def test_checkpoints_load_to_the_gpu(seen: Seen) -> None:
    assert seen("storages") == {
        "values": [[0, 1, 2, 3, 4, 5]] * 2,
        "devices": ["cuda:0"],
        "made": ["cuda:1", 64, 3, [7]],
    }


def test_autograds_thread_may_wait_without_python_code(seen: Seen) -> None:
    assert seen("copies_in_backward")


def test_a_copy_names_what_it_fills(seen: Seen) -> None:
    assert seen("copies_name_what_they_fill")


def test_layouts_are_refused_by_name(seen: Seen) -> None:
    found = seen("layouts")
    assert found["sparse"].endswith(
        "the fake CUDA device has no sparse tensors; use dense ones for a dry run (sparse=False for an embedding)"
    )
    assert found["strided"].endswith(
        "the fake CUDA device has no nested tensors of the layout torch.strided; use layout=torch.jagged for a dry run"
    )


def test_attention_kernels_that_scripts_ask_for(seen: Seen) -> None:
    found = seen("attention_kernels")
    assert found["half"] == [True, True, True]
    assert found["full"] == [False, True, False]
    assert found["jagged"] == [350, 8, 64]
    assert found["kernels"] == ["aten::_flash_attention_forward"]


def test_a_rank_alone_saves_and_loads_its_part_of_a_checkpoint(seen: Seen) -> None:
    assert seen("checkpoints") == {"small": [0, 1, 2, 3, 4, 5], "part": True}


def test_a_pipeline_stage_runs_alone_if_it_is_given_shapes(seen: Seen) -> None:
    found = seen("pipelines")
    assert found["gradient"] == [WIDE, WIDE]
    assert "give it input_args and output_args" in found["refused"]
