"""Evaluations: before, between and within training, by other paths and modes."""

import torch

from tests.distributed.cases.case import CHECKPOINTED, PLAIN, case
from tests.distributed.cases.models import Language, Stack, adapted, frozen, mean_square, next_token, sgd, train
from tests.distributed.cases.sides import Side


def _evaluate_then(side: Side, model: torch.nn.Module) -> None:
    with torch.no_grad():
        side.log_rows("out", model(side.x(9)))
    side.after_evaluation(model)


@case(variants=CHECKPOINTED, table=True)
def before_the_first_step(side: Side) -> None:
    model = side.shard(Stack())
    _evaluate_then(side, model)
    train(side, model)


@case(variants=CHECKPOINTED, table=True)
def before_two_forwards(side: Side) -> None:
    model = side.shard(Stack())
    _evaluate_then(side, model)
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case(variants=CHECKPOINTED)
def before_two_forwards_of_frozen_blocks(side: Side) -> None:
    model = side.shard(frozen())
    _evaluate_then(side, model)
    train(side, model, lambda step: mean_square(model(side.x(step)) + model(side.x(50 + step))))


@case(variants=CHECKPOINTED)
def many_before_the_first_step(side: Side) -> None:
    model = side.shard(adapted())
    for _ in range(3):
        _evaluate_then(side, model)
    train(side, model)


def _between(side: Side, *, inference: bool) -> None:
    model = side.shard(Stack())
    for step in range(4):
        train(side, model, start=step, steps=1)
        with torch.inference_mode() if inference else torch.no_grad():
            out = model(side.x(9))
        side.log_rows("out", out.clone())


@case(variants=CHECKPOINTED)
def between_steps(side: Side) -> None:
    _between(side, inference=False)


@case(variants=CHECKPOINTED)
def between_steps_in_inference_mode(side: Side) -> None:
    _between(side, inference=True)


@case(variants=PLAIN)
def first_in_inference_mode(side: Side) -> None:
    model = side.shard(Stack())
    with torch.inference_mode():
        out = model(side.x(9))
    side.log_rows("out", out.clone())
    side.after_evaluation(model)
    train(side, model)


@case(variants=PLAIN)
def in_inference_mode_with_gradients_enabled(side: Side) -> None:
    """The second looks like training, and leaves nothing behind that training could not use."""
    model = side.shard(Stack())
    with torch.inference_mode():
        side.log_rows("out", model(side.x(9)))
        with torch.enable_grad():
            side.log_rows("out", model(side.x(9)))
    side.after_evaluation(model)
    train(side, model)


@case(variants=CHECKPOINTED)
def between_forward_and_backward(side: Side) -> None:
    model = side.shard(Stack())
    optimizer = sgd(model)
    for step in range(4):
        loss = mean_square(model(side.x(step)))
        with torch.no_grad():
            side.log_rows("out", model(side.x(9)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=CHECKPOINTED)
def between_backward_and_step(side: Side) -> None:
    """The evaluation leaves the gradients alone."""
    model = side.shard(Stack())

    def evaluate(_: int) -> None:
        with torch.no_grad():
            side.log_rows("out", model(side.x(9)))

    train(side, model, before_step=evaluate)


@case(variants=PLAIN)
def of_another_path_before_training(side: Side) -> None:
    """The evaluation calls the encoder only."""
    model = side.shard(Language())
    with torch.no_grad():
        side.log_rows("encoded", model.encode(side.tokens()))
    side.after_evaluation(model)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=sgd(model))


@case(variants=PLAIN)
def of_single_modules_before_training(side: Side) -> None:
    model = side.shard(Stack())
    with torch.no_grad():
        side.log_rows("out", model.layers[1](model.layers[0](side.x())))
    train(side, model)


@case(variants=PLAIN)
def with_gradients_enabled(side: Side) -> None:
    """Forwards without backward, whose graphs are dropped."""
    model = side.shard(Stack())
    for step in range(4):
        side.log_rows("out", model(side.x(9)))
        train(side, model, start=step, steps=1)


@case(variants=PLAIN)
def in_the_middle_of_forward(side: Side) -> None:
    """The model calls itself without gradients in its own forward (self-distillation)."""

    class Self(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.encode(x * 1.1)
            out: torch.Tensor = self.head(self.encode(x) - target)
            return out

    train(side, side.shard(Self()))


@case(variants=PLAIN)
def only_evaluated(side: Side) -> None:
    model = side.shard(Stack())
    for step in range(4):
        with torch.no_grad():
            side.log_rows("out", model(side.x(step)))


@case(variants=PLAIN)
def of_varying_size_and_depth(side: Side) -> None:
    model = side.shard(Language())
    for length in (2, 5, 3):
        train(side, model, lambda step, length=length: next_token(model, side.tokens(step, length)), steps=2)  # type: ignore[misc]
        with torch.no_grad():
            side.log_rows("out", model(side.tokens(7, 6)))
