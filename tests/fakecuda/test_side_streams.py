"""User code on side streams: a sharded model trains as it would unsharded, and no stream races with another."""

import pytest

from refshard.engine.placement import MODES
from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.side_streams import PROGRAMS, UNORDERED, UNSHARDED

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def seen() -> Seen:
    """What the programs did in all modes, and unsharded."""
    told = {"TEST_MODES": " ".join(MODES)}
    return see("tests.fakecuda.side_streams_checks", mode="host", ranks=2, environment=told)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_orders_its_streams_has_no_race(seen: Seen, name: str) -> None:
    for found in seen.on_all(name):
        (alone, _) = found[UNSHARDED]
        near = pytest.approx(alone, rel=0.1 if "bf16" in name else 1e-5)
        assert found == {mode: [near, []] for mode in (UNSHARDED, *MODES)}


@pytest.mark.parametrize("name", UNORDERED)
def test_a_program_that_lacks_an_order_is_told(seen: Seen, name: str) -> None:
    for found in seen.on_all(name):
        assert all(races for _, races in found.values())
