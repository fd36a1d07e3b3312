"""The ways in which tensors reach a block and leave it."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import register_dataclass

from tests.distributed.cases.case import EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Stack, mean_square, train
from tests.distributed.cases.sides import DIM, Side


@dataclass
class Registered:
    """A dataclass that torch's pytree knows."""

    x: torch.Tensor
    context: torch.Tensor


register_dataclass(Registered)


@dataclass
class Unregistered:
    """A dataclass that it does not know."""

    x: torch.Tensor
    context: torch.Tensor


class Anything:
    """An object of any kind."""

    def __init__(self, x: torch.Tensor, context: torch.Tensor) -> None:
        self.x, self.context = x, context


class Named(NamedTuple):
    """A named tuple."""

    x: torch.Tensor
    context: torch.Tensor


class Conditioned(nn.Module):
    """Computes with an input and a context that both need gradients; its weights are trained, frozen or adapted."""

    context: torch.Tensor | None = None
    source: Callable[[], torch.Tensor] | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), 0.7))
        if kind != "trained":
            self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.full((DIM,), 0.1)) if kind == "adapted" else None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, context = self._unpacked(*args, **kwargs)
        out = x + torch.tanh(self.project(x) * (context * self.scale))
        if self.adapter is not None:
            out = out + self.adapter * context
        found: torch.Tensor = out
        return found

    def _unpacked(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if kwargs:
            return kwargs["x"], kwargs["context"]
        first = args[0]
        if isinstance(first, tuple | list) and not isinstance(first, Named):
            return first[0], first[1]["context"]
        if isinstance(first, dict):
            return first["x"], first["inner"]["context"]
        if isinstance(first, torch.Tensor):
            if self.context is not None:
                return first, self.context
            if self.source is not None:
                return first, self.source()
            return first, args[1]
        return first.x, first.context


Pass = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


def _by_attribute(block: nn.Module, x: torch.Tensor, context: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    block.context = context
    return (x,), {}


def _by_closure(block: nn.Module, x: torch.Tensor, context: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    block.source = lambda: context  # type: ignore[assignment]
    return (x,), {}


FORMS: dict[str, Pass] = {
    "arguments": lambda _, x, c: ((x, c), {}),
    "keywords": lambda _, x, c: ((), {"x": x, "context": c}),
    "nested_containers": lambda _, x, c: (([x, {"context": c}],), {}),
    "dictionary": lambda _, x, c: (({"x": x, "inner": collections.OrderedDict(context=c)},), {}),
    "named_tuple": lambda _, x, c: ((Named(x, c),), {}),
    "registered_dataclass": lambda _, x, c: ((Registered(x, c),), {}),
    "dataclass": lambda _, x, c: ((Unregistered(x, c),), {}),
    "object": lambda _, x, c: ((Anything(x, c),), {}),
    "attribute": _by_attribute,
    "closure": _by_closure,
}


class Conditional(Stack):
    """A context, computed by a layer of its own, is given to all blocks."""

    def __init__(self, kind: str, form: str) -> None:
        super().__init__([Conditioned(kind) for _ in range(3)])
        self.condition = nn.Linear(DIM, DIM)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.condition(x)
        x = self.inputs(x)
        for layer in self.layers:
            args, kwargs = FORMS[self.form](layer, x, context)
            x = self.call(layer, *args, **kwargs)
        out: torch.Tensor = self.head(x)
        return out


def _conditional(kind: str, form: str) -> Case:
    def run(side: Side) -> None:
        train(side, side.shard(Conditional(kind, form), side.x()))

    run.__name__ = f"{kind}_block_given_{form}"
    in_table = kind != "trained" and form in ("dataclass", "object", "attribute")
    return case(table=in_table)(run)


CONDITIONAL = [_conditional(kind, form) for kind in ("trained", "frozen", "adapted") for form in FORMS]


def _in_turn(kind: str, first: str, then: str) -> Case:
    def run(side: Side) -> None:
        model = side.shard(Conditional(kind, first), side.x())

        def loss(step: int) -> torch.Tensor:
            model.form = first if step < 2 else then
            return mean_square(model(side.x(step)))

        train(side, model, loss)

    run.__name__ = f"{kind}_block_given_{first}_then_{then}"
    return case(variants=EVALUATED)(run)


IN_TURN = [
    _in_turn(kind, first, then)
    for kind in ("frozen", "adapted")
    for first, then in (("arguments", "object"), ("object", "arguments"), ("arguments", "attribute"))
]


class Returning(nn.Module):
    """Returns its result in a container of some kind."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        out = x + torch.tanh(self.linear(x))
        forms: dict[str, Callable[[], Any]] = {
            "a_tuple": lambda: (out, out * 2),
            "a_list": lambda: [out, out * 2],
            "a_dictionary": lambda: {"x": out, "more": [out * 2]},
            "a_named_tuple": lambda: Named(out, out * 2),
            "a_registered_dataclass": lambda: Registered(out, out * 2),
            "a_dataclass": lambda: Unregistered(out, out * 2),
            "an_object": lambda: Anything(out, out * 2),
            "a_generator": lambda: iter([out, out * 2]),
            "a_tuple_with_none": lambda: (out, None, out * 2),
            "one_without_gradient": lambda: (out, out.detach() * 2),
        }
        return forms[self.form]()


def _first(found: Any) -> torch.Tensor:
    """What the next block computes from: all that the last one returned."""
    if isinstance(found, dict):
        parts = [found["x"], found["more"][0]]
    elif hasattr(found, "context"):
        parts = [found.x, found.context]
    else:
        parts = [part for part in found if part is not None]
    return torch.stack(parts).sum(0)


class Chained(Stack):
    """Takes apart what each block returns."""

    def __init__(self, form: str) -> None:
        super().__init__([Returning(form) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = _first(self.call(layer, x))
        out: torch.Tensor = self.head(x)
        return out


def _returning(form: str) -> Case:
    def run(side: Side) -> None:
        train(side, side.shard(Chained(form), side.x()))

    run.__name__ = f"block_returns_{form}"
    # A generator's tensors are gone once someone looks; checkpointing has to look.
    return case(variants=EVALUATED, table="object" in form)(run)


RETURNING = [
    _returning(form)
    for form in (
        "a_tuple",
        "a_list",
        "a_dictionary",
        "a_named_tuple",
        "a_registered_dataclass",
        "a_dataclass",
        "an_object",
        "a_generator",
        "a_tuple_with_none",
        "one_without_gradient",
    )
]


class Storing(nn.Module):
    """Returns nothing: it leaves its result in the state that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, state: dict[str, torch.Tensor]) -> None:
        state["x"] = state["x"] + torch.tanh(self.linear(state["x"]))


class Stored(Stack):
    """Hands one dictionary from block to block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"x": self.inputs(x)}
        for layer in self.layers:
            layer(state)
        out: torch.Tensor = self.head(state["x"])
        return out


@case(variants=PLAIN)
def block_returns_nothing_but_writes_to_its_input(side: Side) -> None:
    train(side, side.shard(Stored([Storing() for _ in range(3)])))


class InPlace(nn.Module):
    """Writes to its input in place, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.tanh(self.linear(x.clone())))


@case(variants=EVALUATED)
def block_writes_to_its_input_in_place(side: Side) -> None:
    train(side, side.shard(Stack([InPlace() for _ in range(3)]), side.x()))


class Halves(Stack):
    """Hands the blocks views of one tensor, and joins what they return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            halves = torch.stack([x, x * 2]).unbind(0)
            x = self.call(layer, halves[0]) + self.call(layer, halves[1])
        out: torch.Tensor = self.head(x)
        return out


@case()
def blocks_called_on_views_twice(side: Side) -> None:
    train(side, side.shard(Halves(), side.x()))


@case(variants=EVALUATED)
def model_returns_a_dictionary(side: Side) -> None:
    class Loss(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"loss": mean_square(out), "out": out, "none": None}

    model = side.shard(Loss(), side.x())
    train(side, model, lambda step: model(side.x(step))["loss"])


@case(variants=EVALUATED)
def model_returns_a_dataclass(side: Side) -> None:
    class Loss(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return Unregistered(out, mean_square(out))

    model = side.shard(Loss(), side.x())
    train(side, model, lambda step: model(side.x(step)).context)
