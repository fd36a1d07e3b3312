"""Blocks that read weights in more ways than one: detached, of another block, or from outside of the model."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.cases.case import EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Block, Language, Stack, adamw, frozen, mean_square, next_token, sgd, train
from tests.distributed.cases.sides import DIM, VOCAB, Side


class Reader(nn.Module):
    """Uses its trained weight detached and differentiably, one after the other."""

    def __init__(self, *, detached_first: bool, product: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2 if product else torch.ones(DIM) * 0.7)
        self.detached_first, self.product = detached_first, product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.weight, self.weight.detach()]
        for weight in reversed(weights) if self.detached_first else weights:
            x = torch.tanh(F.linear(x, weight) if self.product else x * weight)
        return x


def _reads(*, detached_first: bool, product: bool) -> Case:
    def run(side: Side) -> None:
        blocks = [Reader(detached_first=detached_first, product=product) for _ in range(3)]
        train(side, side.shard(Stack(blocks), side.x()))

    place = "before" if detached_first else "after"
    run.__name__ = f"weight_{'multiplied' if product else 'scaled'}_detached_{place}_its_use"
    return case(table=True)(run)


DETACHED = [_reads(detached_first=first, product=product) for first in (True, False) for product in (True, False)]


@case(variants=EVALUATED, table=True)
def weights_read_detached_in_two_microbatches(side: Side) -> None:
    """The second is added to what the first has brought, once."""
    blocks = [Reader(detached_first=True, product=True) for _ in range(3)]
    model = side.shard(Stack(blocks), side.x())
    optimizer = sgd(model)
    for step in range(3):
        for microbatch in range(2):
            mean_square(model(side.x(10 * step + microbatch))).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


class Standardised(nn.Module):
    """Normalises its weight by its own mean and deviation, as weight standardisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 0.1)
        return x + torch.tanh(F.linear(x, weight))


@case()
def weight_standardised(side: Side) -> None:
    train(side, side.shard(Stack([Standardised() for _ in range(3)]), side.x()))


class Normed(nn.Module):
    """Divides by its weight's norm, which is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.linear(x, self.weight) / self.weight.detach().norm())


@case()
def weight_divided_by_its_detached_norm(side: Side) -> None:
    train(side, side.shard(Stack([Normed() for _ in range(3)]), side.x()))


class StraightThrough(nn.Module):
    """Computes with a rounded weight, whose gradient passes straight through (quantisation-aware training)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.weight + ((self.weight * 8).round() / 8 - self.weight).detach()
        return x + torch.tanh(F.linear(x, rounded))


@case()
def weight_rounded_straight_through(side: Side) -> None:
    train(side, side.shard(Stack([StraightThrough() for _ in range(3)]), side.x()))


class Observing(nn.Module):
    """Keeps the largest weight seen in a buffer, written under no_grad within forward."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, self.linear.weight.abs().max()))
        out: torch.Tensor = x + torch.tanh(self.linear(x)) / (1 + self.largest)
        return out


@case()
def weight_observed_by_the_module_around_it(side: Side) -> None:
    train(side, side.shard(Stack([Observing() for _ in range(3)]), side.x()))


class Transposed(nn.Module):
    """An autoencoder's block: the weight forth and its transpose back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight.T) @ self.weight


@case()
def weight_used_twice_in_a_block(side: Side) -> None:
    train(side, side.shard(Stack([Transposed() for _ in range(3)]), side.x()))


class Data(nn.Module):
    """Reads its weight through ``.data`` in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + torch.tanh(x @ self.weight.data)


@case()
def weight_read_through_data(side: Side) -> None:
    train(side, side.shard(Stack([Data() for _ in range(3)]), side.x()))


class Neighbour(nn.Module):
    """Adds a regulariser on another block's weight, to which it holds a reference that is no submodule."""

    other: nn.Linear

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        object.__setattr__(self, "other", other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.linear(x)) + F.linear(x, self.other.weight)
        return out


@case(refuses="this rank holds")
def weight_of_another_block(side: Side) -> None:
    first = nn.Linear(DIM, DIM)
    train(side, side.shard(Stack([first, Neighbour(first)]), side.x()))


class ScaledLogits(Language):
    """A scalar beside the modules, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encode(tokens)) * self.logit_scale.exp()
        return logits


@case()
def scalar_parameter_within_the_root(side: Side) -> None:
    model = side.shard(ScaledLogits(), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(refuses="logit_scale.*this rank holds")
def scalar_parameter_in_the_loss(side: Side) -> None:
    """CLIP's logit scale read after the model's forward."""

    class Clip(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(0.5))

    model = side.shard(Clip(), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) * model.logit_scale.exp()))


@case(refuses="head.weight.*this rank holds")
def weight_multiplied_outside_the_model(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(F.linear(model.encode(side.x(step)), model.head.weight)))


@case(refuses="head.bias.*this rank holds")
def bias_broadcast_outside_the_model(side: Side) -> None:
    """Elementwise, so that a part of the bias may fit by chance."""
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) + model.head.bias))


@case()
def weights_read_for_a_log(side: Side) -> None:
    """Each step logs each weight's norm, which must be that of the whole."""
    model = side.shard(Stack(), side.x())
    for step in range(3):
        train(side, model, start=step, steps=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                side.log(f"norm of {name}", parameter.norm())


@case()
def weights_averaged_for_a_log(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            side.log(f"mean of {name}", parameter.data.mean())


@case()
def scalar_parameter_read_for_a_log(side: Side) -> None:
    class Scaled(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = side.shard(Scaled(), side.x())
    train(side, model)
    side.log("scale", model.scale.item())


class Tapping(nn.Module):
    """A frozen feature extractor that returns what each of its layers computes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        taps = []
        for stage in self.stages:
            x = torch.tanh(stage(x))
            taps.append(x)
        return taps


def _perceptual(side: Side, extractor: nn.Module, blocks: list[str] | None = None) -> None:
    extractor = side.shard(extractor, side.x(), blocks=blocks)
    model = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = extractor(side.x(50 + step))
        found = extractor(model(side.x(step)))
        return torch.stack([mean_square(a - b) for a, b in zip(found, wanted)]).sum()

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def perceptual_loss_of_returned_taps(side: Side) -> None:
    _perceptual(side, Tapping())


@case(variants=EVALUATED, table=True)
def perceptual_loss_within_one_frozen_block(side: Side) -> None:
    """All taps lie within one unit."""
    _perceptual(side, nn.Sequential(Tapping()), ["0"])


@case(variants=EVALUATED, table=True)
def perceptual_loss_by_forward_hooks(side: Side) -> None:
    """Hooks inside of frozen blocks collect what the loss is computed from."""
    extractor = frozen().requires_grad_(False)
    taps: list[torch.Tensor] = []
    for layer in extractor.layers:
        assert isinstance(layer.first, nn.Module)
        layer.first.register_forward_hook(lambda _, __, out: taps.append(out))
    side.shard(extractor, side.x())
    model = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())

    def loss(step: int) -> torch.Tensor:
        taps.clear()
        extractor(model(side.x(step)))
        return torch.stack([mean_square(tap) for tap in taps]).sum()

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def taps_by_hooks_in_trained_blocks(side: Side) -> None:
    model = Stack()
    taps: list[torch.Tensor] = []
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.up.register_forward_hook(lambda _, __, out: taps.append(out))
    side.shard(model, side.x())

    def loss(step: int) -> torch.Tensor:
        taps.clear()
        out = model(side.x(step))
        return mean_square(out) + torch.stack([mean_square(tap) for tap in taps]).sum()

    train(side, model, loss)


@case(variants=EVALUATED)
def taps_alone_make_the_loss(side: Side) -> None:
    """The output of the last block that has a tap takes no part in the loss."""
    model = Stack()
    taps: list[torch.Tensor] = []
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.norm.register_forward_hook(lambda _, __, out: taps.append(out))
    side.shard(model, side.x())

    def loss(step: int) -> torch.Tensor:
        taps.clear()
        model(side.x(step))
        return torch.stack([mean_square(tap) for tap in taps]).sum()

    train(side, model, loss, optimizer=sgd(model))


def _taps_and_outputs(side: Side, *, taps_first: bool) -> None:
    """Every second loss is of the taps alone: weights are read, and no gradient of the last block's output comes."""
    model = Stack()
    taps: list[torch.Tensor] = []
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.up.register_forward_hook(lambda _, __, out: taps.append(out))
    side.shard(model, side.x())

    def loss(step: int) -> torch.Tensor:
        taps.clear()
        out = model(side.x(step))
        return (
            torch.stack([mean_square(tap) for tap in taps]).sum() if (step % 2 == 0) == taps_first else mean_square(out)
        )

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def taps_and_outputs_in_turn(side: Side) -> None:
    _taps_and_outputs(side, taps_first=True)


@case(variants=EVALUATED, or_torch="modified by an inplace operation")
def outputs_and_taps_in_turn(side: Side) -> None:
    """Calls that are known by then, so that nothing watches what backward reads: autograd itself refuses it."""
    _taps_and_outputs(side, taps_first=False)


@case(variants=PLAIN)
def hidden_states_returned_by_all_blocks(side: Side) -> None:
    class Hidden(Language):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            states = [self.embed(tokens)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            weights = torch.arange(1.0, len(states) + 1, device=tokens.device).softmax(0)
            mixed = sum(weight * state for weight, state in zip(weights, states))
            out: torch.Tensor = self.head(mixed)
            return out

    model = side.shard(Hidden())
    train(side, model, lambda step: mean_square(model(side.tokens(step))), optimizer=adamw(model.parameters()))
    assert model.head.out_features == VOCAB


class LaterDetached(nn.Module):
    """Turns rows by a constant, or, from when it is told to, by its own weight without gradient.

    The second needs the weight again after its last gradient. Both make as many autograd nodes, unless it is
    ``noticed``.
    """

    constant: torch.Tensor
    later = False

    def __init__(self, *, noticed: bool = False) -> None:
        super().__init__()
        self.noticed = noticed
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.register_buffer("constant", torch.eye(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = F.linear(x, self.weight.detach() if self.later else self.constant)
        if self.noticed and self.later:
            turned = turned * 1.5
        return x + torch.tanh(F.linear(torch.tanh(turned), self.weight))


@case(table=True, or_torch="modified by an inplace operation")
def weight_read_detached_from_the_third_step_on(side: Side) -> None:
    """Unlike before in nothing that costs little to see: autograd itself refuses what is stale."""
    _read_detached_later(side, noticed=False)


@case(table=True)
def weight_read_detached_by_other_calls_from_the_third_step_on(side: Side) -> None:
    _read_detached_later(side, noticed=True)


def _read_detached_later(side: Side, *, noticed: bool) -> None:
    model = side.shard(Stack([LaterDetached(noticed=noticed) for _ in range(3)]), side.x())

    def loss(step: int) -> torch.Tensor:
        for layer in model.layers:
            layer.later = step >= 2
        return mean_square(model(side.x(step)))

    train(side, model, loss, steps=5)
