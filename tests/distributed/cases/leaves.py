"""Inputs that need gradients: prompts, adversarial examples, and gradients for them alone."""

from collections.abc import Callable

import torch
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Adapted, Stack, adapted, frozen, mean_square, sgd, train
from tests.distributed.cases.sides import DIM, Side


class Passing(nn.Module):
    """Returns the prompt as it came, beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.linear(x + prompt)), prompt


class Prompted(Stack):
    """Hands a leaf from block to block."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([Passing() for _ in range(3)])
        object.__setattr__(self, "prompt", torch.zeros(DIM, device=device, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, prompt = self.inputs(x), self.prompt
        assert isinstance(prompt, torch.Tensor)
        for layer in self.layers:
            x, prompt = self.call(layer, x, prompt)
        out: torch.Tensor = self.head(x)
        return out


@case(table=True)
def soft_prompt_that_blocks_return(side: Side) -> None:
    """Its gradient is each rank's own; it is not trained here."""
    model = side.shard(Prompted(side.device), side.x())
    train(side, model)
    assert isinstance(model.prompt, torch.Tensor)
    assert model.prompt.grad is not None
    side.log_mean("prompt's gradient", model.prompt.grad)


class Identities(Stack):
    """Some of its blocks do nothing at times, and return what they get."""

    def __init__(self) -> None:
        class Skipping(nn.Module):
            skips = False

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(DIM, DIM)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x if self.skips else x + torch.tanh(self.linear(x))

        super().__init__([Skipping() for _ in range(3)])
        self.inputs = nn.Identity()  # type: ignore[assignment]


@case(table=True)
def adversarial_input_that_blocks_return(side: Side) -> None:
    model = side.shard(Identities(), side.x())
    leaf = side.x(99).requires_grad_()

    def loss(step: int) -> torch.Tensor:
        for index, layer in enumerate(model.layers):
            layer.skips = index == 0 or step % 3 == index
        return mean_square(model(leaf))

    train(side, model, loss)
    assert leaf.grad is not None
    side.log_rows("leaf's gradient", leaf.grad / side.world_size)


@case()
def fast_gradient_sign_method(side: Side) -> None:
    """A backward finds the input's gradient, and leaves the weights' to be cleared."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(3):
        x = side.x(step).requires_grad_()
        mean_square(model(x)).backward()
        assert x.grad is not None
        moved = (x + 0.1 * torch.tanh(1e3 * x.grad / side.world_size)).detach()
        side.log_rows("moved", moved)
        optimizer.zero_grad()
        loss = mean_square(model(moved))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _saliency(side: Side, model: nn.Module) -> None:
    for step in range(3):
        x = side.x(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        side.log_rows("gradient", gradient)
        train(side, model, start=step, steps=1)


@case()
def gradients_for_inputs_alone(side: Side) -> None:
    """``torch.autograd.grad`` leaves the weights out."""
    _saliency(side, side.shard(Stack(), side.x()))


@case()
def gradients_for_inputs_alone_with_adapters(side: Side) -> None:
    _saliency(side, side.shard(adapted(), side.x()))


@case()
def gradients_for_inputs_of_backward(side: Side) -> None:
    """``backward(inputs=[x])``."""
    model = side.shard(Stack(), side.x())
    for step in range(3):
        x = side.x(step).requires_grad_()
        model(x).square().sum().backward(inputs=[x])
        assert x.grad is not None
        side.log_rows("gradient", x.grad)
        train(side, model, start=step, steps=1)


@case(variants=EVALUATED, refuses="SGD found no gradients since the sharded model's last forward")
def gradients_for_some_parameters(side: Side) -> None:
    """``backward(inputs=...)`` with the head's parameters alone."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        loss.backward(inputs=list(model.head.parameters()))
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case()
def inputs_optimised_through_a_frozen_model(side: Side) -> None:
    """Nothing of the model is trained (feature visualisation)."""
    model = side.shard(frozen().requires_grad_(False), side.x())
    x = side.x().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=1.0)
    for _ in range(4):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    side.log_rows("x", x)


@case()
def first_blocks_need_no_gradient(side: Side) -> None:
    """Frozen layers ahead of all that is trained: backward stops short of them."""
    model = Stack()
    model.inputs.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    train(side, side.shard(model, side.x()))


@case()
def frozen_after_trained(side: Side) -> None:
    """Only the first layer is trained: backward runs through all the frozen ones."""
    model = Stack([Adapted() for _ in range(3)])
    model.requires_grad_(False)
    model.inputs.requires_grad_(True)
    train(side, side.shard(model, side.x()))


@case(variants=PLAIN)
def jacobian_row_by_row(side: Side) -> None:
    model = side.shard(Stack())
    x = side.x().requires_grad_()
    out = model(x).sum(0)
    rows = [torch.autograd.grad(out[i], x, retain_graph=True)[0] for i in range(3)]
    side.log_rows("jacobian", torch.stack(rows, 1))
    train(side, model)


@case(variants=PLAIN)
def hook_on_the_input(side: Side) -> None:
    model = side.shard(Stack())
    seen: list[torch.Tensor] = []

    def loss(step: int) -> torch.Tensor:
        x = side.x(step).requires_grad_()
        x.register_hook(lambda gradient: seen.append(gradient / side.world_size))
        return mean_square(model(x))

    train(side, model, loss)
    side.log_rows("seen", seen[-1])


def _between_steps(side: Side, look: Callable[[nn.Module, int], object]) -> None:
    """Train, and look at the model before each step."""
    model = side.shard(Stack(), side.x())
    for step in range(4):
        look(model, step)
        side.after_evaluation(model)
        train(side, model, start=step, steps=1)


@case(variants=EVALUATED, table=True)
def forward_mode_derivative(side: Side) -> None:
    """``torch.func.jvp``: the derivative of the output along a direction of the input."""

    def look(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            out, tangent = torch.func.jvp(model, (side.x(step),), (side.x(10 + step),))[:2]
        side.log_rows("out", out)
        side.log_rows("tangent", tangent)

    _between_steps(side, look)


@case(variants=EVALUATED, table=True)
def gradients_for_each_row(side: Side) -> None:
    """``torch.func.vmap(torch.func.grad(...))``: for the inputs, through the sharded model."""

    def look(model: nn.Module, step: int) -> None:
        def energy(row: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = model(row[None]).square().sum()
            return total

        side.log_rows("gradients", torch.func.vmap(torch.func.grad(energy))(side.x(step)))

    _between_steps(side, look)


@case(variants=EVALUATED, table=True)
def rows_by_vmap(side: Side) -> None:
    """``torch.func.vmap`` over an evaluation."""

    def look(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            side.log_rows("out", torch.func.vmap(model)(side.x(step)))

    _between_steps(side, look)
