"""Narrow dtypes: the engine's precision, autocast, and casts by hand."""

from contextlib import AbstractContextManager

import torch
from torch import nn

import refshard
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.inputs import Conditional, Registered, Unregistered
from tests.distributed.cases.models import Language, Stack, adamw, mean_square, next_token, train, train_by_hand
from tests.distributed.cases.sides import DIM, Side

BF16 = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
"""Against fp64: what differs is rounding."""


def _wide(side: Side, model: nn.Module, step: int) -> torch.Tensor:
    return mean_square(model(side.x(step)).double())


@case(rtol=0.05)
def computed_in_bf16(side: Side) -> None:
    model = side.shard(Stack(), side.x(), precision=BF16)
    train(side, model, lambda step: _wide(side, model, step), optimizer=adamw(model.parameters()))


@case(rtol=0.05)
def language_model_in_bf16(side: Side) -> None:
    model = side.shard(Language(), side.tokens(), precision=BF16)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


def _conditional(side: Side, form: str) -> None:
    model = side.shard(Conditional("trained", form), side.x(), precision=BF16)
    train(side, model, lambda step: _wide(side, model, step))


@case(rtol=0.05)
def bf16_with_keywords(side: Side) -> None:
    _conditional(side, "keywords")


@case(rtol=0.05)
def bf16_with_nested_containers(side: Side) -> None:
    _conditional(side, "nested_containers")


@case(rtol=0.05, table=True)
def bf16_with_a_dataclass(side: Side) -> None:
    """Computed by blocks of the model: in bf16 already."""
    _conditional(side, "dataclass")


class Batch(Stack):
    """Takes its rows in a dataclass."""

    def forward(self, batch: Registered | Unregistered) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch.x)


@case(rtol=0.05, variants=PLAIN, table=True)
def bf16_with_the_batch_in_a_dataclass(side: Side) -> None:
    """The first block that takes it apart gets fp64 from a container that is unknown to pytree."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, batch: Unregistered) -> torch.Tensor:
            out: torch.Tensor = self.linear(batch.x)
            return out

    class Opened(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = First()  # type: ignore[assignment]

    model = side.shard(Opened(), precision=BF16)

    def loss(step: int) -> torch.Tensor:
        x = side.x(step)
        return mean_square(model(Unregistered(x, x)).double())

    train(side, model, loss)


@case(rtol=0.05)
def reduced_in_bf16(side: Side) -> None:
    narrow = refshard.Precision(parameters=torch.bfloat16, reduction=torch.bfloat16)
    model = side.shard(Stack(), side.x(), precision=narrow)
    train(side, model, lambda step: _wide(side, model, step))


def _autocast(side: Side) -> AbstractContextManager[object]:
    return torch.autocast(side.device.type, dtype=torch.bfloat16)


@case(rtol=0.05)
def autocast(side: Side) -> None:
    torch.set_default_dtype(torch.float32)
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        with _autocast(side):
            out = model(side.x(step))
        return mean_square(out.float())

    train(side, model, loss)


@case(rtol=0.05, variants=EVALUATED)
def autocast_with_two_forwards(side: Side) -> None:
    """The cache of casts outlives a forward: the second computes with the weights that the first cast."""
    torch.set_default_dtype(torch.float32)
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        with _autocast(side):
            return mean_square((model(side.x(step)) - model(side.x(50 + step))).float())

    train(side, model, loss)


@case(rtol=0.05, variants=EVALUATED)
def autocast_around_the_step(side: Side) -> None:
    """Evaluation within one autocast that spans steps: cached casts of weights are old."""
    torch.set_default_dtype(torch.float32)
    model = side.shard(Stack(), side.x())
    for step in range(4):
        with _autocast(side):
            loss = mean_square(model(side.x(step)).float())
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        side.log_mean("loss", loss)


@case(rtol=1e-4)
def fp32(side: Side) -> None:
    torch.set_default_dtype(torch.float32)
    model = side.shard(Stack(), side.x())
    train(side, model, optimizer=adamw(model.parameters()))


@case(rtol=0.1, variants=PLAIN)
def model_in_bf16(side: Side) -> None:
    """Masters are in bf16 too."""
    model = side.shard(Stack().bfloat16())
    train(side, model, lambda step: mean_square(model(side.x(step).bfloat16()).double()))


@case(rtol=0.05, variants=EVALUATED)
def bf16_with_a_norm_in_fp32(side: Side) -> None:
    """A block widens its input by itself."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.1)
            out: torch.Tensor = x + torch.tanh(self.linear(normed.to(self.linear.weight.dtype)))
            return out

    model = side.shard(Stack([Careful() for _ in range(3)]), side.x(), precision=BF16)
    train(side, model, lambda step: _wide(side, model, step))


@case(rtol=0.05, variants=EVALUATED)
def bf16_with_integer_and_flag_inputs(side: Side) -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            assert at.dtype == torch.long
            assert mask.dtype == torch.bool
            out: torch.Tensor = x + torch.tanh(self.linear(x)).masked_fill(mask, 0)[:, at]
            return out

    class Called(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for layer in self.layers:
                at = torch.arange(DIM, device=x.device)
                x = layer(x, at.flip(0), at == 2)
            out: torch.Tensor = self.head(x)
            return out

    model = side.shard(Called([Flagged() for _ in range(3)]), side.x(), precision=BF16)
    train(side, model, lambda step: _wide(side, model, step))


@case(rtol=0.05)
def written_through_data_in_bf16(side: Side) -> None:
    """What is computed with is a cast, so that writes to the masters must be noticed."""
    model = side.shard(Stack(), side.x(), precision=BF16)
    train_by_hand(side, model, lambda p, gradient: p.data.add_(gradient, alpha=-0.5), lambda s: _wide(side, model, s))


@case(rtol=0.05, table=True)
def bf16_with_raw_rows_in_a_dataclass(side: Side) -> None:
    """Blocks are given what no block has computed, and so not in bf16."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, given: Unregistered) -> torch.Tensor:
            out: torch.Tensor = given.x + torch.tanh(self.linear(given.context))
            return out

    class Raw(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context, x = x, self.inputs(x)
            for layer in self.layers:
                x = self.call(layer, Unregistered(x, context))
            out: torch.Tensor = self.head(x)
            return out

    model = side.shard(Raw([Conditioned() for _ in range(3)]), side.x(), precision=BF16)
    train(side, model, lambda step: _wide(side, model, step))
