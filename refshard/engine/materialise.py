"""Makes a unit's flat parameters of a model's parameters: materialise, flatten, take the first rank's values, shard."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from refshard.engine.collectives import COMMUNICATED, Collectives
from refshard.engine.flat import FlatParameter, UnitParameter
from refshard.engine.grouping import Member, UnitGroup
from refshard.engine.layout import ParameterLayout, UnitLayout, lay_out
from refshard.engine.local_part import AsPart, LocalPart, local_of, whole_of
from refshard.engine.placement import Mode
from refshard.engine.precision import Precision
from refshard.engine.split import Split
from refshard.engine.subclasses import Extended, Packed, check_class, emptied, form_of, tensors_in
from refshard.engine.unit import Unit
from refshard.engine.whole import Master, Whole
from refshard.errors import EngineError, SpecError

FROZEN_ONLY = frozenset(
    {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32}
    | {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
)
"""The dtypes of parameters that are gathered, as bytes, and cannot be reduced."""
Initialise = Callable[[nn.Module], object]
"""Fills the parameters that a module holds directly, in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a unit is sharded. ``precision_of`` is a module's, ``rescale`` what the mean of the ranks' gradients is
    multiplied with. ``partial`` says that the collectives have but some of the model's ranks; a gradient that comes to
    a split parameter itself is a mean over all of them all the same, and is multiplied with ``rescale_of_split``.
    """

    mode: Mode
    precision_of: Callable[[nn.Module], Precision]
    collectives: Collectives
    mesh: DeviceMesh | None
    device: torch.device
    offload: bool
    rescale: float
    rescale_of_split: float
    partial: bool = False


def make_unit(index: int, group: UnitGroup, terms: Terms) -> Unit:
    """Flatten a group's parameters, take the first rank's values, keep this rank's part and let go of the rest."""
    mode, collectives = terms.mode, terms.collectives
    partitions: dict[object, list[_Piece]] = {}
    for member in group.parameters:
        for piece in _pieces(member, terms):
            dtypes = piece.tensor.dtype, piece.form and piece.form.dtype
            key = dtypes, member.parameter.requires_grad, piece.precision, type(piece.form)
            partitions.setdefault(key, []).append(piece)
    flats = tuple(_flatten(pieces, terms) for pieces in partitions.values())
    parts = {p.layout.name: flat.part_of(p) for flat in flats for p in flat.parameters}
    for piece, parameter in zip(chain(*partitions.values()), (p for flat in flats for p in flat.parameters)):
        if isinstance(piece.form, Packed) and piece.holders:
            whole = terms.collectives.world_size == 1  # where nothing is sharded, it stays of its class
            sharded = piece.form.over(parts) if whole else parameter.sharded
            parameter.sharded = _put_in_place(piece, sharded, terms)
            parameter.address = local_of(parameter.sharded).data_ptr()
    for flat in flats:
        if flat.trained:
            make_room_for_gradients(flat, mode, collectives)
    return Unit(
        index=index,
        name=group.name,
        modules=group.modules,
        flats=flats,
        mode=mode,
        collectives=collectives,
        device=terms.device,
        # The backward of an embedding reads indices only.
        read_in_backward=not all(type(m) is nn.Embedding for member in group.parameters for m, _ in member.holders),
        aliased=mode.optimizer == "replicate"
        and all(_may_alias(flat, flat.dtype) and not flat.extended for flat in flats),
    )


class _Piece(NamedTuple):
    """A tensor to flatten: this rank's whole of a parameter, or one of several that a tensor subclass consists of.

    ``holders`` are those of the member, if this is its first.
    """

    name: str
    tensor: torch.Tensor
    member: Member
    holders: tuple[tuple[nn.Module, str], ...]
    form: Packed | Extended | None
    precision: Precision


def _pieces(member: Member, terms: Terms) -> Iterator[_Piece]:
    module = member.holders[0][0]
    precision, *others = dict.fromkeys(terms.precision_of(holder).of_parameters() for holder, _ in member.holders)
    if others:
        raise EngineError(
            f"parameter '{member.name}' is shared by modules that have policies of different precision; give them the "
            "same"
        )
    form = form_of(member.name, member.parameter, precision, terms.mesh, module)
    if isinstance(form, Packed):
        precision = Precision()  # packed bits are not to be cast
    tensors = tensors_in(member.name, member.parameter)
    if isinstance(form, Extended):
        tensors = dict.fromkeys([member.name], *tensors.values())
    for index, (name, tensor) in enumerate(tensors.items()):
        yield _Piece(name, tensor, member, () if index else member.holders, form, precision)


def check_ranks(group: UnitGroup, terms: Terms, ranks: int) -> None:
    """Check that the ranks of a unit's mesh have the same parameters, and are all or a part of the model's ``ranks``.

    Raises:
        SpecError: they are not.
    """
    held = terms.collectives.world_size * terms.collectives.replicas
    if ranks % held:
        raise SpecError(f"policies: the mesh of '{group.name}' has {held} ranks, which must divide the model's {ranks}")
    for member in group.parameters:
        split = Split.of(member.name, member.parameter)
        if split is None or terms.mesh is None:
            continue
        if split.axes and _share_ranks(split.mesh, terms.mesh):
            raise SpecError(
                f"parameter '{member.name}' is split over ranks that its unit '{group.name}' is sharded over, too; "
                "give its module a policy with the mesh of the ranks that have the same part"
            )
        if held != ranks and held * split.mesh.size() != ranks:
            raise SpecError(
                f"parameter '{member.name}' is split over {split.mesh.size()} ranks and sharded over {held}, which "
                f"together must be the model's {ranks} ranks"
            )


def _share_ranks(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes have several ranks in common."""
    return len({*one.mesh.flatten().tolist()} & {*other.mesh.flatten().tolist()}) > 1


def check_parameters(group: UnitGroup) -> None:
    """Check that the parameters of ``group`` can be flattened and communicated.

    Raises:
        EngineError: one is of a tensor subclass or a dtype that cannot.
    """
    for member in group.parameters:
        if whole_of(member.parameter) is not None:
            raise EngineError(f"parameter '{member.name}' is a part of a sharded model's; put its full_tensor() here")
        check_class(member.name, member.parameter)
        trained = member.parameter.requires_grad
        allowed = COMMUNICATED if trained else COMMUNICATED | FROZEN_ONLY
        for name, tensor in tensors_in(member.name, member.parameter).items():
            if tensor.dtype not in allowed:
                names = ", ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
                cannot = "reduce" if trained else "gather"
                raise EngineError(
                    f"parameter '{name}' is of {tensor.dtype}, which collectives cannot {cannot}; "
                    f"keep it in one of {names}{', or freeze it' if tensor.dtype in FROZEN_ONLY else ''}"
                )


def check_memory(model: nn.Module, groups: Sequence[UnitGroup]) -> None:
    """Check that no two parameters, and no parameter and buffer, begin at the same place.

    Raises:
        EngineError: two do, and would be different ones from now on.
    """
    seen: dict[int, str] = {}
    for member in (member for group in groups for member in group.parameters):
        for name, tensor in tensors_in(member.name, member.parameter).items():
            if tensor.numel() and not tensor.is_meta and (other := seen.setdefault(tensor.data_ptr(), name)) != name:
                raise EngineError(
                    f"parameters '{other}' and '{name}' share memory, which sharding would separate; assign the "
                    "parameter itself to tie them, or clone one"
                )
    for name, buffer in model.named_buffers():
        plain = (
            type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.numel() and not buffer.is_meta
        )
        if plain and (parameter := seen.get(buffer.data_ptr())) is not None:
            raise EngineError(
                f"buffer '{name}' lies in the memory of parameter '{parameter}', which sharding would separate; "
                "register a clone, or compute it from the parameter"
            )


def materialise(group: UnitGroup, device: torch.device, initialise: Initialise | None) -> None:
    """Give the parameters of ``group`` that are on the meta device storage on ``device``, and values; with them the
    buffers of the modules that hold them.

    The values are ``initialise``'s, by default those of each module's own ``reset_parameters``. The parameter objects
    stay the same, so that whoever holds one holds the real one afterwards.

    Raises:
        EngineError: a module cannot initialise itself, or leaves a buffer as it was.
    """
    modules = dict.fromkeys(m for member in group.parameters for m, _ in member.holders if member.parameter.is_meta)
    for member in group.parameters:
        if member.parameter.is_meta:
            real = nn.Parameter(emptied(member.parameter, device), member.parameter.requires_grad)
            torch.utils.swap_tensors(member.parameter, real)
    for module in modules:
        _fill(module, device, initialise, f"{type(module).__name__} in unit '{group.name}'")


def materialise_buffers(model: nn.Module, device: torch.device, initialise: Initialise | None) -> None:
    """Give the buffers of ``model`` that are still on the meta device storage and values, as :func:`materialise` does.

    Raises:
        EngineError: a module cannot initialise them, or has parameters that are not on the meta device.
    """
    for name, module in model.named_modules():
        buffer = next((key for key, b in module._buffers.items() if b is not None and b.is_meta), None)
        if buffer is None:
            continue
        if any(p is not None for p in module._parameters.values()):
            raise EngineError(
                f"buffer '{f'{name}.{buffer}' if name else buffer}' is on the meta device and its module's parameters "
                "are not; give it a value before refshard.shard"
            )
        _fill(module, device, initialise, f"{type(module).__name__} '{name}'")


def take_first_buffers(
    model: nn.Module, units: Sequence[Unit], device: torch.device, collectives_of: Callable[[nn.Module], Collectives]
) -> None:
    """Overwrite the buffers of ``model``, as far as they are plain tensors, and what packed parameters keep beside
    their data with those of the first rank of the collectives that a module has.

    They travel together, as bytes: in one collective per axis, whatever their dtypes and devices.

    Raises:
        EngineError: the ranks have buffers of other names, shapes or dtypes.
    """
    dense = (torch.strided, False)
    found: dict[Collectives, dict[str, torch.Tensor]] = {}
    for name, module in model.named_modules():
        for key, b in module._buffers.items():
            if type(b) is torch.Tensor and (b.layout, b.is_quantized) == dense:
                found.setdefault(collectives_of(module), {})[f"{name}.{key}" if name else key] = b
    for unit in units:
        for parameter in (p for p in unit.parameters if p.holders):
            for suffix, tensor in parameter.form.state() if isinstance(parameter.form, Packed) else ():
                found.setdefault(unit.collectives, {})[parameter.layout.name + suffix] = tensor
    for collectives, named in found.items():
        _take_first(named, device, collectives)


def _take_first(named: Mapping[str, torch.Tensor], device: torch.device, collectives: Collectives) -> None:
    alike = repr([(name, b.shape, b.dtype) for name, b in named.items()])
    if not collectives.agree(zlib.crc32(alike.encode())):
        raise EngineError(
            f"rank {collectives.world_rank} has buffers of other names, shapes or dtypes than another rank, while all "
            "take the first rank's; register those that differ after refshard.shard"
        )
    copies = [torch.empty(b.shape, dtype=b.dtype, device=device).copy_(b) for b in named.values()]
    data = torch.cat([copy.view(-1).view(torch.uint8) for copy in copies])
    collectives.broadcast(data)
    for buffer, copy, received in zip(named.values(), copies, data.split([copy.nbytes for copy in copies])):
        copy.view(-1).view(torch.uint8).copy_(received)
        once = tuple(slice(None if stride else 1) for stride in buffer.stride())  # of an expanded one
        with torch.inference_mode() if buffer.is_inference() else nullcontext():
            buffer[once].copy_(copy[once])


def _fill(module: nn.Module, device: torch.device, initialise: Initialise | None, what: str) -> None:
    empty = {
        key: torch.empty_like(b, device=device) for key, b in module._buffers.items() if b is not None and b.is_meta
    }
    module._buffers.update(empty)
    versions = {key: buffer._version for key, buffer in empty.items()}
    reset = getattr(module, "reset_parameters", None)
    if initialise is not None:
        initialise(module)
    elif callable(reset):
        reset()
    else:
        raise EngineError(
            f"{what} is on the meta device and has no reset_parameters(); give refshard.shard an initialise function "
            "that fills a module's parameters and buffers in place"
        )
    for key, buffer in empty.items():
        if module._buffers[key] is buffer and buffer._version == versions[key]:
            raise EngineError(
                f"{what} is on the meta device, and what initialises it leaves the buffer '{key}' without a value; "
                "give refshard.shard an initialise function that fills it in place"
            )


def _flatten(pieces: Sequence[_Piece], terms: Terms) -> FlatParameter:
    collectives, device = terms.collectives, terms.device
    dtype, trained = pieces[0].tensor.dtype, pieces[0].member.parameter.requires_grad
    form, precision = pieces[0].form, pieces[0].precision
    layout = lay_out([(piece.name, tuple(piece.tensor.shape)) for piece in pieces], collectives.world_size)
    computed, reduced = precision.computed(dtype), precision.reduced(dtype)
    if isinstance(form, Extended):
        computed = form.dtype
    narrowed = not (trained or isinstance(form, Extended)) and computed != dtype
    full = torch.zeros(layout.numel, dtype=computed if narrowed else dtype, device=device)
    for place, piece in zip(layout.parameters, pieces):
        full[place.offset : place.offset + place.numel].copy_(piece.tensor.reshape(-1))
    collectives.broadcast(full)
    own = slice(collectives.rank * layout.shard_numel, (collectives.rank + 1) * layout.shard_numel)
    keep = {"device": "cpu", "pin_memory": device.type == "cuda"} if terms.offload else {"device": device}
    shard = torch.empty(layout.shard_numel, dtype=full.dtype, **keep).copy_(full[own])
    master = Master(shard, elsewhere_other=terms.partial)
    parameters = []
    for piece, place in zip(pieces, layout.parameters):
        start, stop = layout.local_range(place, collectives.rank)
        local, split = shard[start:stop], Split.of(piece.name, piece.member.parameter)
        as_part, listed = _parts_of(piece, place, layout, split, terms, master), _listed(piece.holders)
        sharded = nn.Parameter(as_part(local), requires_grad=trained)
        if not isinstance(form, Packed):
            sharded = _put_in_place(piece, sharded, terms)
        at = start, stop, local.data_ptr()
        parameters.append(UnitParameter(place, piece.holders, sharded, *at, split, as_part, listed, piece.form))
    return FlatParameter(
        layout=layout,
        parameters=tuple(parameters),
        master=master,
        trained=trained,
        dtype=computed,
        reduce_dtype=reduced,
        own=own,
        reduced_over=collectives.world_size * collectives.replicas,
        scratch_numel=collectives.scratch_numel(layout.numel),
        scale=collectives.scale,
        rescale=terms.rescale,
        offloaded=terms.offload,
        narrowed=narrowed,
    )


def make_room_for_gradients(flat: FlatParameter, mode: Mode, collectives: Collectives) -> None:
    """Give a flat parameter that is trained memory for whole gradients, if the mode keeps them where they arrive."""
    if mode.optimizer == "replicate" and _may_alias(flat, flat.reduce_dtype):
        shard = flat.shard
        allocated = collectives.allocate(shard.numel(), dtype=shard.dtype, device=shard.device, reduced=True)
        flat.whole_gradient = allocated.zero_()


def _put_in_place(piece: _Piece, sharded: nn.Parameter, terms: Terms) -> nn.Parameter:
    """Let whoever holds the parameter, an optimizer made before sharding say, hold this rank's part from now on; of a
    DTensor, which cannot become a plain tensor, the modules alone. Attributes of the parameter stay.

    Raises:
        EngineError: somebody holds on to the parameter's memory.
    """
    parameter = piece.member.parameter
    if piece.form is None or whole_of(sharded) is not None:
        sharded.__dict__.update(parameter.__dict__ if piece.form is None else piece.form.shown)
    if isinstance(parameter, DTensor):
        for module, attribute in piece.holders:
            module._parameters[attribute] = sharded
        kept = sharded
    else:
        try:
            torch.utils.swap_tensors(parameter, sharded)
        except RuntimeError as error:
            raise EngineError(
                f"parameter '{piece.name}' cannot be put in place: a weak reference to it exists, or a live graph "
                "(a kept output, torch.nn.utils.weight_norm); delete those, use "
                f"torch.nn.utils.parametrizations, or shard before the first forward ({error})"
            ) from error
        kept = parameter
    if (whole := whole_of(kept)) is not None and (kept.is_floating_point() or kept.is_complex()):
        trained = kept.requires_grad
        rescale = terms.rescale_of_split if whole.divided else terms.rescale
        kept.requires_grad_().register_hook(AsPart(whole, rescale))  # hooks ask for it
        kept.requires_grad_(trained)
    return kept


def _parts_of(
    piece: _Piece, place: ParameterLayout, layout: UnitLayout, split: Split | None, terms: Terms, master: Master
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes a local part of this rank's elements; where they are all elements, a view of the true shape, unless
    ranks outside of the mesh have other elements.
    """
    bounds = [min(max(r * layout.shard_numel - place.offset, 0), place.numel) for r in range(layout.world_size + 1)]
    shape = torch.Size(place.shape) if split is None else split.shape
    inner = isinstance(piece.form, Packed) and not piece.form.whole
    whole = Whole(place.name, shape, tuple(pairwise(bounds)), terms.collectives, split, terms.mesh, master, inner)
    if terms.collectives.world_size == 1 and not (whole.divided or terms.partial):
        return lambda elements: elements.view(place.shape)
    return lambda elements: LocalPart(elements, whole)


def _listed(holders: tuple[tuple[nn.Module, str], ...]) -> tuple[tuple[list[Any], int], ...]:
    """Where a recurrent module keeps the parameter besides its attribute: in a list, and in weak references, which go.

    They serve to notice other weights; the list's entries are exchanged whenever the attributes are.
    """
    found = []
    for module, attribute in holders:
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights)
            found.append((module._flat_weights, module._flat_weights_names.index(attribute)))
    return tuple(found)


def _may_alias(flat: FlatParameter, dtype: torch.dtype) -> bool:
    """Whether a whole shard can serve as the unsharded buffer of ``dtype``."""
    return flat.shard.dtype == dtype and not flat.offloaded
