"""Slots: ownership, generations, storage that comes and goes."""

import pytest
import torch

from refshard.engine.buffers import Slot
from refshard.errors import EngineError
from refshard.plan.layout import ParameterLayout


@pytest.mark.parametrize("persistent", [False, True])
def test_views_outlive_the_coming_and_going_of_storage(persistent: bool) -> None:
    slot = Slot([torch.empty(12)], persistent=persistent)
    ((view,),) = slot.views([[ParameterLayout("p", (2, 3), 4)]])
    for value in (1.0, 2.0):
        slot.acquire("a")
        slot.flats[0].fill_(value)
        assert torch.equal(view, torch.full((2, 3), value))
        slot.release()
        assert (slot.flats[0].untyped_storage().nbytes() > 0) == persistent


def test_a_refill_does_not_show_in_a_views_version() -> None:
    slot = Slot([torch.empty(4)], persistent=True)
    ((view,),) = slot.views([[ParameterLayout("p", (4,), 0)]])
    before = view._version
    slot.flats[0].fill_(3.0)
    assert view._version == before


def test_only_one_owner_at_a_time() -> None:
    slot = Slot([torch.empty(4)], persistent=True)
    slot.acquire("a")
    with pytest.raises(EngineError, match="unit 'b' needs the slot that unit 'a' still holds"):
        slot.acquire("b")


def test_debug_fills_what_is_freed_with_nan() -> None:
    slot = Slot([torch.empty(4)], persistent=True, debug=True)
    slot.acquire("a")
    slot.release()
    assert slot.flats[0].isnan().all()
