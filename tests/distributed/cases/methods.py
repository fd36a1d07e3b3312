"""Methods other than forward that read their module's own weights, and are registered."""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.cases.case import CHECKPOINTED, PLAIN, case
from tests.distributed.cases.models import Adapted, Language, Stack, mean_square, next_token, raises, sgd, train
from tests.distributed.cases.sides import DIM, Side


class Projecting(nn.Module):
    """A block with a second way to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.inner(self.project(x)))
        return out

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Not forward."""
        return x @ self.weight.T


def _projecting(side: Side) -> Stack:
    model = side.shard(Stack([Projecting(), Projecting(), Projecting()]), side.x())
    for block in model.layers:
        side.register_method(block, "project")
    return model


@case(table=True)
def method_registered(side: Side) -> None:
    """Between passes, beside forward, and within it."""
    model = _projecting(side)

    def loss(step: int) -> torch.Tensor:
        ahead = model.layers[2].project(side.x(20 + step))
        return mean_square(model(side.x(step))) + mean_square(model.layers[0].project(side.x(40 + step)) - ahead)

    train(side, model, loss)


@case()
def method_registered_and_nothing_else_called(side: Side) -> None:
    model = _projecting(side)
    train(side, model, lambda step: mean_square(model.layers[1].project(model.layers[0].project(side.x(step)))))


@case(variants=CHECKPOINTED)
def method_registered_called_by_the_model(side: Side) -> None:
    """In place of forward for one block, before it for another. An evaluation before would call it unregistered."""

    class Mixed(Stack):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0].project(self.inputs(x))
            x = self.call(self.layers[1], self.layers[1].project(x))
            out: torch.Tensor = self.call(self.layers[2], x)
            return out

    model = side.shard(Mixed([Projecting(), Projecting(), Projecting()]), side.x())
    for block in model.layers:
        side.register_method(block, "project")
    train(side, model)


@case(table=True)
def method_registered_under_checkpointing(side: Side) -> None:
    model = _projecting(side)

    def loss(step: int) -> torch.Tensor:
        projected = checkpoint(model.layers[1].project, side.x(30 + step).requires_grad_(), use_reentrant=False)
        return mean_square(model(side.x(step))) + mean_square(projected)

    train(side, model, loss)


@case()
def method_registered_that_calls_forward(side: Side) -> None:
    class Twice(Projecting):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self(self(x)) @ self.weight
            return out

    model = side.shard(Stack([Twice(), Twice()]), side.x())
    side.register_method(model.layers[0], "twice")
    train(side, model, lambda step: mean_square(model.layers[0].twice(side.x(step))) + mean_square(model(side.x(step))))


class Attending(Language):
    """Computes logits by a method of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        embed: Any = self.embed
        embed.attend = MethodType(lambda module, x: F.linear(x, module.weight), embed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed: Any = self.embed
        logits: torch.Tensor = embed.attend(self.encode(tokens))
        return logits


@case(variants=CHECKPOINTED, table=True)
def embedding_registered_as_head(side: Side) -> None:
    """Backward reads a weight that an embedding's own does not. An evaluation before would read it unregistered."""
    model = side.shard(Attending(), side.tokens(), blocks=["embed", "layers"])
    side.register_method(model.embed, "attend")
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case()
def adapters_with_a_method_registered(side: Side) -> None:
    class Merging(Adapted):
        def merged(self, x: torch.Tensor) -> torch.Tensor:
            """One product with the sum of weights, frozen and trained."""
            return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)

    model = side.shard(Stack([Merging() for _ in range(3)]), side.x())
    for block in model.layers:
        side.register_method(block, "merged")
    train(side, model, lambda step: mean_square(model(side.x(step)) - model.head(model.layers[1].merged(side.x()))))


@case()
def method_of_a_part_of_a_block_registered(side: Side) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Projecting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    model = side.shard(Stack([Outer(), Outer()]), side.x())
    side.register_method(model.layers[0].inner, "project")
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step))) + mean_square(model.layers[0].inner.project(side.x())),
    )


@case()
def method_of_the_model_registered(side: Side) -> None:
    """The model has a parameter of its own; the method calls the model, and reads it afterwards."""

    class Scaled(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encode(x)) * self.scale
            return out

        def scaled_twice(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self(x) * self.scale
            return out

    model = side.shard(Scaled(), side.x())
    side.register_method(model, "scaled_twice")
    train(side, model, lambda step: mean_square(model.scaled_twice(side.x(step)) if step % 2 else model(side.x(step))))


@case(variants=PLAIN)
def method_registered_that_raises(side: Side) -> None:
    class Raising(Projecting):
        def raising(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError(float(x.sum() + self.weight.sum()))

    model = side.shard(Stack([Raising(), Raising()]))
    side.register_method(model.layers[0], "raising")
    optimizer = sgd(model)
    for step in range(3):
        with raises(KeyError, ""):
            model.layers[0].raising(side.x(step))
        train(side, model, optimizer=optimizer, start=step, steps=1)
