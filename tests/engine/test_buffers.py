"""Pools and slots: ownership, shared bytes, versions, storage that comes and goes."""

import pytest
import torch

from refshard.engine.arena import Lasting
from refshard.engine.buffers import Pool, Slot, carve, nbytes_of
from refshard.engine.layout import ParameterLayout
from refshard.errors import EngineError

WHOLE = [[ParameterLayout("p", (4,), 0)]]


def make_slot(pool: Pool, numel: int = 4, *, debug: bool = False) -> Slot:
    """A slot at the start of a pool."""
    return Slot(pool, carve(pool, [(numel, torch.float32)]), WHOLE, debug=debug)


def make_pool(lasting: Lasting = "always", nbytes: int = 1024) -> Pool:
    return Pool(torch.empty(nbytes, dtype=torch.uint8), lasting)


def has_storage(slot: Slot) -> bool:
    return slot.flats[0].untyped_storage().nbytes() > 0


@pytest.mark.parametrize(
    ("lasting", "after_use", "after_pass"),
    [("always", True, True), ("per pass", True, False), ("per use", False, False)],
)
def test_views_outlive_the_coming_and_going_of_storage(lasting: Lasting, after_use: bool, after_pass: bool) -> None:
    pool = make_pool(lasting)
    slot = Slot(pool, carve(pool, [(12, torch.float32)]), [[ParameterLayout("p", (2, 3), 4)]])
    pool.rest()
    for value in (1.0, 2.0):
        slot.acquire("a")
        slot.flats[0].fill_(value)
        assert torch.equal(slot.views[0][0], torch.full((2, 3), value))
        pool.rest()
        assert has_storage(slot), "a pool rests while a slot is in use"
        slot.release()
        assert has_storage(slot) == after_use
        pool.rest()
        assert has_storage(slot) == after_pass


def test_a_refill_does_not_show_in_a_views_version() -> None:
    slot = make_slot(make_pool())
    before = slot.views[0][0]._version
    slot.flats[0].fill_(3.0)
    assert slot.views[0][0]._version == before


def test_only_one_owner_at_a_time_of_bytes_that_slots_share() -> None:
    pool = make_pool()
    small, large, elsewhere = make_slot(pool), make_slot(pool, 8), make_slot(make_pool())
    small.acquire("a")
    assert (large.free, elsewhere.free) == (False, True)
    elsewhere.acquire("c")
    with pytest.raises(EngineError, match="unit 'b' needs the slot that unit 'a' still holds"):
        large.acquire("b")
    small.release()
    large.acquire("b")


def test_flat_buffers_of_several_dtypes_lie_side_by_side_and_aligned() -> None:
    sizes = [(3, torch.float32), (5, torch.bfloat16)]
    pool = make_pool(nbytes=nbytes_of(sizes))
    first, second = carve(pool, sizes)
    assert (first.dtype, first.numel(), second.dtype, second.numel()) == (torch.float32, 3, torch.bfloat16, 5)
    assert second.data_ptr() - first.data_ptr() == 512
    assert nbytes_of(sizes) == 512 + 10


def test_a_slot_knows_its_own_memory() -> None:
    pool = make_pool()
    slot = make_slot(pool)
    start = pool.memory.data_ptr()
    assert [slot.holds(start + offset) for offset in (-1, 0, 15, 16)] == [False, True, True, False]


def test_debug_fills_what_is_freed_with_nan() -> None:
    slot = make_slot(make_pool(), debug=True)
    slot.acquire("a")
    slot.release()
    assert slot.flats[0].isnan().all()
