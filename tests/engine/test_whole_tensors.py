"""Owners' steps as one rank sees them: in what order things happen, and what is there at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import refshard
from refshard.engine.collectives import Pending
from refshard.engine.local_part import local_of
from refshard.engine.whole_tensors import WholeTensors
from tests.engine.fakes import make_net
from tests.engine.test_properties import PartCollectives

Log = list[str]


class LoggedCollectives(PartCollectives):
    """One of several ranks, which notes exchanges when they are issued and awaited, and what it gives; ones arrive."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.log: Log = []
        self.given: list[torch.Tensor] = []

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        assert sum(received) == output.numel()
        assert sum(sent) == given.numel()
        self.log.append("issue")
        self.given.append(given.clone())

        class Logged:
            def wait(_) -> None:  # noqa: N805
                self.log.append("wait")
                output.fill_(1)

        return Logged()


class Plain(torch.optim.SGD):
    """Notes how many of its tensors have values when it is stepped."""

    log: Log

    def step(self, closure: Any = None) -> Any:
        for tensor in (p for group in self.param_groups for p in group["params"]):
            assert tensor.grad is not None
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert tensor.grad.data_ptr() % 64 == 0
        self.log.append("step")
        return super().step(closure)


class Pairs(nn.Module):
    """Blocks of four matrices of one size, of which each of two ranks owns two."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(4))) for _ in range(blocks)
        )


@pytest.fixture
def stepped() -> tuple[WholeTensors, Log]:
    """The first of two ranks, after a step of all parameters."""
    collectives = LoggedCollectives(0, 2)
    model = refshard.shard(Pairs(), mode="fsdp", collectives=collectives)
    Plain.log = collectives.log
    optimizer = refshard.whole_tensors(Plain, model, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, collectives.log


def test_a_bucket_comes_while_the_one_before_is_stepped(stepped: tuple[WholeTensors, Log]) -> None:
    """Of each bucket gradients and parameters come, it is stepped, and parameters go: the next one is on its way then,
    and the one before is on its way back.
    """
    _, log = stepped
    text = "".join({"issue": "i", "wait": "w", "step": "S"}[entry] for entry in log)
    come, came, go, gone = "ii", "ww", "i", "w"
    last = came + "S" + go + gone
    assert text == come + came + come + "S" + go + (came + come + "S" + go + gone) * 2 + last + gone


def test_what_has_been_stepped_is_sent_back(stepped: tuple[WholeTensors, Log]) -> None:
    """Also a matrix that was copied to an aligned place: the 81 elements before it are no multiple of 64 bytes."""
    optimizer, _ = stepped
    collectives = optimizer.collectives
    assert isinstance(collectives, LoggedCollectives)
    returned = [given for given in collectives.given if (given == 0.9).any()]
    assert len(returned) == 4, "one return of each bucket"
    assert all((given == 0.9).all() and given.numel() == 2 * 81 for given in returned)


def test_nothing_whole_is_left_after_a_step(stepped: tuple[WholeTensors, Log]) -> None:
    optimizer, _ = stepped
    for member in optimizer.members:
        assert member.tensor.grad is None
        assert member.tensor.untyped_storage().nbytes() == member.tensor.element_size()
        assert member.tensor.isnan().all()
        assert member.tensor.shape == member.parameter.shape


def test_parts_are_those_of_what_came_back_and_their_version_rises() -> None:
    model = refshard.shard(make_net(), mode="fsdp", collectives=LoggedCollectives(1, 3))
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model)
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    versions = [p._version for p in parameters]
    before = [local_of(p).clone() for p in parameters]
    optimizer.step()
    assert (local_of(parameters[0]) == 1).all()
    assert local_of(parameters[0])._version > versions[0]
    for parameter, value in zip(parameters[1:], before[1:]):
        assert torch.equal(local_of(parameter), value), "without a gradient it is not stepped"


class RemembersWeights(torch.optim.SGD):
    """Copies weights when it is made, where an owner has none yet."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["first"] = parameter.detach().clone()


def test_what_an_optimizer_reads_when_it_is_made_is_no_number() -> None:
    model = refshard.shard(make_net(), mode="fsdp", collectives=LoggedCollectives(0, 2))
    optimizer = refshard.whole_tensors(RemembersWeights, model, lr=0.1)
    own = [member for member in optimizer.members if member.owner == 0]
    assert own
    assert all(optimizer.state[member.parameter]["first"].isnan().all() for member in own)
    assert {p for p, state in optimizer.state.items() if not state} == set(model.parameters()) - {
        member.parameter for member in own
    }


@pytest.mark.parametrize("mode", ["replicate", "fsdp"])
def test_where_nothing_is_sharded_every_rank_steps_all(mode: str) -> None:
    bare, model = make_net(), refshard.shard(make_net(), mode=mode, collectives=LoggedCollectives(0, 1))
    alone = torch.optim.Adafactor(bare.parameters())
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model)
    for mine, theirs in zip(model.parameters(), bare.parameters()):
        theirs.grad = torch.arange(1.0, 1 + theirs.numel()).view_as(theirs)
        mine.grad = theirs.grad.clone()
    for each in (alone, optimizer):
        each.step()
    assert all(map(torch.equal, model.parameters(), bare.parameters()))
    assert len(optimizer.state) == len(list(bare.parameters()))
    assert not optimizer.collectives.log  # type: ignore[attr-defined]


def test_ignored_parameters_are_stepped_on_every_rank() -> None:
    model = make_net()
    refshard.shard(model, mode="fsdp", ignored=["head.weight"], collectives=LoggedCollectives(0, 2))
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    assert set(optimizer.state) == {model.head.weight}
