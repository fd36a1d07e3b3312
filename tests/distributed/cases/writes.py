"""Weights that are written to in forward before their unit runs, or by others than optimizers between steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import refshard
from tests.distributed.cases.case import EVALUATED, Case, case
from tests.distributed.cases.models import Block, Checkpointing, Stack, mean_square, train
from tests.distributed.cases.sides import DIM, Side

NARROW = refshard.Precision(parameters=torch.float32, reduction=torch.float32)
"""Narrower than the masters, and wide enough to tell which weights were computed with."""
Follow = Callable[[torch.Tensor, torch.Tensor], object]


class Contrast(Checkpointing):
    """MoCo and BYOL: before the key encoder runs, it follows the query encoder."""

    def __init__(self, follow: Follow, *, first: bool) -> None:
        super().__init__()
        self.query = nn.ModuleList(Block() for _ in range(2))
        self.key = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(DIM, DIM)
        self.follow, self.first = follow, first

    def update(self) -> None:
        """Write to the key encoder's weights."""
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters()):
                self.follow(key, query)

    def encode(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        """Call one of the encoders."""
        for block in blocks:
            x = self.call(block, x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.update()
        query = self.encode(self.query, x)
        if not self.first:
            self.update()
        with torch.no_grad():
            key = self.encode(self.key, x * 1.1)
        out: torch.Tensor = self.head(query) - key
        return out


def _assign_data(key: torch.Tensor, query: torch.Tensor) -> None:
    key.data = key.data * 0.7 + query.data * 0.3


FOLLOWS: dict[str, Follow] = {
    "by_lerp": lambda key, query: key.lerp_(query.to(key.dtype), 0.3),
    "by_copy": lambda key, query: key.copy_(key * 0.7 + query * 0.3),
    "through_data": lambda key, query: key.data.mul_(0.7).add_(query.data, alpha=0.3),
    "by_assigned_data": _assign_data,
}


def _with_and_without_precision(run: Callable[[Side, Any], None], name: str, **expected: Any) -> list[Case]:
    """A case for masters that are gathered as they are, and one for masters that are cast."""

    def plain(side: Side) -> None:
        run(side, None)

    def narrow(side: Side) -> None:
        run(side, NARROW)

    plain.__name__, narrow.__name__ = name, f"{name}_in_fp32"
    return [case(table=True, **expected)(plain), case(table=True, rtol=1e-4, **expected)(narrow)]


def _loss(side: Side, model: nn.Module, step: int, precision: Any) -> torch.Tensor:
    out: torch.Tensor = model(side.x(step))
    if precision is None and out.dtype != torch.float64:
        raise AssertionError(out.dtype)
    return mean_square(out.double())


def _contrast(follow: Follow, name: str, *, first: bool, **expected: Any) -> list[Case]:
    def run(side: Side, precision: Any) -> None:
        model = side.shard(Contrast(follow, first=first), side.x(), precision=precision)
        train(side, model, lambda step: _loss(side, model, step, precision))

    return _with_and_without_precision(run, name, **expected)


MOMENTUM_IN_FORWARD = [
    found
    for how, follow in FOLLOWS.items()
    for first in (True, False)
    for found in _contrast(
        follow,
        f"key_encoder_follows_{how}" + "_at_the_start" * first,
        first=first,
        **({"refuses": "data|replaced"} if how == "by_assigned_data" else {}),
    )
]


def _round(module: nn.Module, *, data: bool) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            (parameter.data if data else parameter).copy_((parameter * 16).round() / 16)


class Quantising(Stack):
    """Rounds weights of its blocks in forward: all before the first runs, or each before it runs."""

    def __init__(self, *, at_once: bool, data: bool) -> None:
        super().__init__()
        self.at_once, self.data = at_once, data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_once:
            _round(self.layers[1], data=self.data)
        x = self.inputs(x)
        for layer in self.layers:
            if not self.at_once:
                _round(layer, data=self.data)
            x = self.call(layer, x)
        out: torch.Tensor = self.head(x)
        return out


def _quantised(at_once: bool, data: bool, name: str) -> list[Case]:
    def run(side: Side, precision: Any) -> None:
        model = side.shard(Quantising(at_once=at_once, data=data), side.x(), precision=precision)
        train(side, model, lambda step: _loss(side, model, step, precision))

    return _with_and_without_precision(run, f"{name}_through_data" if data else name)


QUANTISED = [
    found
    for data in (False, True)
    for at_once, name in (
        (True, "later_block_quantised_in_the_roots_forward"),
        (False, "each_block_quantised_before_it_runs"),
    )
    for found in _quantised(at_once, data, name)
]


def _hooked(name: str, *, before: bool) -> list[Case]:
    def shrink(model: Stack) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            with torch.no_grad():
                for parameter in model.layers.parameters():
                    parameter.mul_(0.9)

        return hook

    def run(side: Side, precision: Any) -> None:
        model = Stack()
        if before:
            model.register_forward_pre_hook(shrink(model))
        side.shard(model, side.x(), precision=precision)
        if not before:
            model.register_forward_pre_hook(shrink(model))
        train(side, model, lambda step: _loss(side, model, step, precision))

    return _with_and_without_precision(run, name)


HOOKED = [
    *_hooked("root_pre_hook_that_writes_weights", before=False),
    *_hooked("root_pre_hook_from_before_that_writes_weights", before=True),
]


def _memory(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    held = parameter.detach()
    return held.to_local() if hasattr(held, "to_local") else held


def _shrink_by_numpy(parameter: torch.Tensor) -> None:
    values = _memory(parameter).numpy()
    values *= 0.9


def _shrink_by_data(parameter: torch.Tensor) -> None:
    _memory(parameter).data.mul_(0.9)


def _shrink_data_of_part(parameter: torch.Tensor) -> None:
    held = parameter.data
    (held.to_local() if hasattr(held, "to_local") else held).data.mul_(0.9)


def _written(name: str, write: Callable[[torch.Tensor], None], **expected: Any) -> Case:
    """Written to after each step, twice, each time through a new alias."""

    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())
        for step in range(4):
            train(side, model, start=step, steps=1)
            for _ in range(2):
                for parameter in model.parameters():
                    write(parameter)
                with torch.no_grad():
                    side.log_rows("out", model(side.x(50)))
                side.after_evaluation(model)

    run.__name__ = f"written_through_{name}"
    return case(variants=EVALUATED, table=True, **expected)(run)


WRITTEN = [
    _written("numpy", _shrink_by_numpy, only_on_cpu=True),
    _written("data_of_local", _shrink_by_data),
    _written("local_of_data", _shrink_data_of_part),
]


@case(variants=EVALUATED, only_on_cpu=True)
def written_through_a_numpy_alias_that_is_kept(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    held = [_memory(parameter).numpy() for parameter in model.parameters()]
    for step in range(4):
        train(side, model, start=step, steps=1)
        for values in held:
            values *= 0.9
        with torch.no_grad():
            side.log_rows("out", model(side.x(50)))
