"""Units gathered ahead because the program asks: when their collectives are issued, and when they are given up."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.api import engine_of
from refshard.engine.collectives import Pending
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from refshard.engine.schedule import Presence
from refshard.engine.unit import Unit
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net, train

SHARDED = [mode for mode in MODES if MODES[mode].parameters == "shard"]


@pytest.fixture(params=SHARDED)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sharded(mode: str, model: Net | None = None) -> tuple[Net, LateCollectives]:
    model, collectives = model or make_net(), LateCollectives()
    refshard.shard(model, mode=mode, collectives=collectives, debug=True)
    return model, collectives


def blocks_of(model: Net) -> tuple[Unit, ...]:
    return engine_of(model).units[1:-1]


def gathers(collectives: LateCollectives) -> int:
    return sum(what == "all_gather" for what, _ in collectives.issued)


def ask(model: Net, depth: int) -> None:
    """Have each block unshard those that follow in forward."""
    layers = list(model.layers)
    for place, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_unshard, layers[place + 1 :][:depth]))


def _unshard(modules: Sequence[nn.Module], *_: object) -> None:
    for module in modules:
        refshard.unshard(module)


def seen(model: Net, block: int) -> list[str]:
    """Where the blocks' parameters are while one of them computes, in one forward."""
    found: list[str] = []
    hook = model.get_submodule(f"layers.{block}.norm").register_forward_pre_hook(
        lambda *_: found.extend(str(unit.presence) for unit in blocks_of(model))
    )
    loss_of(model, make_batch(0)).backward()
    hook.remove()
    return found


def test_each_unit_has_room_for_what_is_asked_for() -> None:
    """Where the order is not known yet, and where it is and one unit ahead is gathered anyway."""
    model, _ = sharded("fsdp")
    ask(model, 2)
    for _ in range(3):
        assert seen(model, 0) == ["unsharded", "gathering", "gathering", "sharded"]
        assert seen(model, 1) == ["sharded", "unsharded", "gathering", "gathering"]
        model.zero_grad()
    assert engine_of(model).executor.order is Order.FOLLOWING


def test_a_ring_has_room_for_one() -> None:
    model, _ = sharded("yafsdp")
    ask(model, 3)
    train(model, 2)
    assert seen(model, 0) == ["unsharded", "gathering", "sharded", "sharded"]
    assert seen(model, 1) == ["sharded", "unsharded", "gathering", "sharded"]


def test_in_a_ring_what_is_asked_for_leaves_its_slot_to_what_is_needed_first() -> None:
    bare, (model, _) = make_net(), sharded("yafsdp")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (bare, model)]
    for step in range(4):
        for layer in reversed(model.layers):
            refshard.unshard(layer)
        assert train(model, 1, start=step, optimizer=optimizers[1]) == train(
            bare, 1, start=step, optimizer=optimizers[0]
        )


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_is_gathered_twice(mode: str, depth: int) -> None:
    """As many collectives as without asking, in the same steps, also where blocks are recomputed."""

    class Checkpointed(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            logits: torch.Tensor = self.head(self.norm(x))
            return logits

    counts = []
    for kind in (Net, Checkpointed):
        for asks in (False, True):
            torch.manual_seed(0)
            model, collectives = sharded(mode, kind())
            if asks:
                ask(model, depth)
            train(model, 4)
            counts.append(gathers(collectives))
    assert len(set(counts)) == 1


def test_what_is_asked_for_before_a_pass_is_there_for_it(mode: str) -> None:
    bare, (model, collectives) = make_net(), sharded(mode)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (bare, model)]
    assert train(model, 3, optimizer=optimizers[1]) == train(bare, 3, optimizer=optimizers[0])
    before = gathers(collectives)
    refshard.unshard(model.layers[0]).wait()
    assert blocks_of(model)[0].presence is Presence.UNSHARDED
    refshard.unshard(model.layers[1])
    with torch.no_grad():
        assert torch.equal(model(make_batch(9)[0]), bare(make_batch(9)[0]))
    assert gathers(collectives) == before + len(engine_of(model).units)


class TwoAlike(LateCollectives):
    """Two ranks, of which the other holds the same as this one."""

    world_size = 2

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return super().all_gather(output, torch.cat([shard, shard]))


def test_parts_that_were_asked_for_before_a_pass_are_not_gathered_again(mode: str) -> None:
    model, collectives = make_net(), TwoAlike()
    refshard.shard(model, mode=mode, collectives=collectives)
    with torch.no_grad():
        model(make_batch(0)[0])
        before = gathers(collectives)
        for layer in model.layers[:2]:
            refshard.unshard(layer).wait()
        model(make_batch(1)[0])
    assert gathers(collectives) == before + len(engine_of(model).units)


def test_what_weights_have_changed_under_is_gathered_anew(mode: str) -> None:
    bare, (model, _) = make_net(), sharded(mode)
    train(model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for layer in model.layers[:2]:
        refshard.unshard(layer).wait()
    for m in (bare, model):
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(1.5)
    assert torch.equal(model(make_batch(9)[0]), bare(make_batch(9)[0]))


class AwaitedCollectives(LateCollectives):
    """Knows the gathers that nobody has awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: set[Pending] = set()

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        inner, known = super().all_gather(output, shard), self.under_way

        class Known:
            def wait(self) -> None:
                inner.wait()
                known.discard(self)

        work = Known()
        known.add(work)
        return work


def give_up_by_reshard(model: Net) -> None:
    refshard.reshard(model)


def give_up_by_a_pass(model: Net) -> None:
    model.skip = {0, 1}
    with torch.no_grad():
        model(make_batch(0)[0])


@pytest.mark.filterwarnings("ignore:refshard. unit .* was left out")
@pytest.mark.parametrize("give_up", [give_up_by_reshard, give_up_by_a_pass])
def test_what_is_not_used_is_given_up(mode: str, give_up: Callable[[Net], None]) -> None:
    model, collectives = make_net(), AwaitedCollectives()
    refshard.shard(model, mode=mode, collectives=collectives, debug=True)
    train(model, 3)
    refshard.unshard(model.layers[0])
    refshard.unshard(model.layers[1]).wait()
    assert [u.presence for u in blocks_of(model)[:2]] == [Presence.GATHERING, Presence.UNSHARDED]
    give_up(model)
    for unit in engine_of(model).units:
        assert unit.presence is Presence.SHARDED
        assert unit.slot.owner is None
    assert not collectives.under_way, "storage was given up that a collective writes to"


def test_what_a_pass_needs_later_is_not_given_up(mode: str) -> None:
    """Between forward and backward, what the pass keeps is not what was asked for."""
    bare, (model, _) = make_net(), sharded(mode)
    for step in range(4):
        losses = []
        for m in (bare, model):
            m.zero_grad()
            losses.append(loss_of(m, make_batch(step)))
            if m is model:
                refshard.unshard(model)
                refshard.reshard(model)
            losses[-1].backward()
        assert losses[0] == losses[1]
    for name, parameter in bare.named_parameters():
        found = model.get_parameter(name).grad
        assert found is not None
        assert parameter.grad is not None
        assert torch.equal(found, parameter.grad), name


@pytest.mark.processes
def test_compiled_blocks_may_ask(mode: str) -> None:
    bare, (model, _) = make_net(), sharded(mode)
    ask(model, 2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert train(model, 3) == pytest.approx(train(bare, 3), rel=1e-5)
