"""Microbatches: gradients that add up before a step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.distributed.cases.case import EVALUATED, case
from tests.distributed.cases.models import Stack, adamw, adapted, mean_square, sgd, train, train_by_hand
from tests.distributed.cases.sides import Side


def _accumulate(
    side: Side, model: torch.nn.Module, *, sync_last_only: bool, microbatches: int = 3, every_second: bool = False
) -> None:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        count = 1 if every_second and step % 2 else microbatches
        for microbatch in range(count):
            last = not sync_last_only or microbatch == count - 1
            with side.microbatch(model, last=last):
                loss = mean_square(model(side.x(10 * step + microbatch))) / count
                loss.backward()
            side.log_mean("loss", loss)
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case()
def accumulated_with_reductions(side: Side) -> None:
    _accumulate(side, side.shard(Stack(), side.x()), sync_last_only=False)


@case()
def accumulated_without_reductions(side: Side) -> None:
    _accumulate(side, side.shard(Stack(), side.x()), sync_last_only=True)


@case()
def adapters_accumulated(side: Side) -> None:
    _accumulate(side, side.shard(adapted(), side.x()), sync_last_only=True)


@case()
def accumulation_that_varies(side: Side) -> None:
    _accumulate(side, side.shard(Stack(), side.x()), sync_last_only=True, every_second=True)


def _steps(side: Side, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, bool]]:
    """Three steps of two microbatches: yields the number of each, within its context, and whether it is the last."""
    for step in range(3):
        for last in (False, True):
            with side.microbatch(model, last=last):
                yield 2 * step + last, last
        optimizer.step()
        optimizer.zero_grad()


def _clipped(side: Side, model: torch.nn.Module) -> None:
    for number, last in _steps(side, model, adamw(model.parameters())):
        mean_square(model(side.x(number))).backward()
        if last:
            side.log("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def _cleared(side: Side, model: torch.nn.Module, clear: Callable[[], object] | None = None) -> None:
    optimizer = sgd(model)
    for number, last in _steps(side, model, optimizer):
        mean_square(model(side.x(number))).backward()
        if last:
            side.log_gradients(model)
        else:
            (clear or optimizer.zero_grad)()


@case(table=True)
def cleared_without_reductions(side: Side) -> None:
    """A backward under no_sync whose gradients are thrown away leaves nothing for the next."""
    _cleared(side, side.shard(Stack(), side.x()))


@case()
def cleared_by_module_without_reductions(side: Side) -> None:
    """As before, by ``model.zero_grad()``, with an evaluation between."""
    model = side.shard(Stack(), side.x())

    def clear() -> None:
        with torch.no_grad():
            side.log_rows("out", model(side.x(9)))
        model.zero_grad()

    _cleared(side, model, clear)


@case()
def step_without_any_reduction(side: Side) -> None:
    """An optimizer's step after nothing but no_sync: no mean over ranks exists yet."""
    model = side.shard(Stack(), side.x(), blocks=None)
    optimizer = sgd(model)
    for step in range(3):
        with side.microbatch(model, last=side.world_size == 1):
            mean_square(model(side.x(step))).backward()
        if step == 2:
            with side.microbatch(model, last=True):
                mean_square(model(side.x(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    train(side, model, start=3, steps=2)


@case()
def other_blocks_in_each_microbatch(side: Side) -> None:
    class Halved(Stack):
        kept = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for index, layer in enumerate(self.layers):
                if index % 2 == self.kept:
                    x = self.call(layer, x)
            out: torch.Tensor = self.head(x)
            return out

    model = side.shard(Halved(), side.x())
    for number, last in _steps(side, model, sgd(model)):
        model.kept = int(last)
        mean_square(model(side.x(number))).backward()
        if last:
            side.log_gradients(model)


@case(variants=EVALUATED)
def evaluation_between_microbatches(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    for number, _ in _steps(side, model, sgd(model)):
        mean_square(model(side.x(number))).backward()
        with torch.no_grad():
            side.log_rows("out", model(side.x(9)))


@case(variants=EVALUATED)
def forward_within_and_backward_outside_of_no_sync(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(3):
        with side.microbatch(model, last=False):
            loss = mean_square(model(side.x(step)))
        with side.microbatch(model, last=True):
            loss.backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED)
def clipped_after_accumulation(side: Side) -> None:
    _clipped(side, side.shard(Stack(), side.x()))


@case(modes=("zero1", "zero2", "fsdp"))
def accumulated_unsharded_by_option(side: Side) -> None:
    model = side.shard(Stack(), side.x(), accumulation="unsharded")
    _accumulate(side, model, sync_last_only=True)


@case(modes=("zero1", "zero2", "fsdp"), table=True)
def cleared_unsharded_by_option(side: Side) -> None:
    """As ``cleared_without_reductions``, where unsharded gradients wait in slots of their own."""
    _cleared(side, side.shard(Stack(), side.x(), accumulation="unsharded"))


def _clipped_too_early(side: Side, **options: Any) -> None:
    """The norm of what is not reduced yet is no norm of the gradient."""
    model = side.shard(Stack(), side.x(), **options)
    for number, _ in _steps(side, model, sgd(model)):
        mean_square(model(side.x(number))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@case(modes=("zero1", "zero2", "fsdp"), refuses="not reduced over ranks yet")
def clipped_before_the_reduction(side: Side) -> None:
    _clipped_too_early(side, accumulation="unsharded")


@case(modes=("replicate",), refuses="written to before it was reduced")
def clipped_before_the_reduction_of_whole_gradients(side: Side) -> None:
    _clipped_too_early(side, offload=True)


@case()
def offloaded(side: Side) -> None:
    """Masters and gradients in the host's memory, clipped and accumulated."""
    _clipped(side, side.shard(Stack(), side.x(), offload=True))


@case()
def offloaded_and_written_through_data(side: Side) -> None:
    """Masters in the host's memory are written to by hand."""
    model = side.shard(Stack(), side.x(), offload=True)
    train_by_hand(side, model, lambda parameter, gradient: parameter.data.add_(gradient, alpha=-0.1))


@case()
def freed_storage_filled(side: Side) -> None:
    """``debug=True`` fills freed storage with NaN, which no correct step reads."""
    model = side.shard(adapted(), side.x(), debug=True)
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case(variants=EVALUATED)
def one_stream_of_communication(side: Side) -> None:
    model = side.shard(Stack(), side.x(), communication_streams=1)
    _accumulate(side, model, sync_last_only=True)


@case()
def replicas_of_one_shard(side: Side) -> None:
    """A mesh of two axes, whose shard axis is of one rank."""
    model = side.shard(Stack(), side.x(), replicas=True)
    _accumulate(side, model, sync_last_only=True)
