"""The state of tensors that have an owner, as every rank sees it: parts, with all elements on the owner.

An owner's state is its own affair between steps. Where it is saved or loaded, every rank must know of all of it; then
each tensor is a :class:`~refshard.engine.local_part.LocalPart`, which knows how to be gathered, written and read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refshard.engine.collectives import Collectives
from refshard.engine.exchange import Owned
from refshard.engine.local_part import LocalPart, local_of, whole_of
from refshard.engine.trees import leaves_of
from refshard.engine.whole import Whole
from refshard.errors import EngineError

State = dict[str, Any]
"""What an optimizer holds of one parameter, by name."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Metadata of an owner's tensor, for the other ranks."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class _Unknown:
    """Placeholder for state that cannot be sent: a container of tensors."""

    kind: str


def everyones_state(
    members: Sequence[Owned], state: Mapping[torch.Tensor, State], collectives: Collectives
) -> dict[nn.Parameter, State]:
    """The state of all members that have any, the same on every rank except for the elements; collective.

    An owner's tensors are views of its own, 0-d ones and plain values are copies on other ranks.

    Raises:
        EngineError: a member's state is a container of tensors.
    """
    sharded = {m.whole.name: m for m in members if m.whole is not None}
    mine = {
        name: {key: _told(value) for key, value in state[m.parameter].items()}
        for name, m in sharded.items()
        if m.owner == collectives.rank and m.parameter in state
    }
    gathered = collectives.gather_objects(mine) if sharded else []
    found = {}
    for member in members:
        if member.parameter not in state:
            continue
        own = state[member.parameter]
        if member.whole is not None:
            theirs = gathered[member.owner].get(member.whole.name, {})
            own = {key: _seen(key, value, member, own.get(key), collectives) for key, value in theirs.items()}
        found[member.parameter] = own
    return found


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(value.shape, value.dtype, value.device.type) if value.dim() else value.detach().cpu()
    return _Unknown(type(value).__name__) if any(isinstance(v, torch.Tensor) for v in leaves_of(value)) else value


def _seen(key: str, told: Any, member: Owned, own: Any, collectives: Collectives) -> Any:
    """The state that its owner sent, ``told``, as this rank keeps it; ``own`` is the owner's."""
    if isinstance(told, _Unknown):
        assert member.whole is not None
        raise EngineError(
            f"the optimizer's state '{key}' of {member.whole.label} is a {told.kind} of tensors, which cannot be "
            "gathered from its owner; store each tensor under its own key"
        )
    if not isinstance(told, _Tensor):
        return told if own is None else own
    local = None if own is None else own.detach().reshape(-1)
    return owned_part(key, member, told.shape, told.dtype, torch.device(told.device), collectives, local)


def owned_part(
    key: str,
    member: Owned,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives,
    local: torch.Tensor | None = None,
) -> LocalPart:
    """State of a member's as a part: all elements on the owner, which are ``local`` or new ones, none elsewhere."""
    assert member.whole is not None
    bounds = [0 if rank <= member.owner else shape.numel() for rank in range(collectives.world_size + 1)]
    whole = Whole(f"{member.whole.name}.{key}", shape, tuple(pairwise(bounds)), collectives, None, member.whole.mesh)
    if local is None:
        local = torch.empty(whole.stop - whole.start, dtype=dtype, device=device)
    return LocalPart(local, whole)


def own_state(member: Owned, state: Mapping[str, Any], collectives: Collectives) -> State:
    """What this rank keeps of state that every rank has, in any form; collective.

    Parts and DTensors are put together where the owner does not have all elements already.
    """
    mine = member.owner == collectives.rank
    found = {key: _whole_value(value, member.owner) for key, value in state.items()}
    return found if mine else {}


def _whole_value(value: Any, owner: int) -> Any:
    """The value on its owner; on other ranks anything."""
    if isinstance(value, torch.Tensor) and (whole := whole_of(value)) is not None:
        if whole.ranges[owner] == (0, whole.shape.numel()):
            local = local_of(value)
            return local.view(whole.shape) if local.numel() == whole.shape.numel() else None
        return LocalPart(local_of(value), whole).full_tensor()
    return value.full_tensor() if isinstance(value, DTensor) else value
