"""From a bare model's parameters to a unit's flat ones: materialise, flatten, take one rank's values, keep a part."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refshard.engine.collectives import Collectives
from refshard.engine.grouping import Member, UnitGroup
from refshard.engine.optim import ShardedGradient, watch_optimizers
from refshard.engine.precision import Precision
from refshard.engine.split import Split, SplitAxis
from refshard.engine.unit import FlatParameter, Unit, UnitParameter
from refshard.errors import EngineError
from refshard.plan.layout import lay_out
from refshard.plan.placement import Mode
from refshard.plan.schedule import UnitFacts

Initialise = Callable[[nn.Module], object]
"""Fills the parameters that a module holds directly, in place."""


def make_unit(
    index: int,
    group: UnitGroup,
    mode: Mode,
    precision: Precision,
    collectives: Collectives,
    device: torch.device,
    *,
    offload: bool,
) -> Unit:
    """Flatten a group's parameters, take the first rank's values, keep this rank's part and let go of the rest."""
    partitions: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in group.parameters:
        partitions.setdefault((member.parameter.dtype, member.parameter.requires_grad), []).append(member)
    flats = tuple(
        _flatten(group.name, members, mode, precision, collectives, device, offload=offload)
        for members in partitions.values()
    )
    facts = UnitFacts(
        size_class=tuple((flat.layout.numel, str(flat.dtype), str(flat.reduce_dtype), flat.trained) for flat in flats),
        trained=any(flat.trained for flat in flats),
        # The backward of an embedding reads indices only.
        read_in_backward=not all(type(m) is nn.Embedding for member in group.parameters for m, _ in member.holders),
    )
    return Unit(
        index=index,
        name=group.name,
        modules=group.modules,
        flats=flats,
        facts=facts,
        device=device,
        aliased=mode.optimizer == "replicate" and all(_may_alias(flat, flat.dtype) for flat in flats),
    )


def materialise(group: UnitGroup, device: torch.device, initialise: Initialise | None) -> None:
    """Give the parameters of ``group`` that are on the meta device storage on ``device``, and values.

    The values are ``initialise``'s, by default those of each module's own ``reset_parameters``. The parameter objects
    stay the same, so that whoever holds one holds the real one afterwards.

    Raises:
        EngineError: a module cannot initialise itself.
    """
    modules = dict.fromkeys(m for member in group.parameters for m, _ in member.holders if member.parameter.is_meta)
    for member in group.parameters:
        if member.parameter.is_meta:
            real = nn.Parameter(torch.empty_like(member.parameter, device=device), member.parameter.requires_grad)
            torch.utils.swap_tensors(member.parameter, real)
    for module in modules:
        if initialise is not None:
            initialise(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise EngineError(
                f"{type(module).__name__} in unit '{group.name}' is on the meta device and has no reset_parameters(); "
                "give refshard.shard an initialise function that fills a module's parameters in place"
            )


def _flatten(
    name: str,
    members: Sequence[Member],
    mode: Mode,
    precision: Precision,
    collectives: Collectives,
    device: torch.device,
    *,
    offload: bool,
) -> FlatParameter:
    first = members[0].parameter
    trained = first.requires_grad
    splits = [Split.of(m.name, m.parameter) for m in members]
    given = [_local(m.parameter.detach()) for m in members]
    layout = lay_out(name, [(m.name, tuple(part.shape)) for m, part in zip(members, given)], collectives.world_size)
    computed, reduced = precision.computed(first.dtype), precision.reduced(first.dtype)
    full = torch.zeros(layout.numel, dtype=first.dtype if trained else computed, device=device)
    for place, part in zip(layout.parameters, given):
        full[place.offset : place.offset + place.numel].copy_(part.reshape(-1))
    collectives.broadcast(full)
    own = slice(collectives.rank * layout.shard_numel, (collectives.rank + 1) * layout.shard_numel)
    keep = {"device": "cpu", "pin_memory": device.type == "cuda"} if offload else {"device": device}
    shard = torch.empty(layout.shard_numel, dtype=full.dtype, **keep).copy_(full[own])
    parameters = []
    for member, place, split in zip(members, layout.parameters, splits):
        start, stop = layout.local_range(place, collectives.rank)
        sharded = _put_in_place(member, nn.Parameter(shard[start:stop], requires_grad=trained))
        as_gradient = _gradients_of(collectives, split)
        parameters.append(
            UnitParameter(place, member.holders, sharded, start, stop, sharded.data_ptr(), split, as_gradient)
        )
    watch_optimizers([p.sharded for p in parameters])
    flat = FlatParameter(
        layout=layout,
        parameters=tuple(parameters),
        shard=shard,
        trained=trained,
        dtype=computed,
        reduce_dtype=reduced,
        own=own,
        scale=1 / (collectives.world_size * collectives.replicas),
        offloaded=offload,
    )
    if trained and mode.optimizer == "replicate" and _may_alias(flat, reduced):
        flat.whole_gradient = torch.zeros_like(shard)
    return flat


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter before it is sharded: all, unless tensor parallelism has split it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _put_in_place(member: Member, sharded: nn.Parameter) -> nn.Parameter:
    """Let whoever holds the parameter, an optimizer made before sharding say, hold this rank's part from now on; of a
    DTensor, which cannot become a plain tensor, the modules alone.
    """
    if not isinstance(member.parameter, DTensor):
        torch.utils.swap_tensors(member.parameter, sharded)
        return member.parameter
    for module, attribute in member.holders:
        module._parameters[attribute] = sharded
    return sharded


def _gradients_of(collectives: Collectives, split: Split | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A part is a gradient as it is where it is the whole."""
    if split is not None and split.divided:
        axis = SplitAxis(collectives, split.mesh)
        return lambda part: ShardedGradient.of(part, axis)
    if collectives.world_size == 1:
        return lambda part: part
    return lambda part: ShardedGradient.of(part, collectives)


def _may_alias(flat: FlatParameter, dtype: torch.dtype) -> bool:
    """Whether a whole shard can serve as the unsharded buffer of ``dtype``."""
    return flat.shard.dtype == dtype and not flat.offloaded
