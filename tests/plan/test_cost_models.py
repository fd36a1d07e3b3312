"""Rows of strategies, and the modes that the engine's follow from."""

import pytest

from refshard.engine.placement import MODES
from refshard.errors import SpecError
from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.plan.memory import usable
from refshard.quantities import GIB
from tests.plan.made import hardware


@pytest.mark.parametrize("name", MODES)
def test_a_row_of_the_engine_divides_what_its_mode_does(name: str) -> None:
    way, mode = COST_MODELS[f"refshard-{name}"], MODES[name]
    assert way.shards_optimizer == (mode.optimizer == "shard")
    assert way.shards_gradients == (mode.gradients == "shard")
    assert way.shards_parameters == (mode.parameters == "shard")


def test_what_is_divided_has_its_optimizer_divided() -> None:
    for name, way in COST_MODELS.items():
        assert way.by_unit <= way.shards_gradients <= way.shards_optimizer
        assert way.name == name


def test_zero_stages_divide_one_thing_more_each() -> None:
    stages = ("ddp", "refshard-zero1", "refshard-zero2", "refshard-fsdp")
    divided = [(w.shards_optimizer, w.shards_gradients, w.keeps) for w in map(find_cost_model, stages)]
    assert divided == [(False, False, False), (True, False, False), (True, True, True), (True, True, False)]


def test_simplefsdp_by_block_has_as_many_copies_as_fsdp2_and_keeps_one_block_less() -> None:
    fsdp2, by_block = find_cost_model("fsdp2"), find_cost_model("simplefsdp-by-block")
    assert (by_block.copies_out, by_block.copies_in) == (fsdp2.copies_out, fsdp2.copies_in) == (True, True)
    assert by_block.parameter_slots == fsdp2.parameter_slots - 1


def test_a_strategy_without_a_row_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"strategy: no strategy 'fsdp3' has a closed form; did you mean 'fsdp[12]'"):
        find_cost_model("fsdp3")


def test_tensors_can_fill_what_context_and_fragmentation_leave() -> None:
    """A GPU keeps 2 GiB for its context and communicators, a CPU nothing, and 4 % lie between blocks."""
    for device, expected in (("cuda", 78), ("cpu", 80)):
        one = hardware(memory_bytes=80 * GIB, device=device)
        assert usable(one) == int(expected * GIB * 0.96)
