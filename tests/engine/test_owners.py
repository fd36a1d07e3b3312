"""Owners of whole tensors: every tensor has one, no rank waits for another longer than for the largest tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.engine.owners import IMBALANCE, choose_owners, share_out, step_cost

COSTS = st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=5), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


@pytest.mark.parametrize(
    ("shape", "cost"), [((), 1), ((7,), 7), ((2, 3), 12), ((3, 2), 12), ((8, 3, 5, 5), 8 * 75 * 8), ((0, 4), 0)]
)
def test_cost_is_that_of_matrix_products(shape: tuple[int, ...], cost: int) -> None:
    assert step_cost(shape) == cost


def shares(costs: list[int], owners: list[int], ranks: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(ranks)]


@given(COSTS, RANKS)
def test_buckets_are_the_smallest_that_can_be_shared_evenly(costs: list[list[int]], ranks: int) -> None:
    buckets = list(share_out(costs, ranks))
    assert [index for flats, _ in buckets for index in flats] == list(range(len(costs)))
    loads = [0] * ranks
    for flats, owners in buckets:
        for stop in range(flats.start + 1, flats.stop + 1):
            bucket = [cost for of_flat in costs[flats.start : stop] for cost in of_flat]
            found = shares(bucket, choose_owners(bucket, loads), ranks)
            even = max(found) * ranks <= IMBALANCE * sum(bucket)
            assert even == (stop == flats.stop) or stop == len(costs)
        assert owners == choose_owners(bucket, loads)
        loads = [load + share for load, share in zip(loads, found)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), RANKS)
def test_no_rank_has_more_than_its_share_and_one_tensor(costs: list[int], ranks: int) -> None:
    found = shares(costs, choose_owners(costs, [0] * ranks), ranks)
    assert sum(found) == sum(costs)
    assert max(found) <= sum(costs) / ranks + max(costs)


def test_the_last_tensors_go_to_those_who_own_the_least() -> None:
    assert choose_owners([5, 5], [9, 0, 3]) == [1, 2]


@pytest.mark.parametrize(("ranks", "blocks"), [(2, 1), (4, 1), (8, 2), (16, 4), (32, 8)])
def test_the_ranks_share_the_blocks_of_a_llama_3_8b_evenly(ranks: int, blocks: int) -> None:
    """Three of a block's seven matrices are large: more ranks take more blocks at a time, and are 11 % off the mean."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    costs = [step_cost(shape) for shape in shapes]
    buckets = list(share_out([costs] * 32, ranks))
    assert {len(flats) for flats, _ in buckets} == {blocks}
    for _, owners in buckets:
        found = shares(costs * blocks, owners, ranks)
        assert max(found) / (sum(found) / ranks) == pytest.approx(1.11, abs=0.005)
