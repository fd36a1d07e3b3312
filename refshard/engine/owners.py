"""Who steps what: the tensors that an optimizer is given, by the units they lie in, and the owner of each.

Every rank comes to the same answer by itself.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refshard.engine.exchange import Owned, stand_in
from refshard.engine.local_part import whole_of
from refshard.errors import EngineError
from refshard.plan.owners import share_out, step_cost

Make = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or what else makes one from parameter groups and options."""
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The parameters of one flat parameter of a unit, in the order of the elements; they compute on ``device``."""

    unit: str
    parameters: tuple[nn.Parameter, ...]
    device: torch.device


Flat = tuple[Place, list[Owned]]
"""Those of a place that the optimizer is given, in the same order; there is at least one."""


def members_of(groups: Sequence[Group], places: Sequence[Place]) -> list[Flat]:
    """What is to be stepped, by flat parameter; owners are not chosen yet.

    Raises:
        EngineError: a parameter is not the model's, or no rank can have the whole of it.
    """
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    unknown = set(group_of).difference(p for place in places for p in place.parameters)
    if unknown:
        shape = tuple(next(p for p in group_of if p in unknown).shape)
        raise EngineError(
            f"whole_tensors: a parameter of shape {shape} is not the sharded model's; give parameters of "
            "model.parameters(), taken after refshard.shard and between steps"
        )
    flats = []
    for place in places:
        members = [_member(p, group_of[p], place.device) for p in place.parameters if p in group_of]
        if members:
            flats.append((place, members))
    return flats


def _member(parameter: nn.Parameter, group: int, device: torch.device) -> Owned:
    whole = whole_of(parameter)
    if whole is None:
        return Owned(parameter, None, group, owner=0, tensor=parameter)
    if whole.slab_shape != whole.shape:
        raise EngineError(
            f"whole_tensors: {whole.label} is split by tensor parallelism, and the ranks that shard it have a slab of "
            f"{list(whole.slab_shape)} only; leave it to an elementwise optimizer, such as AdamW"
        )
    return Owned(parameter, whole, group, owner=0, tensor=stand_in(parameter, device))


def prototype(
    make: Make, groups: Sequence[Group], members: Sequence[Owned], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer over stand-ins for all parameters: torch's own checks, and the options of each group.

    The stand-in of what has an owner is ``Owned.tensor``.

    Raises:
        EngineError: owners cannot compute what it computes.
    """
    tensor_of = {m.parameter: stand_in(m.parameter, m.tensor.device) if m.whole is None else m.tensor for m in members}
    given = [{**options_of(group), "params": [tensor_of[p] for p in group["params"]]} for group in groups]
    made = make(given, **options)
    name = type(made).__name__
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise EngineError(
            f"whole_tensors: {name} calls its closure in a step, which couples all tensors; an owner sees only its "
            "own. Use an optimizer that steps each tensor by its gradient"
        )
    mine = [[tensor_of[p] for p in group["params"]] for group in groups]
    if [set(group["params"]) for group in made.param_groups] != [set(params) for params in mine]:
        raise EngineError(f"whole_tensors: {name} changes its parameter groups; give it the groups that it makes")
    return made


def assign_owners(flats: Sequence[Flat], ranks: int) -> list[list[Flat]]:
    """Give each tensor its owner, and return the buckets. What is not sharded forms one more."""
    sharded = [flat for flat in flats if flat[1][0].whole is not None]
    costs = [[step_cost(member.parameter.shape) for member in members] for _, members in sharded]
    buckets = []
    for indices, owners in share_out(costs, ranks):
        bucket = [sharded[index] for index in indices]
        for member, owner in zip((member for _, of_flat in bucket for member in of_flat), owners):
            member.owner = owner
        buckets.append(bucket)
    plain = [flat for flat in flats if flat[1][0].whole is None]
    return [*buckets, plain] if plain else buckets


def options_of(group: Group) -> Group:
    """What a group holds besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
