"""Several microbatches under way, as the schedules of pipelines have it: forwards before the first one's backward."""

import warnings
from collections.abc import Iterator

import pytest
import torch

import refshard
from refshard.engine.api import engine_of
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from refshard.engine.schedule import OpKind, PassKind, assign_rings, build, chain_markers
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net

# F: forward, B: backward, E: an evaluation.
ORDERS = {
    "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3",
    "1F1B, first stage of three": "F0 F1 F2 B0 F3 B1 B2 B3",
    "1F1B, second stage of three": "F0 F1 B0 F2 B1 F3 B2 B3",
    "the last first": "F0 F1 F2 B2 B1 B0",
    "evaluated in between": "F0 E9 B0 F1 F2 B1 E9 B2",
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """A warning from the engine is a finding."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="refshard")
        yield


def step(model: Net, order: str, start: int) -> list[float]:
    """Run one step's passes in this order; return the losses by microbatch."""
    losses: dict[int, torch.Tensor] = {}
    for pass_ in order.split():
        number = int(pass_[1:])
        batch = make_batch(10 * start + number)
        if pass_[0] == "F":
            losses[number] = loss_of(model, batch)
        elif pass_[0] == "B":
            losses[number].backward()
        else:
            with torch.no_grad():
                model(batch[0])
    return [losses[number].item() for number in sorted(losses)]


def train(model: Net, order: str, steps: int = 4) -> list[list[float]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    found = []
    for start in range(steps):
        found.append(step(model, order, start))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["plain", "tied", "frozen"])
@pytest.mark.parametrize("passes", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_the_bare_model_to_the_bit(mode: str, passes: str, kind: str) -> None:
    bare, model = (make_net(tied=kind == "tied") for _ in range(2))
    for net in (bare, model):
        for block in net.layers if kind == "frozen" else ():
            block.get_submodule("norm").requires_grad_(False)  # read after the last gradient
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    assert train(model, ORDERS[passes]) == train(bare, ORDERS[passes])
    order = engine_of(model).executor.order
    assert order is Order.FOLLOWING
    found, expected = dict(refshard.full_parameters(model)), dict(bare.named_parameters())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_backward_alone_is_prefetched_as_planned() -> None:
    model, collectives = make_net(), LateCollectives()
    refshard.shard(model, mode="yafsdp", collectives=collectives)
    train(model, "F0 F1 B0 B1", steps=2)
    collectives.issued.clear()
    train(model, "F0 F1 B0 B1", steps=1)
    units = engine_of(model).units
    markers, facts = chain_markers(len(units)), [unit.facts for unit in units]
    slots = assign_rings(markers, facts)
    calls = {OpKind.GATHER: "all_gather", OpKind.REDUCE: "reduce_scatter"}
    kinds = PassKind(training=False), PassKind(), PassKind(forward=False)
    expected = [
        (calls[op.kind], 4 * units[op.unit].flats[0].layout.numel)
        for kind in kinds
        for op in build(markers, slots, facts, kind)
        if op.kind in calls
    ]
    assert collectives.issued == expected


def test_a_backward_that_brings_no_parameter_a_gradient_is_told() -> None:
    """As a schedule's that computes the weights' gradients later, for parameters that are not in the graph."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    refshard.shard(model, mode="yafsdp", blocks=["0", "1"], collectives=LateCollectives())
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="a backward gave no parameter a gradient"):
        torch.autograd.grad(model(x).sum(), x)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_of_a_part_leaves_the_order_as_it_is(mode: str) -> None:
    """An auxiliary loss on an early block, say: the other blocks' collectives are issued all the same."""

    def both(model: torch.nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        handle = model[1].register_forward_hook(lambda _, __, output: seen.append(output))
        loss = model(x).square().mean()
        handle.remove()
        loss.backward(retain_graph=True)
        seen[0].square().mean().backward()
        return [loss.detach()]

    def make() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))

    bare, model = make(), make()
    refshard.shard(model, mode=mode, blocks=["0", "1", "2", "3"], collectives=LateCollectives(), debug=True)
    for net in (bare, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for start in range(4):
            both(net, torch.randn(2, 4, generator=torch.Generator().manual_seed(start)))
            optimizer.step()
            optimizer.zero_grad()
    order = engine_of(model).executor.order
    assert order is Order.FOLLOWING
    found = dict(refshard.full_parameters(model))
    for name, value in bare.named_parameters():
        assert torch.equal(found[name], value), name


def test_a_forward_that_raised_keeps_no_unit_from_its_place() -> None:
    bare, model = make_net(), make_net()
    refshard.shard(model, mode="yafsdp", collectives=LateCollectives(), debug=True)
    for net in (bare, model):
        with pytest.raises(IndexError):
            net(torch.full((1, 3), 99))
        step(net, "F0 B0 F1 B1", 0)
    order = engine_of(model).executor.order
    assert order is Order.FOLLOWING, "ranks of which one met the error would plan at different times"


@pytest.mark.parametrize("following", [False, True], ids=["step 0", "following"])
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_raised_costs_the_next_one_nothing(mode: str, following: bool) -> None:
    """Even where the next one's forward is past, so that no forward comes in between."""

    def interrupted(model: Net) -> None:
        raising = [False]

        def maybe_raise(_: torch.Tensor) -> None:
            if raising[0]:
                raise InterruptedError("in backward")

        def watch(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
            output.register_hook(maybe_raise)

        handle = model.layers[0].register_forward_hook(watch)
        first, second = (loss_of(model, make_batch(number)) for number in range(2))
        handle.remove()
        raising[0] = True
        with pytest.raises(InterruptedError):
            first.backward()
        raising[0] = False
        model.zero_grad()  # of what came before the error
        second.backward()

    bare, model = make_net(), make_net()
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    for net in (bare, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for start in range(2 if following else 0):
            step(net, "F0 F1 B0 B1", start)
            optimizer.step()
            optimizer.zero_grad()
        interrupted(net)
        optimizer.step()
    found = dict(refshard.full_parameters(model))
    for name, value in bare.named_parameters():
        assert torch.equal(found[name], value), name
