"""Gradients that are not the mean over ranks: ``gradient_divide_factor``."""

from typing import Any

import torch

from refshard.errors import SpecError
from tests.distributed.cases.case import PLAIN, case
from tests.distributed.cases.models import Language, Stack, adamw, adapted, raises, sgd
from tests.distributed.cases.sides import DIM, ROWS, Side

FACTOR = 5.0
"""None of the numbers of ranks that the cases run on."""


def _sum_of_squares(side: Side, model: torch.nn.Module, step: int) -> torch.Tensor:
    """A loss that is a sum over rows. In one process, where nothing divides it, by the factor."""
    total: torch.Tensor = (model(side.x(step)) - 0.3).square().sum() / ROWS
    return total if side.world_size > 1 else total / FACTOR


def _train(side: Side, model: torch.nn.Module, *, microbatches: int = 1, penalty: Any = None) -> None:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    share = side.x().shape[0] / ROWS / (FACTOR if side.world_size == 1 else 1)
    for step in range(4):
        for microbatch in range(microbatches):
            with side.microbatch(model, last=microbatch == microbatches - 1):
                loss = _sum_of_squares(side, model, 10 * step + microbatch)
                if penalty is not None:
                    loss = loss + share * penalty(model)
                loss.backward()
        side.log_gradients(model)
        side.log(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()


@case(table=True)
def gradients_divided_by_a_factor(side: Side) -> None:
    _train(side, side.shard(Stack(), side.x(), gradient_divide_factor=FACTOR))


@case()
def adapters_divided_by_a_factor(side: Side) -> None:
    _train(side, side.shard(adapted(), side.x(), gradient_divide_factor=FACTOR))


@case(table=True)
def factor_over_microbatches(side: Side) -> None:
    _train(side, side.shard(Stack(), side.x(), gradient_divide_factor=FACTOR), microbatches=3)


@case(modes=("zero1", "zero2", "fsdp"))
def factor_over_microbatches_unsharded(side: Side) -> None:
    model = side.shard(Stack(), side.x(), gradient_divide_factor=FACTOR, accumulation="unsharded")
    _train(side, model, microbatches=3)


@case()
def factor_over_replicas(side: Side) -> None:
    _train(side, side.shard(Stack(), side.x(), gradient_divide_factor=FACTOR, replicas=True), microbatches=2)


@case()
def factor_with_masters_offloaded(side: Side) -> None:
    _train(side, side.shard(Stack(), side.x(), gradient_divide_factor=FACTOR, offload=True), microbatches=2)


@case(variants=PLAIN)
def factor_with_a_penalty_on_all_weights(side: Side) -> None:
    """Gradients that come to parameters outside of units are divided as all others are."""
    model = side.shard(Stack(), gradient_divide_factor=FACTOR)
    _train(side, model, penalty=lambda m: sum(p.square().sum() for p in m.parameters()))


@case(variants=PLAIN, only_on_cpu=True)
def factor_with_a_whole_weight_in_the_loss(side: Side) -> None:
    def penalty(model: torch.nn.Module) -> torch.Tensor:
        weight: Any = model.get_parameter("head.weight")
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        found: torch.Tensor = (whole @ torch.linspace(-1, 1, DIM)).square().sum()
        return found

    _train(side, side.shard(Stack(), gradient_divide_factor=FACTOR), penalty=penalty)


@case(table=True, only_on_cpu=True)
def loss_weighted_by_tokens(side: Side) -> None:
    """Ranks count different numbers of tokens: each divides by the number of all, and gradients are summed."""
    model = side.shard(Language(), side.tokens(), gradient_divide_factor=1.0)
    optimizer = sgd(model)
    for step in range(4):
        tokens = side.tokens(step)
        counts = side.rows(torch.arange(6)[:, None] > torch.arange(3))
        losses = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
        (losses * counts).sum().div(12).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(variants=PLAIN)
def factor_that_is_no_number_above_zero(side: Side) -> None:
    """What is refused leaves the model as it was."""
    model = Stack()
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        if side.engine:
            with raises(SpecError, "gradient_divide_factor: must be a finite number > 0"):
                side.shard(model, gradient_divide_factor=factor)
    _train(side, side.shard(model, gradient_divide_factor=FACTOR))
