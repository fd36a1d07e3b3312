"""Weights that models see and handle in unusual ways: shared memory, hooks and attributes in forward, kept views."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Adapted,
    Block,
    Language,
    Stack,
    next_token,
    train,
)
from tests.distributed.cases.sides import DIM, Side


@case(variants=PLAIN, refuses="memory")
def weights_tied_through_data(side: Side) -> None:
    model = Language()
    model.head.weight.data = model.embed.weight.data
    side.shard(model)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=PLAIN, refuses="memory")
def buffer_over_the_memory_of_a_weight(side: Side) -> None:
    class Shadowed(nn.Module):
        shadow: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
            self.register_buffer("shadow", self.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.weight) + 0.1 * torch.tanh(x @ self.shadow)

    train(side, side.shard(Stack([Shadowed() for _ in range(3)])))


class Acting(Block):
    """Does something to its weights in some calls."""

    def __init__(self, act: Callable[["Acting", int], Any]) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.act(self, self.calls)
        self.calls += 1
        out = super().forward(x)
        return out if found is None else out + found(x)


def _acting(side: Side, act: Callable[[Acting, int], Any], frozen: bool = False) -> None:
    model = Stack([Acting(act) for _ in range(3)])
    for layer in model.layers if frozen else ():
        layer.up.weight.requires_grad_(False)
    side.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(side, model, optimizer=optimizer, steps=6)


@case(variants=PLAIN, refuses="requires_grad")
def frozen_within_forward_once(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 2:
            block.up.weight.requires_grad_(False)

    _acting(side, act)


@case(variants=PLAIN, refuses="requires_grad|unfrozen")
def unfrozen_within_forward_once(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 2:
            block.up.weight.requires_grad_(True)

    _acting(side, act, frozen=True)


@case(variants=PLAIN, refuses="hook")
def hook_put_on_a_weight_within_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 0:
            block.up.weight.register_hook(lambda gradient: gradient * 0.5)

    _acting(side, act)


@case(variants=PLAIN, refuses="hook")
def post_accumulate_hook_put_on_a_weight_within_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 0:
            block.up.weight.register_post_accumulate_grad_hook(halve)

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    _acting(side, act)


@case(variants=EVALUATED)
def attribute_of_a_weight_read_in_forward(side: Side) -> None:
    """As muP's readout does."""

    def act(block: Acting, call: int) -> Any:
        return lambda x: x * block.up.weight.width  # type: ignore[attr-defined]

    model = Stack([Acting(act) for _ in range(3)])
    for layer in model.layers:
        layer.up.weight.width = 0.3
    train(side, side.shard(model, side.x()))


@case(variants=PLAIN, refuses="view|memory")
def view_of_a_weight_kept_from_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> Any:
        if call == 0:
            block.kept = block.up.weight.t()
        return lambda x: torch.tanh(x @ block.kept)[:, :DIM]

    _acting(side, act)


@case(variants=PLAIN, refuses="view|memory")
def view_of_a_weight_kept_without_gradient(side: Side) -> None:
    def act(block: Acting, call: int) -> Any:
        if call == 0:
            block.kept = block.up.weight.detach().t()
        return lambda x: torch.tanh(x @ block.kept)[:, :DIM]

    _acting(side, act)


class Kept(torch.autograd.Function):
    """Keeps a weight on its context, in a dictionary."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.state = {"weight": weight}
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.state["weight"], gradients[0].T @ x


class Tapped(nn.Module):
    """Has something for the loss beside its output."""

    tap: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.bias = nn.Parameter(torch.randn(DIM) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tap = Kept.apply(torch.tanh(x), self.weight)
        return x + torch.tanh(self.tap + self.bias)


@case(variants=PLAIN)
def weight_in_a_dictionary_of_a_context_read_early(side: Side) -> None:
    model = side.shard(Stack([Tapped() for _ in range(3)]))

    def loss(step: int) -> torch.Tensor:
        model(side.x(step))
        first: torch.Tensor = model.layers[0].tap
        return first.square().mean()

    train(side, model, loss)


class Equilibrium(Stack):
    """A deep equilibrium model: a hook on the fixed point solves for its gradient, by backwards within the backward."""

    def step(self, z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 0.5 * torch.tanh(self.layers[0](z)) + 0.5 * u
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.inputs(x)
        z = u
        with torch.no_grad():
            for _ in range(4):
                z = self.step(z, u)
        z = self.step(z, u)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            end = self.step(start, u.detach())

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                y = gradient
                for _ in range(3):
                    y = torch.autograd.grad(end, start, y, retain_graph=True)[0] + gradient
                return y

            z.register_hook(solve)
        out: torch.Tensor = self.head(z)
        return out


@case(variants=EVALUATED)
def deep_equilibrium(side: Side) -> None:
    train(side, side.shard(Equilibrium([Block()]), side.x()))


@case(variants=EVALUATED)
def deep_equilibrium_of_adapters(side: Side) -> None:
    train(side, side.shard(Equilibrium([Adapted()]), side.x()))


class Coupling(torch.autograd.Function):
    """An invertible pair of blocks, whose inputs are computed from its outputs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, f: nn.Module, g: nn.Module) -> Any:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b = gradients
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            second = ctx.g(a)
            second.backward(of_b)
        of_a = of_a + a.grad
        b = (b - second).detach().requires_grad_()
        with torch.enable_grad():
            first = ctx.f(b)
            first.backward(of_a)
        return of_a, of_b + b.grad, None, None


class Reversible(Stack):
    """Reversible residual layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = self.inputs(x)
        for f, g in zip(self.layers[::2], self.layers[1::2]):
            a, b = Coupling.apply(a, b, f, g)
        out: torch.Tensor = self.head(a + b)
        return out


@case(variants=EVALUATED)
def reversible_blocks(side: Side) -> None:
    train(side, side.shard(Reversible([Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def reversible_blocks_with_adapters(side: Side) -> None:
    train(side, side.shard(Reversible([Adapted() for _ in range(4)]), side.x()))
