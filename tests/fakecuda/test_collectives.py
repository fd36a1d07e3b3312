"""Collectives between fake GPUs: what NCCL gives, and on which streams."""

from typing import Any

import pytest

from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes

CHECKS = "tests.fakecuda.collective_checks"


@pytest.fixture(scope="module", params=[2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (3, 8))])
def world(request: pytest.FixtureRequest) -> tuple[Seen, int]:
    return see(CHECKS, mode="host", ranks=request.param), request.param


@pytest.fixture(scope="module")
def alone() -> Seen:
    """Rank 0 of eight, in a dry run: values are as if all ranks held the same."""
    return see(CHECKS, mode="dry", ranks=8, alone=True)


def test_each_rank_has_a_gpu(world: tuple[Seen, int]) -> None:
    seen, size = world
    assert seen.on_all("init") == [["nccl", rank, size, rank] for rank in range(size)]


def test_all_reduce(world: tuple[Seen, int]) -> None:
    seen, size = world
    total, product = sum(range(1, size + 1)), 1
    for factor in range(2, size + 1):
        product *= factor
    for found in seen.on_all("all_reduce"):
        assert found["SUM"] == [total] * 2
        assert found["AVG"] == pytest.approx([total / size] * 2)
        assert (found["MAX"], found["MIN"], found["PRODUCT"]) == ([size] * 2, [1] * 2, [product] * 2)
        assert found["PREMUL_SUM"] == [total / 2] * 2
        assert found["PREMUL_SUM of a tensor"] == [total / 4] * 2
        for dtype in ("int64", "int32", "uint8", "bfloat16", "float16", "float64"):
            assert found[f"torch.{dtype}"] == [total], dtype
        assert found["torch.bool"] == [True]
        assert found["complex"] == [[size, total - size]]


def test_gathers(world: tuple[Seen, int]) -> None:
    seen, size = world
    numbers = list(range(1, size + 1))
    for rank, found in enumerate(seen.on_all("gathers")):
        assert found["into tensor"] == [number for number in numbers for _ in range(2)]
        assert found["stacked"] == found["list"] == [[number] * 2 for number in numbers]
        assert found["uneven"] == [[number] * number for number in numbers]
        assert found["to rank 1"] == (numbers if rank == 1 else None)


def test_reduce_scatters_and_scatter(world: tuple[Seen, int]) -> None:
    seen, size = world
    total = sum(range(1, size + 1))
    for rank, found in enumerate(seen.on_all("scatters")):
        part = [2.0 * rank, 2.0 * rank + 1]
        assert found["reduce"] == found["list"] == [total * one for one in part]
        assert found["mean"] == pytest.approx([total / size * one for one in part])
        assert found["max"] == [size * one for one in part]
        assert found["scatter"] == part
        assert found["source"] == [float(one * (rank + 1)) for one in range(2 * size)]  # as it was


def test_broadcast_and_reduce(world: tuple[Seen, int]) -> None:
    seen, size = world
    total = sum(range(1, size + 1))
    for rank, (sent, reduced) in enumerate(seen.on_all("to_and_from_one")):
        assert sent == [2, 2]
        assert reduced == ([total] * 2 if rank == 1 else [rank + 1] * 2)


def test_all_to_all(world: tuple[Seen, int]) -> None:
    seen, size = world
    for rank, found in enumerate(seen.on_all("all_to_all")):
        assert found["even"] == [rank + 10 * other for other in range(size)]
        assert found["uneven"] == [other for other in range(size) for _ in range(rank + other)]
        assert found["lists"] == [[other + 1] * (other + 1) for other in range(size)]


def test_sub_groups(world: tuple[Seen, int]) -> None:
    seen, size = world
    for rank, found in enumerate(seen.on_all("sub_groups")):
        assert found == [3 if rank < 2 else rank + 1, sum(range(2, size + 1)) if rank else 1]


def test_large_messages_both_ways_round_a_ring(world: tuple[Seen, int]) -> None:
    seen, size = world
    for rank, found in enumerate(seen.on_all("ring")):
        before, after = (rank - 1) % size + 1, (rank + 1) % size + 1
        assert found == {"values": [before, before, 10 * after], "all": True}


def test_messages_of_a_pair_stay_in_order(world: tuple[Seen, int]) -> None:
    seen, _ = world
    for rank, (token, first, second) in enumerate(seen.on_all("point_to_point")):
        assert token == rank + 1
        assert (first, second) == ((7, 8) if rank == 1 else (0, 0))


def test_coalesced_collectives(world: tuple[Seen, int]) -> None:
    seen, size = world
    numbers, total = list(range(1, size + 1)), sum(range(1, size + 1))
    for found in seen.on_all("coalesced"):
        assert found["all_reduce"] == [[total] * 2, [10 * total] * 3]
        assert found["all_gather"] == [numbers, [2 * number for number in numbers]]
        assert found["reduce_scatter"] == [total, 2 * total]


def test_objects(world: tuple[Seen, int]) -> None:
    seen, size = world
    gathered = [{"rank": rank, "words": ["a"] * rank} for rank in range(size)]
    for rank, found in enumerate(seen.on_all("objects")):
        collected = [2 * other for other in range(size)] if rank == 0 else None
        assert found == [gathered, ["from 0", 0], [f"for {rank}"], collected]


def test_functional_collectives(world: tuple[Seen, int]) -> None:
    seen, size = world
    numbers, total = list(range(1, size + 1)), sum(range(1, size + 1))
    for found in seen.on_all("functional"):
        assert found["reduce_scatter"] == pytest.approx([total / size])
        assert (found["all_reduce"], found["all_gather"], found["broadcast"]) == ([total], numbers, [2])
        assert found["all_to_all"] == numbers


def test_futures(world: tuple[Seen, int]) -> None:
    seen, size = world
    total = sum(range(1, size + 1))
    assert seen.on_all("futures") == [[[2 * total] * 2, True, [total] * 2]] * size


def test_timeouts_can_be_set(world: tuple[Seen, int]) -> None:
    seen, size = world
    assert seen.on_all("timeouts") == [True] * size


def test_meshes_and_dtensor(world: tuple[Seen, int]) -> None:
    seen, size = world
    shards = size // 2
    for rank, found in enumerate(seen.on_all("meshes")):
        if size % 2:
            assert found == {}
            continue
        row, column = divmod(rank, shards)
        assert found["replicate"] == 2 * (column + 1) + shards
        assert found["shard"] == sum(row * shards + other + 1 for other in range(shards))
        assert (found["rows"], found["columns"]) == ([8 // shards, 4], [8, 4 // shards])
        assert found["partial"] == found["shard"]
        assert found["same"] is found["product"] is True
        assert (found["mesh of one"], found["flattened"]) == (shards, size)


def test_random_dtensors_are_drawn_alike_or_apart(world: tuple[Seen, int]) -> None:
    seen, _ = world
    drawn = seen.on_all("random_dtensors")
    for name in ("alike", "after"):
        assert all(found[name] == drawn[0][name] for found in drawn), name
    assert drawn[0]["alike"] != drawn[0]["after"]
    parts = [tuple(found["apart"]) for found in drawn]
    assert len(set(parts)) == len(parts)


def test_batch_normalisation_over_all_ranks(world: tuple[Seen, int]) -> None:
    seen, _ = world
    for found in seen.on_all("sync_batch_norm"):
        assert all(found.values()), found


IN_BETWEEN = ["record e1 s0", "wait e1 s1"]
STREAMS: dict[str, list[str]] = {
    # The communicator's own stream waits for the current one, and wait() lets the current one wait for it.
    "async": [*IN_BETWEEN, "collective all_reduce s1", "record e2 s1", "launch aten::add s0", "wait e2 s0"],
    "sync": ["collective all_reduce s0"],
    "on a side stream": ["collective all_gather s1"],
    "async, waited for on a side stream": [*IN_BETWEEN, "collective all_gather s1", "record e2 s1", "wait e2 s2"],
    "coalesced": [*IN_BETWEEN, "collective all_reduce s1", "record e2 s1", "wait e2 s0"],
    "batch": [
        *IN_BETWEEN, "collective send s1", "record e2 s0", "wait e2 s1", "collective recv s1", "record e3 s1",
        "wait e3 s0",
    ],
    "barrier": ["launch aten::zero_ s0", "collective barrier s0", "synchronise barrier s0"],
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_nccls(world: tuple[Seen, int], alone: Seen, name: str) -> None:
    seen, _ = world
    assert seen("streams")[name] == STREAMS[name]
    assert alone("streams")[name] == STREAMS[name]


def test_what_nobody_waits_for_stays_until_the_watchdog_has_seen_it(alone: Seen) -> None:
    assert alone("unwaited") == {
        "waited for": 0, "not waited for": 8, "after a collective at once": 8, "after one in a backward": 0,
        "after a thousand launches": 8, "after a collective much later": 0,
    }  # fmt: skip


ALL_ALIKE: dict[str, Any] = {
    "to_and_from_one": [[1, 1], [8, 8]],
    "sub_groups": [2, 1],
    "coalesced": {
        "all_reduce": [[8, 8], [80, 80, 80]], "all_gather": [[1] * 8, [2] * 8], "reduce_scatter": [8, 16],
    },
    "functional": {
        "all_reduce": [8], "all_gather": [1] * 8, "reduce_scatter": [1], "broadcast": [1], "all_to_all": [1] * 8,
    },
    "futures": [[16, 16], True, [8, 8]],
    "objects": [[{"rank": 0, "words": []}] * 8, ["from 0", 0], ["for 0"], [0] * 8],
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_ALIKE)
def test_alone_values_are_as_if_all_ranks_held_the_same(alone: Seen, name: str) -> None:
    assert alone(name) == ALL_ALIKE[name]


def test_alone_reductions_are_those_of_equal_values(alone: Seen) -> None:
    found = alone("all_reduce")
    assert (found["SUM"], found["AVG"], found["MAX"], found["PRODUCT"]) == ([8, 8], [1, 1], [1, 1], [1, 1])
    assert (found["PREMUL_SUM"], found["PREMUL_SUM of a tensor"]) == ([4, 4], [2, 2])


def test_alone_a_rank_gets_its_own_part_from_each(alone: Seen) -> None:
    found = alone("all_to_all")
    assert found["even"] == [0] * 8
    assert found["lists"] == [[1] * (other + 1) for other in range(8)]
    parts = alone("scatters")
    assert (parts["reduce"], parts["mean"], parts["scatter"]) == ([0, 8], [0, 1], [0, 1])


def test_alone_meshes_have_their_shapes(alone: Seen) -> None:
    found = alone("meshes")
    assert (found["replicate"], found["shard"], found["mesh of one"]) == (2, 4, 4)
    assert (found["rows"], found["columns"]) == ([2, 4], [8, 1])
