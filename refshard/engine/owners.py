"""Which rank steps which tensor, for optimizers that need whole tensors.

A tensor is brought to one rank, its owner, which steps it and sends the parts back. Tensors take turns in *buckets*,
so that few whole ones exist at a time; a bucket takes as long as its busiest rank. Every rank comes to the same answer
by itself.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refshard.engine.collectives import Collectives
from refshard.engine.exchange import Owned, stand_in
from refshard.engine.local_part import whole_of
from refshard.errors import EngineError

IMBALANCE = 1.25
"""How much more than the mean the busiest rank of a bucket may have to do: a lower limit needs larger buckets."""
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


def members_of(groups: Sequence[Group], places: Sequence[Place], collectives: Collectives) -> list[Flat]:
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
        members = [_member(p, group_of[p], place.device, collectives) for p in place.parameters if p in group_of]
        if members:
            flats.append((place, members))
    return flats


def _member(parameter: nn.Parameter, group: int, device: torch.device, collectives: Collectives) -> Owned:
    whole = whole_of(parameter)
    if whole is None:
        return Owned(parameter, None, group, owner=0, tensor=parameter)
    if whole.collectives is not collectives:
        raise EngineError(
            f"whole_tensors: {whole.label} is sharded over other ranks than the model (its policy names a mesh or a "
            "mode); leave it to an elementwise optimizer, such as AdamW"
        )
    if whole.divided:
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


def step_cost(shape: Sequence[int]) -> int:
    """What a step of one tensor costs, in multiply-adds up to a factor: m * n * min(m, n) of a matrix.

    That is the cost of the matrix products in Newton-Schulz (Muon) and in factored preconditioners (Shampoo). A tensor
    of more dimensions counts as the matrix of its first dimension times all others, one of fewer as its elements.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * (min(rows, columns) if len(shape) > 1 else 1)


def share_out(costs: Sequence[Sequence[int]], ranks: int) -> Iterator[tuple[range, list[int]]]:
    """Buckets, each a range of flat parameters and the owners of all their tensors; ``costs`` are those of the tensors
    of each flat parameter.

    A bucket is the fewest flat parameters in a row that the ranks can share within :data:`IMBALANCE`; the last one may
    have to be shared worse.
    """
    loads = [0] * ranks
    first = 0
    for index in range(len(costs)):
        bucket = [cost for of_flat in costs[first : index + 1] for cost in of_flat]
        owners = choose_owners(bucket, loads)
        shares = [sum(cost for cost, owner in zip(bucket, owners) if owner == rank) for rank in range(ranks)]
        if max(shares) * ranks <= IMBALANCE * sum(bucket) or index == len(costs) - 1:
            yield range(first, index + 1), owners
            loads = [load + share for load, share in zip(loads, shares)]
            first = index + 1


def choose_owners(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The owner of each tensor of a bucket; largest first, each goes to the rank that has the least of the bucket.

    Among equals it goes to the rank that has the least so far, by ``loads``.
    """
    owners, shares = [0] * len(costs), [0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(len(loads)), key=lambda rank: (shares[rank], loads[rank], rank))
        owners[index] = owner
        shares[owner] += costs[index]
    return owners


def options_of(group: Group) -> Group:
    """What a group holds besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
