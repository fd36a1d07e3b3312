"""``shard``: make any module a sharded one, then train it with an ordinary loop."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from refshard.engine.collectives import Collectives, GroupCollectives, group_beside
from refshard.engine.comm_memory import CommMemory
from refshard.engine.device import Lanes, lanes_of
from refshard.engine.executor import Executor
from refshard.engine.grouping import Member, UnitGroup, blocks_argument, find_ignored, group_units
from refshard.engine.hooks import Hooks
from refshard.engine.materialise import (
    Initialise,
    Terms,
    check_memory,
    check_parameters,
    check_ranks,
    make_unit,
    materialise,
    materialise_buffers,
    take_first_buffers,
)
from refshard.engine.optim import clip_gradients, watch_optimizers
from refshard.engine.owners import Make, Place
from refshard.engine.placement import Accumulation, Mode, find_mode
from refshard.engine.policy import Policies, resolve
from refshard.engine.precision import Precision
from refshard.engine.registration import watch_registrations
from refshard.engine.state_dict import show_gatherable
from refshard.engine.subclasses import Packed
from refshard.engine.unit import Unit
from refshard.engine.whole_tensors import WholeTensors
from refshard.errors import EngineError, SpecError, UnsupportedError

_ENGINE = "_refshard_engine"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What ``shard`` attached to a model: its units, in registration order, ignored parameters, and what runs them."""

    units: tuple[Unit, ...]
    ignored: tuple[Member, ...]
    mode: Mode
    collectives: Collectives
    executor: Executor
    hooks: Hooks


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mode: str = "yafsdp",
    blocks: Sequence[str | type[nn.Module]] | None = None,
    ignored: Sequence[str | nn.Parameter] = (),
    precision: Precision | None = None,
    policies: Policies | None = None,
    accumulation: Accumulation | None = None,
    gradient_divide_factor: float | None = None,
    initialise: Initialise | None = None,
    offload: bool = False,
    communication_streams: int = 2,
    comm_memory: CommMemory = "default",
    keep_buffers: bool = False,
    collectives: Collectives | None = None,
    lanes: Lanes | None = None,
    debug: bool = False,
) -> nn.Module:
    """Shard ``model`` over ``mesh`` in place, and return it.

    Afterwards ``model.parameters()`` yields this rank's part of every parameter, a
    :class:`~refshard.engine.local_part.LocalPart`, under the same name, with the whole shape and the same object
    identity. An operator on it is correct for the whole tensor, or raises. In modes that shard nothing, it is a plain
    parameter. Elementwise optimizers (AdamW, SGD, ...) work unchanged, and so do ``backward``,
    ``torch.nn.utils.clip_grad_norm_``, ``torch.amp.GradScaler``, torch's distributed checkpoints and evaluation under
    ``no_grad``. All ranks start from the first rank's weights and buffers; later, each rank keeps its own buffers.
    In the first step, all ranks must call the same units in the same order. A parameter that no rank used in a step has
    no gradient.

    Args:
        model: a module. Frozen parameters stay frozen; parameters on the meta device are materialised a unit at a time.
            If ``parallelize_module`` has split the model over another mesh, this rank's part of it is sharded; make
            the optimizer of such a model after sharding.
        mesh: a device mesh with one axis (shard) or two (replicate, shard). A mode that shards nothing
            replicates over every axis. By default all ranks, on the device type of the parameters.
        mode: a row of :data:`refshard.engine.placement.MODES`: ``"replicate"``, ``"zero1"``, ``"zero2"``, ``"fsdp"`` or
            ``"yafsdp"``.
        blocks: the modules that become units, by name, by name of a list of them, or by class; by default the members
            of the outermost ``nn.ModuleList``. The modules before them form one unit, the modules after them another.
            Without blocks, the model is one unit.
        ignored: parameters, or their names, to leave unsharded: each rank has them whole, and their gradients
            are not reduced. They must be equal on all ranks, and on the device that the model computes on. Reduce
            their gradients before ``torch.nn.utils.clip_grad_norm_``; otherwise its norm differs by rank.
        precision: the dtypes of parameters in compute and of gradients in reduction; by default the model's own.
        policies: modules to shard in another mode or precision, or over another mesh: a mapping from patterns of module
            names to :class:`~refshard.engine.policy.Policy`, or a function of name and module.
        accumulation: where gradients of several microbatches are summed, ``"shard"`` or ``"unsharded"``; the default
            depends on the mode. See :func:`no_sync`.
        gradient_divide_factor: divisor of the sum of the ranks' gradients; by default the number of ranks of the mesh,
            so that gradients are means. Use 1 if each rank divides its loss by a count over all ranks, such as the
            number of tokens.
        initialise: a function that fills a meta-device module's own parameters and buffers in place; by
            default the module's ``reset_parameters``.
        offload: keep masters, their gradients and optimizer state in (pinned) CPU memory.
        communication_streams: 1, or 2 to overlap reductions with gathers: on separate CUDA streams
            (a third if shards are also replicated), and in two process groups of the same ranks.
        comm_memory: where kept buffers are allocated (whole parameters and gradients; with ``keep_buffers``, all of
            ``"yafsdp"``): in the process group's memory if it has some, else in torch's (``"default"``), by torch's
            caching allocator (``"allocator"``), in the process group's memory (``"group"``) or in symmetric memory
            (``"symmetric"``). In ``"yafsdp"``, the last two turn ``keep_buffers`` on. With symmetric memory, NCCL
            gathers with copy engines if its communicator has the zero-CTA policy (``NCCL_CTA_POLICY=2``).
        keep_buffers: use more memory and wait less, in mode ``"yafsdp"`` only: keep buffers of unsharded parameters
            and gradients from step to step, keep the last blocks gathered from forward to backward, and reduce the
            gradients of two blocks at once. By default, unused memory is returned to torch's allocator at the end of
            forward, when activations peak, and at the end of backward.
        collectives: custom collectives; by default those of the mesh's process groups.
        lanes: custom ordering of compute, gathers and reductions; by default the device's streams.
        debug: fill freed storage with NaN, so that reads of it become visible, and check before each collective that
            all ranks issue the same one.

    Raises:
        SpecError: the mode, a block's name or another argument is unknown, or the mesh has more than two axes.
        EngineError: the model cannot be sharded; the message says which parameter and why.
        UnsupportedError: the process group, the GPU, this torch or the mode does not support ``comm_memory``.
    """
    chosen, precision = find_mode(mode, accumulation), precision or Precision()
    _check_comm_memory(comm_memory, chosen, collectives)
    if keep_buffers and chosen.storage != "ring":
        raise SpecError(f"keep_buffers: mode '{mode}' has no ring of buffers to keep; shard with mode='yafsdp'")
    if chosen.storage == "ring" and (keep_buffers or comm_memory in ("group", "symmetric")):
        chosen = replace(chosen, keep=True, gradient_slots=2)
    if communication_streams not in (1, 2):
        raise SpecError(f"communication_streams: must be 1 or 2, got {communication_streams}")
    if sharded := [name for name, module in model.named_modules() if hasattr(module, _ENGINE)]:
        raise EngineError(_sharded_already(model, sharded))
    if torch.is_inference_mode_enabled():
        raise EngineError(
            "parameters that are made within torch.inference_mode() cannot be trained; shard outside of it"
        )
    left = find_ignored(model, ignored)
    special = resolve(model, policies or {})
    groups = group_units(model, blocks, left, special)
    for group in groups:
        check_parameters(group)
    check_memory(model, groups)
    device = _compute_device(groups, mesh)
    if collectives is None:
        mesh = mesh or _default_mesh(device)
        collectives = _mesh_collectives(mesh, device, chosen, communication_streams, comm_memory)
    ranks = collectives.world_size * collectives.replicas
    divisor = ranks if gradient_divide_factor is None else gradient_divide_factor
    if not (0 < divisor < math.inf):
        raise SpecError(f"gradient_divide_factor: must be a finite number > 0, got {divisor}; None takes the mean")

    def precision_of(module: nn.Module) -> Precision:
        return special.of[module].precision or precision

    @functools.cache
    def terms(own_mode: str | None, own_mesh: DeviceMesh | None) -> Terms:
        of_mode, over = chosen, collectives
        if own_mode is not None and own_mode != mode:
            of_mode = find_mode(own_mode, accumulation if own_mode != "yafsdp" else None)
        if own_mesh is not None or of_mode.optimizer != chosen.optimizer:
            if mesh is None:
                raise SpecError("policies: a mode or mesh of its own needs process groups; leave out collectives")
            over = _mesh_collectives(own_mesh or mesh, device, of_mode, communication_streams, comm_memory)
        return Terms(
            mode=of_mode, precision_of=precision_of, collectives=over, mesh=own_mesh or mesh, device=device,
            offload=offload, rescale=over.world_size * over.replicas / divisor, rescale_of_split=ranks / divisor,
            partial=over.world_size * over.replicas < ranks,
        )  # fmt: skip

    units = []
    with torch.no_grad():
        for index, group in enumerate(groups):
            materialise(group, device, initialise)
            own = terms(group.policy.mode, group.policy.mesh)
            check_ranks(group, own, ranks)
            units.append(make_unit(index, group, own))
        materialise_buffers(model, device, initialise)
        take_first_buffers(
            model, units, device, lambda module: terms(special.of[module].mode, special.of[module].mesh).collectives
        )
    lanes = lanes or lanes_of(device, communication_streams)
    executor = Executor(units, collectives, lanes, debug=debug)
    casting = {model.get_submodule(n): p.precision for n, p in special.given.items() if n and p.precision is not None}
    hooks = Hooks(model, tuple(units), executor, precision_of, casting)
    watch_optimizers([p.sharded for unit in units for p in unit.parameters], hooks)
    show_gatherable(units)
    watch_registrations(model)
    setattr(model, _ENGINE, Engine(tuple(units), left, chosen, collectives, executor, hooks))
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


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Run microbatches other than the step's last one in this context (both forward and backward).

    If gradients accumulate unsharded (``replicate`` and ``zero1`` by default), they are reduced by the next backward
    outside the context. If they accumulate in the shard, every microbatch is still reduced, to free its buffers.
    """
    executor = engine_of(model).executor
    before, executor.accumulating = executor.accumulating, True
    try:
        yield
    finally:
        executor.accumulating = before


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a sharded model in place so that their total norm is at most ``max_norm``.

    Same result as ``torch.nn.utils.clip_grad_norm_`` over the model's parameters, with one collective instead of one
    per parameter. Returns the total norm before clipping, a 0-d tensor, equal on all ranks. For ``ignored`` parameters,
    whose gradients may differ between ranks, the mean over ranks of their norm to the power ``norm_type`` counts.

    Raises:
        EngineError: the model was not sharded, ``max_norm`` or ``norm_type`` is not positive, or some ranks have
            parameters that others lack.
    """
    engine = engine_of(model)
    for flat in (flat for unit in engine.units for flat in unit.flats if flat.trained):
        for parameter in flat.parameters:
            flat.master.check_known(parameter.layout.name, parameter.split, "be clipped")
    parameters = [p.sharded for unit in engine.units for p in unit.trained]
    ignored = [m.parameter for m in engine.ignored if m.parameter.requires_grad]
    return clip_gradients(parameters, ignored, engine.collectives, max_norm, norm_type)


def whole_tensors(
    optimizer: Make, model: nn.Module, parameters: Iterable[Any] | None = None, **options: Any
) -> WholeTensors:
    """Make an optimizer that needs whole tensors (Muon, Adafactor, Shampoo, ...) for a sharded model.

    One rank of the shard axis owns each tensor. In a step, the owner receives the whole gradient and parameter, steps
    them with the given optimizer class, and sends every rank its part. Only the owner keeps the tensor's state. The
    result is bit-identical to that optimizer on an unsharded model. Parameters that are not sharded
    (``mode="replicate"``, ``ignored``) are stepped on every rank. With ``offload``, steps and state are on the device
    that the model computes on.

    An optimizer's update of a tensor must depend only on that tensor, its gradient and the options of its group.

    Args:
        optimizer: a class of optimizers, such as ``torch.optim.Muon``.
        model: a model that :func:`shard` has sharded.
        parameters: parameters of ``model`` or groups of them, as for any torch optimizer; by default
            all trained parameters.
        options: other arguments of the optimizer.

    Raises:
        EngineError: the model is not sharded, a parameter is not in it or is split by tensor parallelism, or the
            optimizer couples tensors.
    """
    engine = engine_of(model)
    places = [
        Place(unit.name, tuple(p.sharded for p in flat.parameters), unit.device)
        for unit in engine.units
        for flat in unit.flats
    ]
    places += [Place(m.name, (m.parameter,), m.parameter.device) for m in engine.ignored]
    given = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    try:
        return WholeTensors(optimizer, given, options, places, engine.collectives)
    except ValueError as error:
        if parameters is None:
            error.add_note(
                "whole_tensors gave it all trained parameters; choose some, as in parameters=[p for p in "
                "model.parameters() if p.ndim == 2]"
            )
        raise


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter's name and full master value, a unit at a time; all ranks must iterate to the end.

    The tensors are copies; for a quantised parameter, of the packed data. A tied parameter appears once, under its
    first name. ``ignored`` parameters come last, with this rank's values.

    Raises:
        EngineError: the model is not sharded, or a parameter was replaced or moved since.
    """
    engine = engine_of(model)
    for unit in engine.units:
        unit.check_parameters()
        within: dict[str, torch.Tensor] = {}
        for flat in unit.flats:
            full = torch.empty(flat.layout.numel, dtype=flat.shard.dtype, device=unit.device)
            with torch.no_grad():
                unit.collectives.all_gather(full, flat.shard.to(unit.device)).wait()
            for parameter in flat.parameters:
                place, split = parameter.layout, parameter.split
                part = full[place.offset : place.offset + place.numel].view(place.shape).clone()
                if not isinstance(parameter.form, Packed) or parameter.form.whole:
                    yield place.name, part if split is None else split.whole(part)
                    continue
                within[place.name] = part
                if within.keys() >= parameter.form.suffixes.keys():
                    yield parameter.form.name, parameter.form.over(within)
    for member in engine.ignored:
        value = member.parameter.detach()
        yield member.name, value.full_tensor() if isinstance(value, DTensor) else value.clone()


def _sharded_already(model: nn.Module, names: list[str]) -> str:
    if "" in names:
        return "the model is sharded already; shard a fresh one"
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return (
        f"parts of the model are sharded already ({', '.join(map(repr, names[:2]))}{rest}); shard a fresh model as a "
        f"whole instead, by one call: refshard.shard(model{blocks_argument(model, names)})"
    )


def _compute_device(groups: Sequence[UnitGroup], mesh: DeviceMesh | None) -> torch.device:
    """Where the parameters are; for those on the meta device, the mesh's device type or the CPU."""
    device = groups[0].parameters[0].parameter.device
    if device.type != "meta":
        return device
    kind = mesh.device_type if mesh is not None else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _default_mesh(device: torch.device) -> DeviceMesh:
    """One axis of all ranks."""
    if not dist.is_initialized():
        raise EngineError("no process group; call torch.distributed.init_process_group() before refshard.shard")
    world = dist.group.WORLD
    assert world is not None
    kept = _MESHES.setdefault(world, {})
    mesh = kept.get(device.type) or init_device_mesh(device.type, (dist.get_world_size(),))
    if mesh.get_group() is not world:
        kept[device.type] = mesh
    return mesh


_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()
"""Those for which torch made a process group, as it does on GPUs where the default group is gloo's: one for all models,
not one for each. By default group and device type.
"""


def _check_comm_memory(memory: CommMemory, mode: Mode, collectives: Collectives | None) -> None:
    """That there is something to allocate in this kind of memory, and that it is the engine that does."""
    if memory not in get_args(CommMemory):
        raise SpecError(f"comm_memory: must be one of {', '.join(get_args(CommMemory))}, got {memory!r}")
    if collectives is not None and memory != "default":
        raise SpecError(
            f"comm_memory: must be 'default' with custom collectives, got '{memory}'; override their allocate()"
        )
    if memory in ("group", "symmetric") and mode.storage == mode.gradient_storage == "transient":
        raise UnsupportedError(
            f"comm_memory: '{memory}' needs buffers that are kept, but mode '{mode.name}' gives each back to torch's "
            "allocator after use; shard with mode='yafsdp', or use 'default'"
        )


def _mesh_collectives(
    mesh: DeviceMesh, device: torch.device, mode: Mode, streams: int, memory: CommMemory
) -> Collectives:
    if mesh.ndim > 2:
        raise SpecError(f"mesh: must have one axis, or two to replicate and shard over, got {mesh.ndim}")
    kept = mode.keep or mode.gradient_storage == "persistent"
    if mode.optimizer == "replicate":
        ranks = mesh.mesh.flatten().tolist()
        everyone = mesh.get_group() if mesh.ndim == 1 else group_beside(mesh.get_group(0), ranks)
        return GroupCollectives(None, everyone, device=device, memory=memory, gradients_kept=kept)
    shards = mesh.get_group(mesh.ndim - 1)
    replicas = mesh.get_group(0) if mesh.ndim == 2 else None
    reducing = group_beside(shards, dist.get_process_group_ranks(shards)) if streams == 2 else None
    return GroupCollectives(
        shards, replicas, reducing=reducing, device=device, memory=memory, gradients_kept=kept
    )  # fmt: skip
