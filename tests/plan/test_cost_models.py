"""Rows of strategies, and the modes that the engine's follow from."""

import pytest

from refshard.engine.placement import MODES
from refshard.errors import SpecError
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.plan.memory import usable_bytes
from refshard.quantities import GIB
from tests.plan.made import columns, hardware, job


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


def test_the_allocator_has_what_the_context_and_communicators_leave() -> None:
    """The figure of dry runs: one communicator for each axis of the mesh; a CPU keeps nothing."""
    rows = columns(job(), job(dp_shard=8), job(dp_shard=4, dp_replicate=2, tp=2))
    gpu, first, further = hardware(memory_bytes=80 * GIB), *COMMUNICATOR_BYTES
    left = 80 * GIB - context(gpu).bytes
    assert usable_bytes(gpu, rows).tolist() == [left, left - first, left - first - 2 * further]
    assert usable_bytes(hardware(memory_bytes=80 * GIB, device="cpu"), rows).tolist() == [80 * GIB] * 3
