"""Losses that read the parameters: penalties, and loops that need more than one gradient."""

from collections.abc import Callable

import torch
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Stack, adapted, mean_square, sgd, train
from tests.distributed.cases.sides import Side

Penalty = Callable[[nn.Module], torch.Tensor]


def _penalised(name: str, penalty: Penalty, *, table: bool = False, refuses: str | None = None) -> Case:
    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())

        def loss(step: int) -> torch.Tensor:
            return mean_square(model(side.x(step))) + 1e-2 * penalty(model)

        optimizer = sgd(model)
        for step in range(4):
            loss(step).backward()
            side.log_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    run.__name__ = name
    return case(table=table, refuses=refuses)(run)


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(terms).sum() if terms else torch.zeros(())


PENALTIES = [
    _penalised("l2_penalty_by_squares", lambda model: _sum([p.square().sum() for p in model.parameters()]), table=True),
    _penalised("l2_penalty_by_power", lambda model: _sum([(p**2).sum() for p in model.parameters()]), table=True),
    _penalised("l1_penalty", lambda model: _sum([p.abs().sum() for p in model.parameters()])),
    _penalised("penalty_by_sum", lambda model: _sum([p.sum() for p in model.parameters()])),
    _penalised("penalty_by_norm", lambda model: _sum([p.norm() for p in model.parameters()]), table=True),
    _penalised(
        "penalty_by_vector_norm", lambda model: _sum([torch.linalg.vector_norm(p, 1) for p in model.parameters()])
    ),
    _penalised(
        "penalty_by_group_lasso",
        lambda model: _sum([p.norm(dim=1).sum() for p in model.parameters() if p.ndim == 2]),
        table=True,
        refuses="norm of .* over dimensions",
    ),
    _penalised("penalty_on_one_weight", lambda model: model.head.weight.square().sum()),  # type: ignore[union-attr, operator]
    _penalised("penalty_by_mean", lambda model: _sum([p.square().mean() for p in model.parameters()])),
    _penalised(
        "penalty_of_all_flattened",
        lambda model: torch.cat([p.view(-1) for p in model.parameters()]).square().sum(),
        refuses="cat of .*this rank holds",
    ),
]


def _scaled_by(name: str, read: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """The data's loss, which differs from rank to rank, times a number from a weight."""

    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())
        train(side, model, lambda step: mean_square(model(side.x(step))) * read(model.head.weight))

    run.__name__ = f"loss_scaled_by_{name}_of_a_weight"
    return case(table=True)(run)


SCALED = [
    _scaled_by("the_norm", lambda weight: weight.norm()),
    _scaled_by("the_sum", lambda weight: weight.sum()),
    _scaled_by("the_mean_square", lambda weight: weight.square().mean(dim=(0, 1), keepdim=True).sum()),
    _scaled_by("the_foreach_norm", lambda weight: torch._foreach_norm([weight])[0]),
    _scaled_by("the_dot_product", lambda weight: torch.dot(weight.flatten(), weight.flatten())),
]


@case()
def number_from_a_weight_before_the_forward(side: Side) -> None:
    """Its gradient comes last, when that of the weight's unit is under way."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        read = model.head.bias.sum() * side.x(step).mean()
        total: torch.Tensor = mean_square(model(side.x(step))) + read
        return total

    train(side, model, loss)


@case()
def distance_to_the_first_weights(side: Side) -> None:
    """Elastic weight consolidation: a penalty on the distance to copies made after sharding."""
    model = side.shard(Stack(), side.x())
    anchors = [p.detach().clone() for p in model.parameters()]

    def loss(step: int) -> torch.Tensor:
        distance = [(p - anchor).square().sum() for p, anchor in zip(model.parameters(), anchors)]
        return mean_square(model(side.x(step))) + 0.1 * torch.stack(distance).sum()

    train(side, model, loss)


@case(table=True)
def penalty_times_each_ranks_loss(side: Side) -> None:
    """What a rank weighs the penalty by is its own, and so is the gradient that the penalty gets there."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        penalty = _sum([p.square().sum() + p.norm() for p in model.parameters()])
        return mean_square(model(side.x(step))) * (1 + 1e-2 * penalty)

    train(side, model, loss)


@case(refuses="differ between ranks")
def penalty_of_elements_times_each_ranks_loss(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        data = mean_square(model(side.x(step)))
        return data + _sum([(data.item() * p.square()).sum() for p in model.parameters()])

    train(side, model, loss)


@case(refuses="requires a gradient")
def elements_times_the_loss(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        data = mean_square(model(side.x(step)))
        return data + _sum([(data * p).sum() for p in model.parameters()])

    train(side, model, loss)


class _Uncertain(Stack):
    """Learns how much each of two losses weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.1, -0.2]))


@case(table=True)
def losses_weighed_by_learnt_uncertainty(side: Side) -> None:
    model = side.shard(_Uncertain(), side.x())

    def loss(step: int) -> torch.Tensor:
        output = model(side.x(step))
        losses = torch.stack([mean_square(output), output.abs().mean()])
        weights = model.log_variances
        weights = weights.full_tensor() if hasattr(weights, "full_tensor") else weights
        return (torch.exp(-weights) * losses + weights).sum()

    train(side, model, loss)


@case()
def penalty_without_data(side: Side) -> None:
    """A backward of the penalty by itself, after that of the data."""
    model = side.shard(Stack(), side.x())

    def penalise(step: int) -> None:
        (1e-2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()).backward()

    train(side, model, before_step=penalise)


@case()
def penalty_ahead_of_the_data(side: Side) -> None:
    model = side.shard(adapted(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        trained = [p for p in model.parameters() if p.requires_grad]
        (1e-2 * torch.stack([p.square().sum() for p in trained]).sum()).backward()
        loss = mean_square(model(side.x(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=EVALUATED, refuses="grad|whole|part|inputs", or_torch="not have been used in the graph")
def gradients_by_autograd_grad(side: Side) -> None:
    """``torch.autograd.grad`` for the parameters, written to ``.grad`` by hand."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=PLAIN, table=True, refuses="torch.autograd.grad do not reach sharded parameters; call backward")
def gradients_by_autograd_grad_that_may_lack(side: Side) -> None:
    """``allow_unused`` has torch return None where modules compute with other tensors than the parameters."""
    model = side.shard(Stack())
    optimizer = sgd(model)
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True)):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=EVALUATED)
def loss_scaled_by_hand(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def unscale(_: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(64)

    train(side, model, lambda step: 64 * mean_square(model(side.x(step))), before_step=unscale)


@case()
def loss_that_needs_no_head(side: Side) -> None:
    """The head runs, and takes no part in the loss."""

    class Tapped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encode(x)
            self.head(x)
            return x

    train(side, side.shard(Tapped(), side.x()))


@case()
def zero_times_what_is_unused(side: Side) -> None:
    """The remedy for unused parameters: their sum times zero, within the model."""

    class Whole(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.encode(x) + 0 * self.head(x).sum()
            return total

    train(side, side.shard(Whole(), side.x()))


@case(variants=EVALUATED, refuses="whole|part|vector|replaced|moved")
def parameters_to_vector_and_back(side: Side) -> None:
    """Weights perturbed as one vector (evolution strategies, SWAG), each rank alike."""
    model = side.shard(Stack(), side.x())
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    train(side, model)
