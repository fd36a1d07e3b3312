"""Parameters gathered ahead of use, because the program asks for them."""

from typing import Any

import torch
from torch import nn

from tests.distributed.cases.calls import Ordered
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Language, Stack, adapted, frozen, mean_square, next_token, sgd, train
from tests.distributed.cases.sides import Side


def _prefetch(side: Side, model: nn.Module, depth: int) -> None:
    """Each block asks for the next ones in forward, and for those before it in backward."""
    blocks: list[nn.Module] = list(model.get_submodule("layers").children())
    for place, block in enumerate(blocks):
        following, before = blocks[place + 1 :][:depth], blocks[:place][::-1][:depth]
        block.register_forward_pre_hook(_asking(side, following))
        block.register_full_backward_pre_hook(_asking(side, before))


def _asking(side: Side, modules: list[nn.Module]) -> Any:
    def ask(*_: object) -> None:
        for module in modules:
            side.unshard(module)

    return ask


@case(table=True)
def asked_one_ahead(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    _prefetch(side, model, 1)
    train(side, model)


@case(table=True)
def asked_two_ahead(side: Side) -> None:
    model = side.shard(Language(), side.tokens())
    _prefetch(side, model, 2)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case()
def asked_two_ahead_with_adapters(side: Side) -> None:
    model = side.shard(adapted(), side.x())
    _prefetch(side, model, 2)
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case()
def asked_ahead_of_frozen_blocks(side: Side) -> None:
    model = side.shard(frozen(), side.x())
    _prefetch(side, model, 2)
    train(side, model)


@case(table=True)
def asked_ahead_in_an_order_that_varies(side: Side) -> None:
    """The model says what comes next, which no earlier step tells."""
    model = side.shard(Ordered(), side.x())
    asked: list[Any] = []

    def loss(step: int) -> torch.Tensor:
        model.order = ((0, 1, 2), (2, 0, 1), (1, 2, 0, 0))[step % 3]
        for hook in asked:
            hook.remove()
        asked.clear()
        for place, following in zip(model.order, model.order[1:]):
            asked.append(model.layers[place].register_forward_pre_hook(_asking(side, [model.layers[following]])))
        return mean_square(model(side.x(step)))

    train(side, model, loss, steps=6)


@case()
def asked_for_what_comes_last_first(side: Side) -> None:
    """In a ring, what was asked for holds a slot that a block which comes earlier needs."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        for block in reversed(model.layers):
            side.unshard(block)
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(table=True)
def asked_for_and_never_used(side: Side) -> None:
    model = side.shard(Ordered(), side.x())

    def loss(step: int) -> torch.Tensor:
        model.order = (0, 1, 2) if step < 2 else (0, 2)
        side.unshard(model.layers[1], wait=step % 2 == 0)
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(table=True, only_on_cpu=True)
def asked_between_passes(side: Side) -> None:
    """Before forward, between forward and backward, before the optimizer writes, and after."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        side.unshard(model.layers[0], wait=step == 2)
        loss = mean_square(model(side.x(step)))
        side.unshard(model.layers[1])
        loss.backward()
        side.unshard(model.layers[2])
        optimizer.step()
        side.unshard(model.layers[2], wait=step == 3)
        optimizer.zero_grad()
        with torch.no_grad():
            side.log_rows("evaluation", model(side.x(9)))
        side.log_mean(f"loss {step}", loss)


@case()
def asked_within_forward_and_given_up(side: Side) -> None:
    class Asking(Stack):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for place, layer in enumerate(self.layers):
                for other in self.layers[place + 1 :]:
                    side.unshard(other, wait=place == 0)
                    side.reshard(other)
                x = self.call(layer, x)
            return x

    train(side, side.shard(Asking(), side.x()))


@case()
def asked_over_microbatches(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    _prefetch(side, model, 2)
    optimizer = sgd(model)
    for step in range(4):
        for microbatch in range(3):
            side.unshard(model.layers[microbatch])
            with side.microbatch(model, last=microbatch == 2):
                mean_square(model(side.x(10 * step + microbatch))).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED)
def asked_ahead_of_calls_by_parts(side: Side) -> None:
    """No pass of the model: each module is called by itself."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        x = model.inputs(side.x(step))
        for place, layer in enumerate(model.layers):
            for following in model.layers[place + 1 :]:
                side.unshard(following)
            x = layer(x)
        return mean_square(model.head(x))

    train(side, model, loss)


@case()
def asked_with_masters_offloaded(side: Side) -> None:
    model = side.shard(Stack(), side.x(), offload=True, debug=True)
    _prefetch(side, model, 2)
    train(side, model)


@case(variants=PLAIN)
def all_asked_for_at_once(side: Side) -> None:
    model = side.shard(Stack())

    def loss(step: int) -> torch.Tensor:
        for module in (model.inputs, *model.layers, model.head) if side.engine else ():
            side.unshard(module)
        return mean_square(model(side.x(step)))

    train(side, model, loss)
