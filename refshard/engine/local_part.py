"""Local parts: this rank's elements of a sharded tensor, under the whole tensor's shape.

Parameters, gradients and optimizer state of a sharded model are local parts. An operator on one is right for the whole
tensor, or raises; no result is that of the part alone.

- Elementwise operators run on the parts. A plain tensor that can be expanded to the whole's shape is the whole: each
  rank takes its own elements of it. Random ones (``normal_``, dropout) draw on each rank for its own elements.
- Reductions over all elements are collective, and return plain tensors (:mod:`refshard.engine.reductions`).
- Reshapes that keep the order of the elements return parts of the reshaped whole, over the same memory.
- Everything else raises an :class:`~refshard.errors.EngineError` that says what to call.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import _foreach_supported_types as _optimizers_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types

from refshard.engine import reductions
from refshard.engine.recorded import check_alike, recorded
from refshard.engine.whole import Whole
from refshard.errors import EngineError

Operator = Any
"""A ``torch._ops.OpOverload``."""
Handler = Callable[[Operator, Sequence[Any], dict[str, Any]], Any]


class _Part(torch.Tensor):
    """What :class:`LocalPart` and :class:`GatherablePart` have in common."""

    _local_tensor: torch.Tensor
    _whole: Whole

    def to_local(self) -> torch.Tensor:
        """This rank's elements, a plain 1-D tensor over the same memory, without a gradient."""
        if self._whole.master is not None:
            self._whole.master.hand_out(self._local_tensor)
        return self._local_tensor.detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole, a plain tensor; a collective call of all ranks that hold a part.

        Differentiable: the gradient of the whole is reduced over all ranks as the engine reduces gradients, and each
        rank's part of that is what the part gets.
        """
        gather: Callable[[torch.Tensor], torch.Tensor] = _Gather.apply
        return gather(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, range and this rank's values; no collective."""
        local = self._local_tensor.detach()
        kind = f"{'Parameter ' if hasattr(self, '_is_param') else ''}{type(self).__name__}"
        return f"{kind}({self._whole.label}, {self._whole.held}: {local!r})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A file of one rank's part would pass for the whole.

        Raises:
            EngineError: always; ``pickle`` and ``torch.save`` come here.
        """
        raise EngineError(
            f"{self._whole.label} cannot be pickled or saved by torch.save: this rank holds {self._whole.held}; save "
            "with torch.distributed.checkpoint.save or refshard.checkpoint.save, or torch.save what "
            "refshard.checkpoint.full_state_dict(model) returns on rank 0"
        )

    def _no_elements(self, *_: object, **__: object) -> NoReturn:
        """A part has no memory that others could read as the whole's.

        Raises:
            EngineError: always; ``tolist``, ``numpy``, DLPack and the like come here.
        """
        raise EngineError(
            f"{self._whole.label} cannot be handed out as a list or array: this rank holds {self._whole.held}; call "
            "full_tensor() for the whole, or to_local() for this rank's elements"
        )

    tolist = numpy = __array__ = __dlpack__ = _no_elements

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """For torch.distributed.checkpoint: one item for each box that this rank holds.

        Raises:
            EngineError: other ranks have another tensor of the same name.
        """
        if self._whole.master is not None:
            self._whole.master.check_known(self._whole.name, self._whole.split)
        if self._whole.inner and not fqn.endswith(self._whole.name):
            raise EngineError(
                f"'{fqn}' cannot be saved by itself: its parameter consists of several tensors, of which this is "
                f"'{self._whole.name}'; save with refshard.checkpoint.save, or leave frozen parameters out"
            )
        properties = TensorProperties(dtype=self._local_tensor.dtype)
        chunks = self.__create_chunk_list__()
        if 0 in self._whole.shape:  # no element and so no box; yet a reader must find the name and the shape
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(self._whole.shape)), self._whole.shape)]
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._whole.shape),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For torch.distributed.checkpoint: the boxes of the whole that this rank holds."""
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b, _ in self._whole.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """For torch.distributed.checkpoint: the box at ``index``, a view that is read or written in place."""
        local = self._local_tensor.detach()
        for box, first in self._whole.boxes():
            if box.offsets == tuple(index.offset or ()):
                return local[first : first + box.numel].view(box.sizes)
        return local.view(self._whole.shape)  # of a tensor without elements

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A part of its own of a tensor that is divided in the same way, without a gradient, as of any parameter."""
        make: Any = type(self)
        copied: torch.Tensor = make(self._local_tensor.detach().clone(), self._whole)
        if hasattr(self, "_is_param"):
            copied = nn.Parameter(copied, self.requires_grad)
        ours = ("_local_tensor", "_whole", "_spec")
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ours})
        memo[id(self)] = copied
        return copied


class LocalPart(_Part):
    """This rank's part of a sharded tensor. Shape, ``ndim`` and ``numel()`` are the whole's.

    ``nn.Parameter(part)`` is a parameter of this class. See the module for what operators do.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["LocalPart"], local: torch.Tensor, whole: Whole) -> "LocalPart":
        """``local`` holds this rank's elements of ``whole``, 1-D and plain; it is shared, not copied."""
        made: LocalPart = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=local.dtype, device=local.device)
        made._local_tensor = local
        made._whole = whole
        return made

    def __init__(self, *_: object) -> None:
        """See ``__new__``."""

    @property
    def data(self) -> "LocalPart":
        """The part without its history. A write through it counts as one to the part, and is seen by the engine."""
        made: Any = self.detach()
        part: LocalPart = made
        return part

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Only for itself, as in ``p.data = p.data.contiguous()``.

        Raises:
            EngineError: other memory is given.
        """
        if not (isinstance(value, LocalPart) and value._local_tensor is self._local_tensor):
            raise EngineError(
                f"{self._whole.label}: .data cannot be replaced, since the engine would not see it; copy values in "
                "place with .copy_()"
            )

    def __tensor_flatten__(self) -> tuple[list[str], Whole]:
        """For torch.compile: the inner tensor, and what does not change."""
        return ["_local_tensor"], self._whole

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], whole: Whole, *_: object) -> "LocalPart":
        """For torch.compile: see :meth:`__tensor_flatten__`."""
        return LocalPart(inner["_local_tensor"], whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; see the module."""
        result = _HANDLERS[func](func, args, kwargs or {})
        return recorded(_name(func), args, kwargs or {}, result) if torch.is_grad_enabled() else result


class UnreducedPart(LocalPart):
    """Stands for the gradient of a part that has not been reduced over ranks yet, and has no elements. It can be
    cleared; anything else raises.
    """

    cleared: bool

    @staticmethod
    def __new__(cls: type["UnreducedPart"], local: torch.Tensor, whole: Whole) -> "UnreducedPart":
        """See :meth:`LocalPart.__new__`; only the dtype and device of ``local`` count."""
        made: UnreducedPart = torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=local.dtype, device=local.device
        )
        made._local_tensor, made._whole, made.cleared = local.new_empty(0), whole, False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Clear it, among others in a list; or raise."""
        if func._schema.name not in ("aten::zero_", "aten::_foreach_zero_"):
            part = next(p for p in _flat(args) if isinstance(p, UnreducedPart))
            raise EngineError(
                f"{func._schema.name.removeprefix('aten::')} of the gradient of {part._whole.label}, which is not "
                "reduced over ranks yet; run a backward outside no_sync first, or clear it"
            )
        for gradient in _flat(args):
            if isinstance(gradient, UnreducedPart):
                gradient.cleared = True
            else:
                gradient.zero_()
        return args[0] if func._schema.name == "aten::zero_" else None


def _flat(args: Sequence[Any]) -> list[Any]:
    return [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]


class GatherablePart(_Part, DTensor):
    """A local part in a state dict. Torch's state-dict functions gather a value to the whole only if it is a DTensor.

    It has the operators of a :class:`LocalPart`; ``redistribute`` to replicated placements always gathers. Parameters
    are not of this class, because those functions then would distribute a whole state dict by DTensor's rules when they
    load it, while a plain part takes its elements of the whole in ``copy_``.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["GatherablePart"], local: torch.Tensor, whole: Whole) -> "GatherablePart":
        """See :meth:`LocalPart.__new__`; ``whole`` must know its mesh."""
        assert whole.mesh is not None
        stride = torch.empty(whole.shape, device="meta").stride()
        spec = DTensorSpec(
            whole.mesh, (Replicate(),) * whole.mesh.ndim, tensor_meta=TensorMeta(whole.shape, stride, local.dtype)
        )
        # An empty tensor, and so no offset: torch's staging takes an offset for a sign of memory of its own.
        made: GatherablePart = torch.Tensor._dtensor__new__(cls, local.new_empty(0), spec, requires_grad=False)
        made._local_tensor = local
        made._whole = whole
        return made

    def __init__(self, *_: object) -> None:
        """See ``__new__``."""

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        """The whole, replicated; a collective call."""
        mesh = self._spec.mesh
        return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    def to_local(self, **_: Any) -> LocalPart:
        """The part as a parameter holds it, over the same memory: under the whole's shape, as torch's functions expect
        where nothing is sharded, so that they can copy a whole into it. Its own ``to_local()`` has the elements.
        """
        return LocalPart(self._local_tensor.detach(), self._whole)

    full_tensor = _Part.full_tensor  # type: ignore[assignment]
    __torch_dispatch__ = LocalPart.__torch_dispatch__


_PARTS = frozenset({LocalPart, GatherablePart})
for _types in (_optimizers_foreach_types, _foreach_types):  # as DTensor does for itself
    if LocalPart not in _types:
        _types.append(LocalPart)  # type: ignore[arg-type]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, plain: all of it, unless it is a part."""
    return getattr(tensor, "_local_tensor", tensor) if type(tensor) in _PARTS else tensor


def whole_of(tensor: torch.Tensor) -> Whole | None:
    """What a tensor is a part of; None if it is plain."""
    return getattr(tensor, "_whole", None) if type(tensor) in _PARTS else None


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that has one. One of the whole that was assigned to a part is cut to a part first."""
    gradient, whole = parameter.grad, whole_of(parameter)
    assert gradient is not None
    if whole is not None and whole_of(gradient) is None:
        gradient = parameter.grad = LocalPart(whole.cut(gradient).clone(), whole)
    return gradient


def gatherable(value: Any) -> Any:
    """A part as torch's state-dict functions gather it, where there are process groups; anything else as it is."""
    if type(value) is LocalPart and value._whole.mesh is not None and not value._whole.inner:
        return GatherablePart(value._local_tensor, value._whole)
    return value


class AsPart:
    """A hook for the gradient that comes to a part itself, of a penalty on weights say.

    What autograd's formulas give as a plain tensor (of a sum) becomes a part. It counts as the mean over ranks, and is
    multiplied with ``rescale`` as other means are.
    """

    def __init__(self, whole: Whole, rescale: float) -> None:
        self._whole, self._rescale = whole, rescale

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """The part of ``gradient``."""
        if type(gradient) not in _PARTS:
            gradient = LocalPart(self._whole.cut(gradient).clone(), self._whole)
        return gradient if self._rescale == 1 else gradient * self._rescale


class _Gather(torch.autograd.Function):
    """From a part to the whole, and from the whole's gradient to the part of its mean over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Any) -> torch.Tensor:
        """The whole."""
        ctx.whole = part._whole
        check_alike("full_tensor", part, part._whole)
        whole: torch.Tensor = part._whole.gather(part._local_tensor.detach())
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> LocalPart:
        """The part of the mean gradient."""
        whole: Whole = ctx.whole
        return LocalPart(whole.mean_part(gradients[0]), whole)


def _refused(func: Operator, whole: Whole, why: str = "") -> EngineError:
    name = func._schema.name.removeprefix("aten::")
    return EngineError(
        f"{name} of {whole.label}: this rank holds {whole.held}{why}; call full_tensor() for the whole, or to_local() "
        "for this rank's elements; a module's method that reads its weights outside of forward needs "
        "refshard.register_forward_method"
    )


def _plain_operand(func: Operator, tensor: torch.Tensor, whole: Whole) -> torch.Tensor:
    """What of a plain tensor, or of a DTensor, which is gathered, goes with a part in an elementwise operator."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    shape = tensor.shape
    if shape == whole.shape:
        return whole.cut(tensor)
    if len(shape) <= len(whole.shape) and tensor.numel() == 1:
        return tensor.reshape(1) if shape else tensor
    if len(shape) > len(whole.shape) or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(whole.shape))):
        raise _refused(func, whole, f", and a plain tensor of shape {list(shape)} cannot be expanded to the whole's")
    return whole.cut(tensor)


def _writes_of(func: Operator) -> tuple[tuple[int, ...], frozenset[str]]:
    """Positions and names of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(i for i, _ in written), frozenset(a.name for _, a in written)


def _elementwise(func: Operator) -> Handler:
    """Run an operator on the parts. Everything that can be known beforehand is: this is an optimizer's inner loop."""
    if any("Tensor[]" in str(a.type) or "List[Tensor]" in str(a.type) for a in func._schema.arguments):
        return _elementwise_lists(func)
    call = func._op
    positions, names = _writes_of(func)
    makes = func._schema.name.endswith("_like") or func._schema.name in ("aten::clone", "aten::_to_copy")
    draws = torch.Tag.nondeterministic_seeded in func.tags

    def run(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        whole: Whole | None = None
        plain = False
        locals_: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is LocalPart or kind is GatherablePart:
                if whole is None:
                    whole = value._whole
                elif whole is not value._whole and not whole.alike(value._whole):
                    raise _other(func, whole, value._whole)
                locals_.append(value._local_tensor)
            else:
                plain = plain or isinstance(value, torch.Tensor)
                locals_.append(value)
        given = kwargs
        if kwargs:
            kwargs, whole = _keywords(func, kwargs, whole, names)
            if makes:
                kwargs.pop("memory_format", None)
        assert whole is not None
        if plain:
            _take_plain(func, args, locals_, whole, positions)
        if draws and whole.collectives.replicas > 1:
            raise _refused(func, whole, ", and each replica would draw other numbers for them")
        result = call(*locals_, **kwargs)
        if not names:
            return LocalPart(result, whole) if type(result) is torch.Tensor else _wrapped(result, whole)
        torch._C._increment_version(
            [locals_[i] for i in positions if i < len(args)] + [v for k, v in kwargs.items() if k in names]
        )
        return args[0] if 0 in positions else next(v for k, v in given.items() if k in names)

    return run


def _take_plain(
    func: Operator, args: Sequence[Any], locals_: list[Any], whole: Whole, positions: tuple[int, ...]
) -> None:
    """Replace plain operands by what goes with the part."""
    plain = {i: value for i, value in enumerate(args) if isinstance(value, torch.Tensor) and type(value) not in _PARTS}
    alone = not any(type(value) in _PARTS for value in args)  # the part is what ``out=`` names; torch would resize it
    if alone and torch.broadcast_shapes(*(value.shape for value in plain.values())) != whole.shape:
        raise _refused(func, whole, ", to which a result of another shape cannot be written")
    for index, value in plain.items():
        if index in positions:
            raise _foreign_target(func, whole)
        locals_[index] = _plain_operand(func, value, whole)


def _keywords(
    func: Operator, kwargs: dict[str, Any], whole: Whole | None, written: frozenset[str]
) -> tuple[dict[str, Any], Whole | None]:
    """Local tensors of keyword arguments, and what they are parts of."""
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return dict(kwargs), whole
    for value in tensors.values():
        if (other := whole_of(value)) is not None:
            if whole is not None and not whole.alike(other):
                raise _other(func, whole, other)
            whole = whole or other
    assert whole is not None
    found = dict(kwargs)
    for name, value in tensors.items():
        if whole_of(value) is None and name in written:
            raise _foreign_target(func, whole)
        found[name] = local_of(value) if whole_of(value) is not None else _plain_operand(func, value, whole)
    return found, whole


def _other(func: Operator, whole: Whole, other: Whole) -> EngineError:
    return _refused(func, whole, f", but {other.held} of {other.label}")


def _foreign_target(func: Operator, whole: Whole) -> EngineError:
    return _refused(func, whole, ", which cannot be written into a plain tensor")


def _wrapped(result: Any, whole: Whole) -> Any:
    if isinstance(result, torch.Tensor):
        return LocalPart(result, whole)
    if isinstance(result, tuple | list):
        return type(result)(_wrapped(value, whole) for value in result)
    return result


def _elementwise_lists(func: Operator) -> Handler:
    """Foreach and fused operators: what stands at one place of each list goes together. Places may be plain."""
    call = func._op
    positions, names = _writes_of(func)
    steps = next((i for i, a in enumerate(func._schema.arguments) if a.name == "state_steps"), -1)  # which stay plain

    def run(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        wholes = _wholes_of_lists(func, (*args, *kwargs.values()))
        written: list[torch.Tensor] = []
        locals_ = [
            value if i == steps else _local_list(func, value, wholes, written if i in positions else None)
            for i, value in enumerate(args)
        ]
        kwargs = {k: _local_list(func, v, wholes, written if k in names else None) for k, v in kwargs.items()}
        result = call(*locals_, **kwargs)
        if names:
            torch._C._increment_version(written)
            return result
        return [LocalPart(v, whole) if whole is not None else v for v, whole in zip(result, wholes)]

    return run


def _wholes_of_lists(func: Operator, values: Sequence[Any]) -> list[Whole | None]:
    """By place in the lists, what the parts there are parts of; None where all are plain."""
    wholes: list[Whole | None] = []
    for value in values:
        if not isinstance(value, list | tuple) or not value:
            if isinstance(value, torch.Tensor) and (whole := whole_of(value)) is not None:
                raise _refused(func, whole)
            continue
        mine = [member._whole if type(member) in _PARTS else None for member in value]
        if mine == wholes:  # as almost always
            continue
        wholes += [None] * (len(mine) - len(wholes))
        for place, (known, other) in enumerate(zip(wholes, mine)):
            if known is None:
                wholes[place] = other
            elif other is not None and not known.alike(other):
                raise _other(func, known, other)
    return wholes


def _local_list(func: Operator, value: Any, wholes: Sequence[Whole | None], written: list[torch.Tensor] | None) -> Any:
    """The members of a list as they are on this rank; added to ``written`` if the operator writes to them."""
    if not isinstance(value, list | tuple):
        return value
    kinds = set(map(type, value))
    if kinds == {LocalPart}:
        found = [member._local_tensor for member in value]
    else:
        found = [
            member
            if whole is None or not isinstance(member, torch.Tensor)
            else _local_member(func, member, whole, written is not None)
            for member, whole in zip(value, wholes)
        ]
    if written is not None:
        written += found
    return found


def _local_member(func: Operator, member: torch.Tensor, whole: Whole, written: bool) -> torch.Tensor:
    if type(member) in _PARTS:
        return local_of(member)
    if written:
        raise _foreign_target(func, whole)
    return _plain_operand(func, member, whole)


def _named(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{a.name: v for a, v in zip(func._schema.arguments, args)}, **kwargs}


def _reduction(func: Operator) -> Handler:
    """A reduction over all dimensions; one over some of them is refused."""
    reduce = reductions.REDUCTIONS[_name(func)]

    def run(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = _named(func, args, kwargs)
        part = given["self"]
        if type(part) not in _PARTS or any(isinstance(v, torch.Tensor) for k, v in given.items() if k != "self"):
            raise _refused(func, _any_whole(args, kwargs))
        whole: Whole = part._whole
        ndim = len(whole.shape)
        dims: Any = given.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        chosen = {d % ndim for d in dims} if dims and ndim else set(range(ndim))
        none = dims == [] and _name(func) in ("all", "any")
        if none or not all(d in chosen or whole.shape[d] == 1 for d in range(ndim)):
            raise _refused(func, whole, f", and cannot be reduced over dimensions {dims} alone")
        result = reduce(part._local_tensor, whole, given)
        shape = [1 if d in chosen else n for d, n in enumerate(whole.shape) if d not in chosen or given.get("keepdim")]
        return result.reshape(shape) if shape else result

    return run


def _any_whole(args: Sequence[Any], kwargs: dict[str, Any]) -> Whole:
    for value in (*args, *kwargs.values()):
        for member in value if isinstance(value, list | tuple) else (value,):
            if type(member) in _PARTS:
                whole: Whole = member._whole
                return whole
    raise AssertionError("an operator without a part")


def _refuse(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise _refused(func, _any_whole(args, kwargs))


def _decompose(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that autograd takes apart, except in inference mode."""
    return func.decompose(*args, **kwargs)


def _reshape(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A reshape that keeps the order of the elements."""
    part = args[0]
    made = func(torch.empty(part._whole.shape, device="meta"), *args[1:], **kwargs)
    if not made.is_contiguous() or made.numel() != part.numel():
        raise _refused(func, part._whole)
    return _alias(part, part._whole.reshaped(made.shape))


def _same(_: Operator, args: Sequence[Any], __: dict[str, Any]) -> Any:
    """``detach`` and the like: the same inner tensor, so that writes raise the version that the engine watches."""
    return _alias(args[0], args[0]._whole)


def _alias(part: Any, whole: Whole) -> Any:
    """A view of a normal tensor is a normal one in inference mode too: autograd will have them share a version."""
    if part.is_inference() or not torch.is_inference_mode_enabled():
        return type(part)(part._local_tensor, whole)
    with torch.inference_mode(False):
        return type(part)(part._local_tensor, whole)


def _expand(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    part, size = args[0], args[1]
    if tuple(size) not in (tuple(part.shape), (-1,) * part.dim()):
        raise _refused(func, part._whole)
    return _same(func, args, kwargs)


def _new(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and the like: a part if it is as large as the whole, else a plain tensor."""
    part, size, *rest = args
    local, whole = part._local_tensor, part._whole
    empty = _name(func) in ("new_empty", "new_empty_strided")
    if tuple(size) == tuple(whole.shape) and (empty or size):
        rest = rest[1:] if _name(func) == "new_empty_strided" else rest
        make = getattr(local, _name(func).removesuffix("_strided"))
        kept = {k: v for k, v in kwargs.items() if v is not None}
        return type(part)(make((local.numel(),), *rest, **kept), whole)
    return func(local, size, *rest, **kwargs)


def _index_put(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``part[mask] = value`` for a mask of the whole's shape and one value; no other assignment."""
    part, indices, value = args[:3]
    if type(part) not in _PARTS or len(indices) != 1 or value.numel() != 1 or type(value) in _PARTS:
        raise _refused(func, _any_whole(args, kwargs))
    (mask,) = indices
    if mask.dtype is not torch.bool or mask.shape != part.shape or len(args) > 3:
        raise _refused(func, part._whole)
    elements, chosen, _ = _pair(func, (part, mask))
    elements.masked_fill_(chosen, value.reshape(()))
    torch._C._increment_version([elements])
    return part


def _foreach_norm(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = _named(func, args, kwargs)
    tensors = given["self"]
    return reductions.foreach_norms(
        [local_of(t) for t in tensors], [whole_of(t) for t in tensors], float(given.get("ord", 2)), given.get("dtype")
    )


def _unscale(func: Operator, args: Sequence[Any], _: dict[str, Any]) -> None:
    tensors, found_inf, inv_scale = args
    if whole := whole_of(found_inf) or whole_of(inv_scale):
        raise _refused(func, whole)
    parts = [local_of(t) for t in tensors]
    reductions.unscale(parts, [whole_of(t) for t in tensors], found_inf, inv_scale)
    torch._C._increment_version(parts)


def _pair(func: Operator, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, Whole]:
    """Two tensors of equal wholes, as they are on this rank."""
    whole = _any_whole(args, {})
    if any(whole_of(t) is not None and not whole.alike(t._whole) for t in args[:2]):
        raise _refused(func, whole)
    one, two = (local_of(t) if whole_of(t) else _plain_operand(func, t, whole) for t in args[:2])
    return one, two, whole


def _dot(func: Operator, args: Sequence[Any], _: dict[str, Any]) -> Any:
    return reductions.dot(*_pair(func, args), conjugate=_name(func) == "vdot")


def _equal(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """``torch.equal`` and ``torch.allclose``, which differs in that it expands and takes tolerances."""
    if _name(func) == "equal" and args[0].shape != args[1].shape:
        return False
    one, two, whole = _pair(func, args)
    return reductions.agreed(func(one, two, *args[2:], **kwargs), whole, one.device)


def _item(func: Operator, args: Sequence[Any], _: dict[str, Any]) -> Any:
    part = args[0]
    if part._whole.shape.numel() != 1:
        raise _refused(func, part._whole)
    return reductions.item(part._local_tensor, part._whole)


def _view_as_real(func: Operator, args: Sequence[Any], _: dict[str, Any]) -> Any:
    part = args[0]
    whole: Whole = part._whole
    if whole.divided:
        raise _refused(func, whole)
    if whole.pairs is None:
        ranges = tuple((2 * start, 2 * stop) for start, stop in whole.ranges)
        shape = torch.Size([*whole.shape, 2])
        whole.pairs = Whole(whole.name, shape, ranges, whole.collectives, None, whole.mesh, whole.master)
    return LocalPart(torch.view_as_real(part._local_tensor).view(-1), whole.pairs)


def _local_only(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What asks about memory: this rank's."""
    return func(local_of(args[0]), *args[1:], **kwargs)


_ELEMENTWISE = frozenset(
    {
        "bernoulli", "bernoulli_", "cauchy_", "_conj", "_conj_physical", "copy_", "empty_like", "exponential_",
        "fill", "fill_", "fma", "full_like", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_",
        "geometric_", "isclose", "lift_fresh", "log_normal_", "masked_fill_", "native_dropout", "normal_",
        "ones_like", "_pin_memory", "rand_like", "randint_like", "randn_like", "random_", "resolve_conj",
        "resolve_neg", "_to_copy", "uniform_", "zero", "zero_", "zeros_like"
    }
)  # fmt: skip
"""Operators that are elementwise, and that torch does not tag as pointwise."""
_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "squeeze", "_reshape_alias"), _reshape),
    **dict.fromkeys(("detach", "alias"), _same),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"), _new),
    **dict.fromkeys(("is_pinned", "record_stream"), _local_only),
    **dict.fromkeys(("dot", "vdot"), _dot),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_max": _refuse,
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "allclose": _equal,
    "equal": _equal,
    "expand": _expand,
    "index_put_": _index_put,
    "view_as_real": _view_as_real,
}


class _Handlers(dict[Operator, Handler]):
    """What runs each operator; found when one comes for the first time."""

    def __missing__(self, func: Operator) -> Handler:
        handler = self[func] = _handler_of(func)
        return handler


_HANDLERS = _Handlers()


def _name(func: Operator) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _is_elementwise(func: Operator) -> bool:
    """Whether torch tags an operator as pointwise, or, for one on lists, an overload of that on single tensors."""
    name = _name(func)
    single = name.removeprefix("_foreach_").removesuffix("_")
    if single == name.removesuffix("_"):
        return torch.Tag.pointwise in func.tags or name in _ELEMENTWISE
    packets = [getattr(torch.ops.aten, found, None) for found in (single, f"{single}_")]
    overloads = [getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()]
    return any(map(_is_elementwise, overloads))


def _handler_of(func: Operator) -> Handler:
    """What runs an operator on parts."""
    name, arguments = _name(func), func._schema.arguments
    tensors, writes_out = sum("Tensor" in str(a.type) for a in arguments), any(a.is_out for a in arguments)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    handler: Handler = _decompose if composite else _refuse
    if writes_out or func.namespace == "prims" or func is torch.ops.aten.view.dtype:
        handler = _elementwise(func) if _is_elementwise(func) and not name.startswith("_foreach_") else handler
    elif func.namespace == "aten" and name in _BY_NAME:
        handler = _BY_NAME[name]
    elif func.namespace == "aten" and name in reductions.REDUCTIONS and tensors == 1:
        handler = _reduction(func) if len(func._schema.returns) == 1 else _refuse
    elif func.namespace == "aten" and _is_elementwise(func):
        handler = _elementwise(func)
    return handler
