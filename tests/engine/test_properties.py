"""Random trees of modules, sharded in one process: every element has one place, nothing is lost, identities stay."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import refshard
from refshard.engine.api import engine_of
from refshard.engine.flat import FlatParameter
from refshard.engine.layout import NARROWEST_BYTES
from refshard.engine.local_part import local_of
from refshard.engine.placement import MODES
from tests.engine.fakes import LateCollectives

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@dataclass(frozen=True)
class Leaf:
    """One parameter to be made; ``tied_to`` picks an earlier one to share, in place of making one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    tied_to: int | None


leaves = st.builds(
    Leaf,
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    trained=st.booleans(),
    tied_to=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
)
branches = st.recursive(
    st.lists(leaves, max_size=3), lambda inner: st.lists(st.one_of(leaves, inner), max_size=4), max_leaves=12
)
trees = st.tuples(branches, st.lists(branches, min_size=1, max_size=4), branches)
"""What lies before the blocks, the blocks, and what lies after them."""


class Branch(nn.Module):
    """Owns parameters and other branches; computes the sum of everything in it, plus its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self._parameters.values():
            assert parameter is not None
            x = x + parameter.sum().double()
        for module in self.children():
            x = module(x)
        return x


class Tree(nn.Module):
    """Branches before, in and after a list of blocks."""

    def __init__(self, before: nn.Module, blocks: list[nn.Module], after: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.layers = nn.ModuleList(blocks)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.after(x)
        return out


def grow(tree: object) -> Tree:
    """A model of that form; its values count up from 1, so that every element is another."""
    made: list[nn.Parameter] = []

    def parameter(leaf: Leaf) -> nn.Parameter:
        if leaf.tied_to is not None and made:
            return made[leaf.tied_to % len(made)]
        values = torch.arange(torch.Size(leaf.shape).numel()) % 251 + 1 + len(made)
        made.append(nn.Parameter(values.to(leaf.dtype).view(leaf.shape), requires_grad=leaf.trained))
        return made[-1]

    def branch(content: list[object]) -> nn.Module:
        module = Branch()
        for index, item in enumerate(content):
            if isinstance(item, Leaf):
                module.register_parameter(f"p{index}", parameter(item))
            else:
                assert isinstance(item, list)
                module.add_module(f"m{index}", branch(item))
        return module

    assert isinstance(tree, tuple)
    before, blocks, after = tree
    model = Tree(branch(before), [branch(block) for block in blocks], branch(after))
    if not made:
        model.before.register_parameter("p", nn.Parameter(torch.ones(3)))
    return model


class PartCollectives(LateCollectives):
    """One of several ranks, alone; what it would receive from the others is not looked at."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


def flats_of(model: nn.Module) -> list[FlatParameter]:
    return [flat for unit in engine_of(model).units for flat in unit.flats]


def check_every(condition: Callable[[FlatParameter], bool], model: nn.Module) -> None:
    assert all(condition(flat) for flat in flats_of(model))


modes = st.sampled_from(list(MODES))
sharding_modes = st.sampled_from([name for name, mode in MODES.items() if mode.optimizer == "shard"])


@given(trees, modes)
def test_names_and_identities_stay_and_values_come_back_to_the_bit(tree: object, mode: str) -> None:
    """Whoever held a parameter, an optimizer say, holds this rank's part of it afterwards."""
    model = grow(tree)
    held = dict(model.named_parameters(remove_duplicate=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained or [nn.Parameter(torch.zeros(1))], lr=0.5)
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    assert all(held[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    assert held.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert [p for p in model.parameters() if p.requires_grad] == trained or not trained
    after = dict(refshard.full_parameters(model))
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert (after[name].dtype, after[name].shape) == (value.dtype, value.shape)
        assert torch.equal(after[name], value)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} >= {id(p) for p in trained}


@given(trees, st.integers(1, 5), sharding_modes)
@pytest.mark.processes
def test_every_element_is_on_exactly_one_rank_in_its_place(tree: object, world_size: int, mode: str) -> None:
    whole = {name: p.detach().clone().flatten() for name, p in grow(tree).named_parameters()}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    shapes = [p.shape for p in grow(tree).parameters()]
    for rank in range(world_size):
        model = grow(tree)
        refshard.shard(model, mode=mode, collectives=PartCollectives(rank, world_size))
        for name, parameter in model.named_parameters():
            parts[name].append(local_of(parameter).detach().flatten())
        for flat in flats_of(model):
            for part in flat.parameters:
                assert torch.equal(flat.shard[part.start : part.stop], local_of(part.sharded).flatten())
        assert [p.shape for p in model.parameters()] == shapes
    for name, value in whole.items():
        assert torch.equal(torch.cat(parts[name]), value)


@given(trees, st.integers(1, 5), sharding_modes)
def test_alignment_holds_and_flats_are_of_one_kind(tree: object, world_size: int, mode: str) -> None:
    model = grow(tree)
    kinds = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    refshard.shard(model, mode=mode, collectives=PartCollectives(0, world_size))
    check_every(lambda flat: all(p.layout.offset * NARROWEST_BYTES % 128 == 0 for p in flat.parameters), model)
    check_every(lambda flat: flat.shard.numel() * NARROWEST_BYTES % 16 == 0, model)
    check_every(lambda flat: flat.shard.numel() * world_size == flat.layout.numel, model)
    check_every(lambda flat: len({kinds[p.layout.name] for p in flat.parameters}) == 1, model)
    check_every(lambda flat: flat.trained == kinds[flat.parameters[0].layout.name][1], model)


@given(trees, modes)
def test_a_tree_trains_as_it_does_unsharded(tree: object, mode: str) -> None:
    bare, model = grow(tree), grow(tree)
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    if not any(p.requires_grad for p in bare.parameters()):
        return
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        for m in (bare, model):
            m.zero_grad()
            m(x).square().sum().mul(1e-9).backward()
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5).step()
        for (name, mine), theirs in zip(model.named_parameters(), bare.parameters()):
            assert (mine.grad is None) == (theirs.grad is None), name
            assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad), name
    after = dict(refshard.full_parameters(model))
    assert all(torch.equal(after[name], p) for name, p in bare.named_parameters())
