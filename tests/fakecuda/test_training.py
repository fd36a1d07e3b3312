"""Strategies train on fake GPUs as they train on CPUs over gloo."""

import pytest

from tests.distributed.ranks import run_each
from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.training import ON_EIGHT, ON_THE_HOST, ON_TWO, Way, losses

pytestmark = pytest.mark.processes

ROUNDED = ("fsdp2 offload", "refshard-fsdp offload", "refshard-yafsdp hybrid")
"""The host's optimizer is not the fused one; and gloo's ranks add up in another order."""


def _on_cpus(world_size: int, ways: dict[str, Way]) -> dict[str, list[float]]:
    names = [name for name in ways if name not in ON_THE_HOST]
    found = run_each(world_size, losses, [(ways[name], "cpu") for name in names])
    return dict(zip(names, found[0]))


@pytest.fixture(scope="module")
def on_two() -> tuple[Seen, dict[str, list[float]]]:
    return see("tests.fakecuda.training_checks", mode="host", ranks=2), _on_cpus(2, ON_TWO)


@pytest.fixture(scope="module")
def on_eight() -> tuple[Seen, dict[str, list[float]]]:
    return see("tests.fakecuda.training_checks", mode="host", ranks=8), _on_cpus(8, ON_EIGHT)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_lose_as_on_cpus(on_two: tuple[Seen, dict[str, list[float]]], name: str) -> None:
    _compare(name, *on_two)


@pytest.mark.full
@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_ranks_lose_as_on_cpus(on_eight: tuple[Seen, dict[str, list[float]]], name: str) -> None:
    _compare(name, *on_eight)


def _compare(name: str, seen: Seen, on_cpus: dict[str, list[float]]) -> None:
    wanted = on_cpus[ON_THE_HOST.get(name, name)]
    assert wanted[-1] < wanted[0]
    for got in seen.on_all(name):
        assert got == pytest.approx(wanted, rel=1e-6) if name in ROUNDED else got == wanted
