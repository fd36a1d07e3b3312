"""torch.compile, of blocks, of models and of the optimizer's step; with a backend that compiles nothing."""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import refshard
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Stack, adamw, adapted, mean_square, train
from tests.distributed.cases.sides import Side


@case(variants=EVALUATED)
def blocks_compiled(side: Side) -> None:
    torch._dynamo.reset()
    model = side.shard(Stack(), side.x())
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    train(side, model)


@case(variants=PLAIN)
def adapters_compiled(side: Side) -> None:
    torch._dynamo.reset()
    model = side.shard(adapted())
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case(variants=PLAIN)
def blocks_compiled_before_sharding(side: Side) -> None:
    torch._dynamo.reset()
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    train(side, side.shard(model))


@case(variants=PLAIN, table=True)
def blocks_wrapped_by_the_compiler_after_sharding(side: Side) -> None:
    """A wrapper in each block's place, until the end."""
    torch._dynamo.reset()
    model = side.shard(Stack())
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
    train(side, model)
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in state.items():
        side.log(f"saved {name}", value)
    if side.engine:
        assert refshard.checkpoint.full_state_dict(model).keys() in (state.keys(), set())
    for index, layer in enumerate(model.layers):
        model.layers[index] = layer._orig_mod


@case(variants=PLAIN)
def model_compiled(side: Side) -> None:
    torch._dynamo.reset()
    model = side.shard(Stack())
    compiled = torch.compile(model, backend="aot_eager")
    train(side, model, lambda step: mean_square(compiled(side.x(step))))


@case(variants=PLAIN)
def whole_tensors_step_compiled(side: Side) -> None:
    model = side.shard(Stack())
    optimizer = side.whole_tensors(torch.optim.Adafactor, model, model.parameters(), lr=0.01)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        mean_square(model(side.x(step))).backward()
        compiled()
        optimizer.zero_grad()


@case(variants=PLAIN, table=True)
def step_compiled(side: Side) -> None:
    torch._dynamo.reset()
    model = side.shard(Stack())
    optimizer = adamw(model.parameters())
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        compiled()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=PLAIN, table=True)
def model_compiled_in_place_before_sharding(side: Side) -> None:
    torch._dynamo.reset()
    model = Stack()
    model.compile(backend="aot_eager")
    train(side, side.shard(model))


@case(variants=PLAIN, table=True)
def model_compiled_and_called_before_sharding(side: Side) -> None:
    """What was compiled then knows nothing of the engine's hooks."""
    torch._dynamo.reset()
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(3, 5)).sum().backward()
    model.zero_grad()
    side.shard(model)
    train(side, model, lambda step: mean_square(compiled(side.x(step))))
