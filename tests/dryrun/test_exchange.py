"""What collectives give from values that other ranks sent in their own runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refshard.dryrun.exchange import Exchange, Sent, Values, unsettled

SUM, AVG, PRODUCT, MIN, MAX, BITWISE_AND = range(6)


class World:
    """Ranks of one group that run one after another, each once more with what the others sent."""

    def __init__(self, size: int) -> None:
        self.ext: Any = SimpleNamespace(groups=lambda: [("0", ())])
        self.size = size

    def run(self, op: str, given: list[Any], out: list[Any], *, root: int = -1, reduces: int = -1) -> list[bool]:
        """Whether each rank's outputs were filled; ``out`` are those."""
        values: Values = {}
        for rank in range(self.size):
            self.call(rank, op, {}, given[rank], out[rank], root, reduces, values)
        return [
            self.call(rank, op, dict(values), given[rank], out[rank], root, reduces, {}) for rank in range(self.size)
        ]

    def call(
        self, rank: int, op: str, known: Values, given: Any, out: Any, root: int, reduces: int, into: Values
    ) -> bool:
        exchange = Exchange(self.ext, rank, self.size, known)
        mine = [one.clone() for one in out]
        ins = mine if given is out else given
        found = exchange._exchange(0, 0, op, -1, root, reduces, mine, ins)
        into[rank] = tuple(exchange.sent)
        if known and found:
            for kept, new in zip(out, mine):
                kept.copy_(new)
        return found


def tensors(*values: Any) -> list[list[torch.Tensor]]:
    return [[torch.tensor(value)] for value in values]


@pytest.mark.parametrize(("reduces", "result"), [(SUM, 10), (PRODUCT, 21), (MIN, 3), (MAX, 7)])
def test_reductions(reduces: int, result: int) -> None:
    given = tensors([3], [7])
    assert World(2).run("all_reduce", given, given, reduces=reduces) == [True, True]
    assert [one.item() for (one,) in given] == [result, result]


def test_an_average_of_bf16() -> None:
    given = [[torch.tensor([value], dtype=torch.bfloat16)] for value in (1.0, 2.0)]
    World(2).run("all_reduce", given, given, reduces=AVG)
    assert given[0][0].item() == 1.5


def test_a_reduction_that_is_not_computed_leaves_the_tensor() -> None:
    given = tensors([6], [3])
    assert World(2).run("all_reduce", given, given, reduces=BITWISE_AND) == [False, False]


def test_a_gather_of_all() -> None:
    out = [[torch.zeros(2, dtype=torch.int64)] for _ in range(2)]
    assert all(World(2).run("all_gather", tensors([3], [7]), out))
    assert [one.tolist() for (one,) in out] == [[3, 7], [3, 7]]
    lists = [[torch.zeros(1, dtype=torch.int64) for _ in range(2)] for _ in range(2)]
    assert all(World(2).run("all_gather", tensors([3], [7]), lists))
    assert [one.item() for one in lists[0]] == [3, 7]


def test_a_broadcast_gives_what_the_root_has() -> None:
    out = tensors([3, 4], [0, 0])
    World(2).run("broadcast", [out[0], []], out, root=0)
    assert out[1][0].tolist() == [3, 4]


def test_a_scatter_gives_each_rank_its_part() -> None:
    out = tensors([0], [0])
    World(2).run("scatter", [[torch.tensor([5]), torch.tensor([6])], []], out, root=0)
    assert [one.item() for (one,) in out] == [5, 6]


def test_a_reduction_that_is_scattered() -> None:
    out = tensors([0], [0])
    World(2).run("reduce_scatter", tensors([1, 2], [10, 20]), out, reduces=SUM)
    assert [one.item() for (one,) in out] == [11, 22]


def test_what_nobody_computed_is_not_given() -> None:
    world, out = World(2), tensors([1], [2])
    unknown: Values = {}
    world.call(1, "all_reduce", {}, None, out[1], -1, SUM, unknown)
    assert not world.call(0, "all_reduce", unknown, out[0], out[0], -1, SUM, {})


def test_a_rank_that_was_given_other_values_has_to_run_again() -> None:
    def sent(value: bytes) -> tuple[Sent, ...]:
        return (Sent("0", (0, 1), 0, "all_reduce", -1, -1, -1, (value,)),)

    now = {0: sent(b"a"), 1: sent(b"b")}
    assert unsettled(0, {}, now)  # it took rank 1 to have the same
    assert not unsettled(0, {}, {0: sent(b"a"), 1: sent(b"a")})
    assert not unsettled(0, {1: sent(b"b")}, now)
    assert unsettled(0, {1: sent(b"c")}, now)
