"""Activation checkpointing by every way that torch has."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_in_place
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import refshard
from tests.distributed.cases.case import EVALUATED, case
from tests.distributed.cases.models import (
    Adapted,
    Block,
    Frozen,
    Language,
    Stack,
    frozen,
    mean_square,
    next_token,
    train,
)
from tests.distributed.cases.sides import DIM, Side


class Calling(Stack):
    """Runs its blocks by ``way``."""

    def __init__(self, way: Callable[..., torch.Tensor], blocks: list[nn.Module] | None = None) -> None:
        super().__init__(blocks)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.way(self, self.inputs(x)))
        return out


def _reentrant(model: Calling, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


@case(variants=EVALUATED, table=True)
def reentrant(side: Side) -> None:
    train(side, side.shard(Calling(_reentrant), side.x()))


@case(variants=EVALUATED)
def reentrant_with_adapters(side: Side) -> None:
    train(side, side.shard(Calling(_reentrant, [Adapted() for _ in range(3)]), side.x()))


def _pairs(model: Calling, x: torch.Tensor, *, use_reentrant: bool = False) -> torch.Tensor:
    layers = list(model.layers)
    for first, second in zip(layers[::2], layers[1::2]):

        def both(x: torch.Tensor, first: nn.Module = first, second: nn.Module = second) -> torch.Tensor:
            found: torch.Tensor = second(first(x))
            return found

        x = checkpoint(both, x, use_reentrant=use_reentrant)
    return x


@case(variants=EVALUATED, table=True)
def pairs_of_blocks(side: Side) -> None:
    train(side, side.shard(Calling(_pairs, [Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def pairs_of_frozen_blocks(side: Side) -> None:
    train(side, side.shard(Calling(_pairs, [Frozen() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def pairs_of_blocks_reentrant(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        return _pairs(model, x, use_reentrant=True)

    train(side, side.shard(Calling(way, [Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED, table=True)
def sequential_in_segments(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint_sequential(list(model.layers), 2, x, use_reentrant=False)
        return found

    train(side, side.shard(Calling(way, [Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def all_blocks_at_once(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(nn.Sequential(*model.layers), x, use_reentrant=False)
        return found

    train(side, side.shard(Calling(way), side.x()))


@case(variants=EVALUATED)
def whole_model(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(checkpoint(model, side.x(step), use_reentrant=False)))


@case(variants=EVALUATED)
def whole_model_with_an_input_that_needs_gradients(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        x = side.x(step).requires_grad_()
        return mean_square(checkpoint(model, x, use_reentrant=True))

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def embedding_alone(side: Side) -> None:
    class Embedded(Language):
        def encode(self, tokens: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.embed, tokens, use_reentrant=False)
            for layer in self.layers:
                x = layer(x)
            out: torch.Tensor = self.norm(x)
            return out

    model = side.shard(Embedded(), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=EVALUATED)
def norm_and_head_together(side: Side) -> None:
    class Ended(Language):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            out: torch.Tensor = checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=False)
            return out

    model = side.shard(Ended(), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=EVALUATED)
def loss_and_head_together(side: Side) -> None:
    """The loss, which is large, is recomputed along with the head."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        x = model.encode(side.x(step))
        found: torch.Tensor = checkpoint(lambda x: mean_square(model.head(x)), x, use_reentrant=False)
        return found

    train(side, model, loss)


@case(variants=EVALUATED)
def part_of_each_block(side: Side) -> None:
    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.up, self.norm(x), use_reentrant=False)
            out: torch.Tensor = x + checkpoint(lambda h: self.down(torch.tanh(h)), hidden, use_reentrant=False)
            return out

    train(side, side.shard(Stack([Partly() for _ in range(3)]), side.x()))


@case(variants=EVALUATED)
def part_of_each_frozen_block(side: Side) -> None:
    class Partly(Frozen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + checkpoint(
                lambda x: torch.tanh(self.second(torch.tanh(self.first(x)))), x, use_reentrant=False
            )
            return found

    train(side, side.shard(Stack([Partly() for _ in range(3)]), side.x()))


@case(variants=EVALUATED)
def nested(side: Side) -> None:
    """A checkpointed block that checkpoints a part of itself."""

    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + checkpoint(
                lambda x: self.down(torch.tanh(self.up(self.norm(x)))), x, use_reentrant=False
            )
            return found

    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    train(side, side.shard(Calling(way, [Partly() for _ in range(3)]), side.x()))


@case(variants=EVALUATED)
def selective(side: Side) -> None:
    """Products are kept, all else is recomputed."""

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        keeps = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(
                layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
        return x

    train(side, side.shard(Calling(way), side.x()))


@case(variants=EVALUATED)
def every_second_block(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(model.layers):
            x = checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x)
        return x

    train(side, side.shard(Calling(way, [Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def without_early_stop(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False, early_stop=False)
        return x

    train(side, side.shard(Calling(way), side.x()))


@case(variants=EVALUATED)
def wrapped_before_sharding(side: Side) -> None:
    """Torch's wrapper modules, within the blocks' places."""
    model = Stack()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    train(side, side.shard(model, side.x()))
    if side.engine:
        assert refshard.checkpoint.full_state_dict(model).keys() in (model.state_dict().keys(), set())


def _wrapped_after_sharding(side: Side, wrapper: Callable[[nn.Module], nn.Module], kind: type[nn.Module]) -> None:
    """As people do who come from FSDP1. Names are those of the model that was sharded."""
    model = side.shard(Stack(), side.x())
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, kind))
    train(side, model)
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert list(model.state_dict()) == list(state) == names
    for name, value in state.items():
        side.log(f"saved {name}", value)
    if side.engine:
        assert [name for name, _ in refshard.full_parameters(model)] == names
        assert list(refshard.checkpoint.full_state_dict(model)) in (names, [])
    model.load_state_dict(model.state_dict())
    for module in list(model.modules()):
        for name, wrapped in list(module.named_children()):
            if isinstance(wrapped, ActivationWrapper):
                setattr(module, name, wrapped._checkpoint_wrapped_module)
    train(side, model, start=10)


@case(variants=EVALUATED, table=True)
def wrapped_after_sharding(side: Side) -> None:
    _wrapped_after_sharding(side, checkpoint_wrapper, Block)


@case(variants=EVALUATED)
def wrapped_after_sharding_reentrant(side: Side) -> None:
    _wrapped_after_sharding(side, partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT), Block)


@case(variants=EVALUATED)
def wrapped_after_sharding_to_offload(side: Side) -> None:
    _wrapped_after_sharding(side, offload_wrapper, Block)


@case(variants=EVALUATED)
def parts_wrapped_after_sharding(side: Side) -> None:
    _wrapped_after_sharding(side, checkpoint_wrapper, nn.Linear)


@case(variants=EVALUATED)
def in_place_before_sharding(side: Side) -> None:
    """Torch's composable ``checkpoint``, by hooks on each block."""
    model = Stack()
    for layer in model.layers:
        checkpoint_in_place(layer)
    train(side, side.shard(model, side.x()))


@case(variants=EVALUATED)
def looped_blocks(side: Side) -> None:
    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        return x

    train(side, side.shard(Calling(way), side.x()))


@case(variants=EVALUATED)
def switched_on_and_off(side: Side) -> None:
    """Some steps recompute, others do not."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        model.checkpointing = step % 2 == 0
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(variants=EVALUATED, refuses="nested in each other")
def all_blocks_at_once_from_the_third_step_on(side: Side) -> None:
    """By then two blocks share a slot that each of them needs until its backward is over."""

    def way(model: Calling, x: torch.Tensor) -> torch.Tensor:
        blocks = nn.Sequential(*model.layers)
        found: torch.Tensor = checkpoint(blocks, x, use_reentrant=False) if model.checkpointing else blocks(x)
        return found

    model = side.shard(Calling(way, [Block() for _ in range(4)]), side.x())

    def loss(step: int) -> torch.Tensor:
        model.checkpointing = step >= 2
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(variants=EVALUATED)
def two_forwards_of_frozen_blocks(side: Side) -> None:
    model = frozen()
    model.checkpointing = True
    side.shard(model, side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case(variants=EVALUATED)
def with_dropout(side: Side) -> None:
    """Recomputation draws the same random numbers; all ranks have the same rows and draws."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(DIM, DIM), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.dropout(torch.tanh(self.linear(x)))
            return out

    model = Stack([Dropped() for _ in range(3)])
    model.checkpointing = True
    side.shard(model, side.x())
    same = side.put(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    torch.manual_seed(1)
    train(side, model, lambda _: mean_square(model(same)))


@case(variants=EVALUATED)
def saved_tensors_on_the_host(side: Side) -> None:
    """Activation offloading by hooks on saved tensors."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(variants=EVALUATED)
def saved_tensors_packed(side: Side) -> None:
    """A hook that keeps copies of what autograd saves, weights included."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return mean_square(model(side.x(step)))

    train(side, model, loss)
