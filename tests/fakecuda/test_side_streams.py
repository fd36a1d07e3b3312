"""User code on side streams: a sharded model trains as it would unsharded, and no stream races with another."""

import functools
from collections.abc import Callable

import pytest

from refshard.engine.placement import MODES
from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.side_streams import PROGRAMS, UNORDERED, UNSHARDED

pytestmark = pytest.mark.processes

FEW, REST = ("yafsdp",), ("fsdp", "replicate", "zero1", "zero2")


@pytest.fixture(scope="module")
def see_modes() -> Callable[[tuple[str, ...]], Seen]:
    """What the programs did in some modes, and unsharded."""

    @functools.cache
    def seen(modes: tuple[str, ...]) -> Seen:
        told = {"TEST_MODES": " ".join(modes)}
        return see("tests.fakecuda.side_streams_checks", mode="host", ranks=2, environment=told)

    return seen


MODES_OF_TIERS = pytest.mark.parametrize("modes", [FEW, pytest.param(REST, marks=pytest.mark.full)], ids=" ".join)


@MODES_OF_TIERS
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_orders_its_streams_has_no_race(
    see_modes: Callable[[tuple[str, ...]], Seen], name: str, modes: tuple[str, ...]
) -> None:
    for found in see_modes(modes).on_all(name):
        (alone, _) = found[UNSHARDED]
        near = pytest.approx(alone, rel=0.1 if "bf16" in name else 1e-5)
        assert found == {mode: [near, []] for mode in (UNSHARDED, *modes)}


@MODES_OF_TIERS
@pytest.mark.parametrize("name", UNORDERED)
def test_a_program_that_lacks_an_order_is_told(
    see_modes: Callable[[tuple[str, ...]], Seen], name: str, modes: tuple[str, ...]
) -> None:
    for found in see_modes(modes).on_all(name):
        assert all(races for _, races in found.values())


def test_the_tiers_have_all_modes() -> None:
    assert {*FEW, *REST} == set(MODES)
