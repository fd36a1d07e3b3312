"""What is held at the peak, from recordings made by hand."""

from refshard.dryrun.memory import account_memory, categories, live_rows
from refshard.dryrun.recording import Category, Phase
from tests.dryrun.made import Made

MIB = 2**20


def test_the_peak_is_where_most_is_allocated_and_not_where_most_is_reserved() -> None:
    made = Made()
    made.segment(20 * MIB)
    first = made.allocate(4 * MIB)
    second = made.allocate(6 * MIB)
    made.free(first)
    made.allocate(3 * MIB)
    made.free(second)
    account = account_memory(made.recording())
    assert account.peak_bytes == 10 * MIB
    assert account.reserved.max() == 20 * MIB
    assert account.allocated[-1] == 3 * MIB
    assert sum(one.bytes for one in account.held) == 10 * MIB


def test_what_is_held_is_named_by_category_module_and_operator() -> None:
    made = Made()
    made.allocate(8 * MIB, category=Category.PARAMETERS)
    made.phase, made.module = Phase.FORWARD, "layers.0.mlp"
    made.allocate(2 * MIB, name="aten::mm")
    made.allocate(2 * MIB, name="aten::mm")
    made.phase, made.module = Phase.OPTIMIZER, ""
    made.allocate(1 * MIB)
    account = account_memory(made.recording())
    assert account.by_category() == {
        Category.PARAMETERS: 8 * MIB,
        Category.ACTIVATIONS: 4 * MIB,
        Category.WORKSPACE: 1 * MIB,
    }
    assert account.by_module() == {"": 9 * MIB, "layers.0.mlp": 4 * MIB}
    largest_activation = account.held[1]
    assert (largest_activation.operator, largest_activation.blocks) == ("aten::mm", 2)
    assert largest_activation.phase is Phase.FORWARD


def test_what_is_made_outside_of_modules_is_an_activation_only_after_one_has_run() -> None:
    made = Made()
    made.allocate(1 * MIB)
    made.phase, made.module = Phase.FORWARD, "layers.0"
    made.allocate(1 * MIB)
    made.phase, made.module = Phase.OTHER, ""
    made.allocate(1 * MIB)
    recording = made.recording()
    found = categories(recording, live_rows(recording, len(recording) - 1))
    assert found.tolist() == [Category.OTHER, Category.ACTIVATIONS, Category.ACTIVATIONS]


def test_loading_ends_with_the_first_forward_pass() -> None:
    made = Made()
    whole = made.allocate(8 * MIB)
    made.allocate(2 * MIB)
    made.free(whole)
    made.phase, made.module = Phase.FORWARD, "layers.0"
    made.allocate(3 * MIB)
    made.phase, made.module = Phase.OTHER, ""
    made.allocate(1 * MIB)
    account = account_memory(made.recording())
    assert (account.loading_peak_bytes, account.training_peak_bytes) == (10 * MIB, 6 * MIB)


def test_a_recording_without_a_pass_is_all_loading() -> None:
    made = Made()
    made.allocate(2 * MIB)
    account = account_memory(made.recording())
    assert (account.loading_peak_bytes, account.training_peak_bytes) == (2 * MIB, 0)


def test_a_recording_without_memory_has_an_empty_account() -> None:
    made = Made()
    made.launch()
    account = account_memory(made.recording())
    assert (account.peak_bytes, account.reserved.max(initial=0), account.held) == (0, 0, ())
