"""``shard``: make any module a sharded one, then train it with an ordinary loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from refshard.engine.collectives import Collectives, GroupCollectives
from refshard.engine.executor import Executor
from refshard.engine.grouping import UnitGroup, group_units
from refshard.engine.hooks import Hooks
from refshard.engine.unit import Unit, UnitParameter
from refshard.errors import EngineError, SpecError
from refshard.plan.layout import lay_out
from refshard.plan.placement import find_mode

_ENGINE = "_refshard_engine"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What ``shard`` attached to a model: its units, in registration order, and what runs them."""

    units: tuple[Unit, ...]
    executor: Executor
    hooks: Hooks

    def __reduce__(self) -> NoReturn:
        """A copy's hooks would work on the original's storage.

        Raises:
            EngineError: always; ``copy.deepcopy`` and ``pickle`` of the model come here.
        """
        raise EngineError(
            "a sharded model cannot be copied or pickled; copy it before refshard.shard, or save its full_parameters"
        )


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mode: str = "yafsdp",
    blocks: Sequence[str | type[nn.Module]] | None = None,
    collectives: Collectives | None = None,
    debug: bool = False,
) -> nn.Module:
    """Shard ``model`` over ``mesh`` in place, and return it.

    Afterwards ``model.parameters()`` yields this rank's part of every parameter, 1-D and possibly empty, under the
    parameter's own name; an elementwise optimizer (AdamW, SGD, ...) over them just works, and so do ``backward`` and
    evaluation under ``no_grad``. All ranks start from rank 0's weights, and must call the same modules and use the same
    parameters in each step, in the same order. A parameter of a unit that took no part gets a gradient of zeros. The
    storage of a ``.grad`` is written again by the next step; clone what must last.

    Args:
        model: a module whose parameters are materialised, of one dtype per unit, and trainable.
        mesh: a 1-D device mesh to shard over; by default all ranks, on the device type of the parameters.
        mode: a row of :data:`refshard.plan.placement.MODES`: ``"fsdp"`` or ``"yafsdp"``.
        blocks: the modules that become units, by name, by name of a list of them, or by class; by default the members
            of the outermost ``nn.ModuleList``. What lies before and after them forms a unit each.
        collectives: what to communicate with; by default the mesh's process group, and a second one of the same ranks
            for reduce-scatters.
        debug: fill freed storage with NaN, so that a read of it shows.

    Raises:
        SpecError: the mode or a block's name is unknown, or the mesh is not 1-D.
        EngineError: the model cannot be sharded; the message says which parameter and why.
    """
    chosen = find_mode(mode)
    if any(hasattr(module, _ENGINE) for module in model.modules()):
        raise EngineError("the model, or a part of it, is sharded already; shard a fresh one, and as a whole")
    groups = group_units(model, blocks)
    collectives = collectives or _mesh_collectives(mesh, next(model.parameters()).device)
    with torch.no_grad():
        units = tuple(_make_unit(i, group, collectives) for i, group in enumerate(groups))
    executor = Executor(units, chosen, collectives, debug=debug)
    setattr(model, _ENGINE, Engine(units, executor, Hooks(model, units, executor)))
    return model


def engine_of(model: nn.Module) -> Engine:
    """The engine that ``shard`` attached to ``model``.

    Raises:
        EngineError: the model was not sharded by refshard.
    """
    engine = getattr(model, _ENGINE, None)
    if not isinstance(engine, Engine):
        raise EngineError("the model is not sharded; call refshard.shard(model, mesh) first")
    return engine


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter's name and full value, a unit at a time; all ranks must iterate to the end.

    The tensors are the caller's own. A tied parameter comes once, under its first name.
    """
    engine = engine_of(model)
    for unit in engine.units:
        with engine.executor.unsharded(unit):
            for parameter in unit.parameters:
                # A copy: whoever calls .numpy() on a view would pin the slot's storage for good.
                yield parameter.layout.name, parameter.unsharded.detach().clone()


def _mesh_collectives(mesh: DeviceMesh | None, device: torch.device) -> Collectives:
    if not dist.is_initialized():
        raise EngineError("no process group; call torch.distributed.init_process_group() before refshard.shard")
    if mesh is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise SpecError(f"mesh: must have one axis to shard over, got {mesh.ndim}; pass mesh['shard'] or the like")
    group = mesh.get_group()
    return GroupCollectives(group, dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True))


def _make_unit(index: int, group: UnitGroup, collectives: Collectives) -> Unit:
    """Flatten a group's parameters, take rank 0's values, keep this rank's part and let go of the rest."""
    first = group.parameters[0].parameter
    shapes = [(member.name, tuple(member.parameter.shape)) for member in group.parameters]
    layout = lay_out(group.name, shapes, collectives.world_size)
    full = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for member, place in zip(group.parameters, layout.parameters):
        full[place.offset : place.offset + place.numel].copy_(member.parameter.detach().reshape(-1))
    collectives.broadcast(full)
    mine = collectives.rank * layout.shard_numel
    flat = full[mine : mine + layout.shard_numel].clone()
    parameters = []
    for member, place in zip(group.parameters, layout.parameters):
        start, stop = layout.local_range(place, collectives.rank)
        sharded = nn.Parameter(flat[start:stop])
        parameters.append(UnitParameter(place, member.holders, sharded, start, stop, sharded.data_ptr()))
        parameters[-1].expose(sharded)
    return Unit(index, group.name, group.modules, layout, tuple(parameters), flat, torch.zeros_like(flat))
