"""Parameters of tensor subclasses: taken apart to be gathered, and put together again over what was gathered.

- A frozen one computes with packed data: quantised weights and their scales. Its tensors are gathered as they are
  (:class:`Packed`).
- One with the hooks of torch's FSDP2, such as float8, chooses what is gathered of its master (:class:`Extended`). It
  may be trained.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from refshard.engine.precision import Precision
from refshard.engine.transforms import unwrapped
from refshard.errors import EngineError

Tensors = Mapping[str, torch.Tensor]
"""Plain tensors by name: that of the parameter, or one that begins with it for each tensor within."""


def address(tensor: torch.Tensor) -> int:
    """Where a tensor lies; a wrapper, such as a DTensor, a pending collective or that of a ``torch.func`` transform,
    lies where the one within does.
    """
    inner: Any = unwrapped(tensor)
    while _wraps(inner):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    found: int = inner.data_ptr()
    return found


def check_class(name: str, parameter: nn.Parameter) -> None:
    """Check that a parameter can be taken apart and put together again.

    Raises:
        EngineError: it is of a class that cannot.
    """
    kind = type(parameter).__name__
    if isinstance(parameter, DTensor):
        if not _is_plain(parameter._local_tensor):
            raise EngineError(
                f"parameter '{name}' is split by tensor parallelism and of {type(parameter._local_tensor).__name__}, "
                "and cannot be sharded as both; leave one out"
            )
        return
    if _is_plain(parameter) or _extends(parameter):
        return
    if parameter.requires_grad:
        raise EngineError(
            f"parameter '{name}' must be a plain nn.Parameter to be trained, got {kind}: flattening would drop the "
            "subclass, unless it wraps one tensor of its shape and dtype and defines fsdp_pre_all_gather and "
            "fsdp_post_all_gather; freeze it, or shard the model before converting it"
        )
    if parameter.is_meta or is_lazy(parameter):
        raise EngineError(f"parameter '{name}' ({kind}) has no values yet; quantise it before refshard.shard")
    opaque = type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if opaque and not _wraps(parameter):
        raise EngineError(
            f"parameter '{name}' is of {kind}, which does not tell what it consists of; define __tensor_flatten__ and "
            "__tensor_unflatten__, or name it in refshard.shard(ignored=...)"
        )
    for inner, tensor in tensors_in(name, parameter).items():
        if not tensor.is_contiguous():
            raise EngineError(f"parameter '{name}' ({kind}): '{inner}' is not contiguous; quantise a contiguous weight")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


def _wraps(tensor: Any) -> bool:
    """Whether a tensor tells which tensors it consists of."""
    return is_traceable_wrapper_subclass(tensor)


def _extends(parameter: Any) -> bool:
    """Whether it defines the hooks of FSDP2, over one tensor that stands for all of it."""
    if not (_wraps(parameter) and all(hasattr(parameter, f"fsdp_{when}_all_gather") for when in ("pre", "post"))):
        return False
    inner = [getattr(parameter, key) for key in parameter.__tensor_flatten__()[0]]
    return [(t.shape, t.dtype, _is_plain(t)) for t in inner] == [(parameter.shape, parameter.dtype, True)]


def tensors_in(name: str, parameter: Any) -> dict[str, torch.Tensor]:
    """What a parameter called ``name`` consists of on this rank."""
    if isinstance(parameter, DTensor):
        return {name: parameter.to_local().detach()}
    if _wraps(parameter):
        inner = {f"{name}.{key}": getattr(parameter, key) for key in parameter.__tensor_flatten__()[0]}
        return {n: t for key, value in inner.items() for n, t in tensors_in(key, value).items()}
    with torch._C.DisableTorchFunctionSubclass():
        return {name: parameter.detach().as_subclass(torch.Tensor)}


def _builder(name: str, parameter: Any) -> Callable[[Tensors], Any]:
    """The inverse of :func:`tensors_in`. It keeps nothing of the parameter's memory."""
    kind: Any = type(parameter)
    if not _wraps(parameter):
        if _is_plain(parameter):
            return lambda tensors: tensors[name]
        return lambda tensors: torch.Tensor._make_subclass(kind, tensors[name], False)
    keys, context = parameter.__tensor_flatten__()
    inner = {key: _builder(f"{name}.{key}", getattr(parameter, key)) for key in keys}
    shape, stride = parameter.shape, parameter.stride()
    return lambda tensors: kind.__tensor_unflatten__(
        {key: build(tensors) for key, build in inner.items()}, context, shape, stride
    )


def emptied(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A parameter of the same class on ``device``, without values."""
    if _is_plain(parameter) or isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device)
    tensors = {name: torch.empty_like(t, device=device) for name, t in tensors_in("", parameter).items()}
    made: torch.Tensor = _builder("", parameter)(tensors)
    return made


def form_of(
    name: str, parameter: nn.Parameter, precision: Precision, mesh: DeviceMesh | None, module: nn.Module
) -> "Packed | Extended | None":
    """How a parameter that :func:`check_class` accepts is gathered; None if it is plain or a DTensor."""
    if _is_plain(parameter) or isinstance(parameter, DTensor):
        return None
    if _extends(parameter):
        return Extended(name, parameter, precision, mesh, module)
    return Packed(name, parameter)


@final
class Packed:
    """A frozen parameter: its tensors, which are gathered as they are, and the class that computes with them.

    ``suffixes`` are, by the tensors' names, what these have after the parameter's own; it is empty for a parameter that
    is itself its one tensor. ``attributes`` are those that do not lie in the tensors, such as a quantiser's state: each
    rank has them whole. ``shown`` are those of a part.
    """

    dtype = None

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name = name
        self._build = _builder(name, parameter)
        tensors = tensors_in(name, parameter)
        self.suffixes = {found: found.removeprefix(name) for found in tensors}
        own = vars(self._build(tensors))
        given = {key: value for key, value in vars(parameter).items() if key not in own}
        data = address(parameter) if self.whole else None
        self._aliases = [k for k, v in given.items() if isinstance(v, torch.Tensor) and v.data_ptr() == data]
        self.attributes = {key: None if key in self._aliases else value for key, value in given.items()}
        # Torch's state-dict functions look up properties of the class, for names such as 'weight.absmax'.
        computed = {k for k, v in inspect.getmembers_static(type(parameter)) if isinstance(v, property)}
        found = {k: getattr(parameter, k) for k in computed - {*dir(nn.Parameter)} if hasattr(parameter, k)}
        self.shown = found | self.attributes
        self._bound: torch.Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether the parameter is itself its one tensor."""
        return self.name in self.suffixes

    def over(self, tensors: Tensors) -> nn.Parameter:
        """The parameter over these tensors."""
        made = self._build(tensors)
        made._is_param = True  # as nn.Parameter() does, which would detach it, and not all classes can
        self._take_attributes(made, tensors)
        parameter: nn.Parameter = made
        return parameter

    def _take_attributes(self, made: torch.Tensor, tensors: Tensors) -> None:
        """Give ``made`` the attributes; of records copies, since a forward may change them together with the data."""
        vars(made).update({k: copy.copy(v) if _is_record(v) else v for k, v in self.attributes.items()})
        vars(made).update(dict.fromkeys(self._aliases, tensors[self.name]) if self._aliases else {})

    def bind(self, views: Tensors, *, trained: bool) -> nn.Parameter:
        """The parameter over a slot, from which it is to be computed with."""
        assert not trained
        self._bound = views[self.name] if self.whole else None
        return self.over(views)

    def ready(self, unsharded: nn.Parameter) -> None:
        """A pass computes with it next. Undo what an earlier one did to the object: bitsandbytes packs weights anew to
        evaluate on some CPUs, and could not train with them.
        """
        if self._bound is not None and unsharded.data_ptr() != self._bound.data_ptr():
            unsharded.data = self._bound
            self._take_attributes(unsharded, {self.name: self._bound})

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Suffixes and values of all tensors among the attributes."""
        return _tensors_among("", self.attributes, set())


def _is_record(value: object) -> bool:
    """Whether it is an object that holds others, and no module."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)


def _tensors_among(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        found = (
            dict(enumerate(value)) if isinstance(value, list | tuple) else vars(value) if _is_record(value) else value
        )
        for key, within in found.items() if isinstance(found, dict) else ():
            yield from _tensors_among(f"{name}.{key}", within, seen)


@final
class Extended:
    """A parameter whose class says what to gather of it, by FSDP2's hooks.

    Before a gather, ``fsdp_pre_all_gather`` is called on this rank's elements of the master, in the class, and returns
    as many elements of ``dtype``, and metadata: float8, and a scale that it reduces over the mesh. After the gather,
    ``fsdp_post_all_gather`` makes the parameter of both; later it updates that.
    """

    def __init__(
        self, name: str, parameter: torch.Tensor, precision: Precision, mesh: DeviceMesh | None, module: nn.Module
    ) -> None:
        kind: Any = type(parameter)
        (key,), context = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
        self._wrap: Any = lambda part: kind.__tensor_unflatten__({key: part}, context, part.shape, part.stride())
        self.name, self._what = name, f"parameter '{name}' ({kind.__name__})"
        self._param_dtype = precision.parameters or parameter.dtype
        probe = torch.zeros(64, dtype=parameter.dtype, device=parameter.device)
        self._alike = self._wrap(probe)
        self._given = self._arguments(parameter, precision, mesh, module)
        self.suffixes, self._packed = {name: ""}, False
        self.shown = {k: v for k, v in vars(parameter).items() if k not in vars(self._alike)}
        gathered, self._metadata = self._gathered(probe)
        self.dtype: torch.dtype = gathered.dtype
        _, kept = self._post(gathered)
        if any(t.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr() for t in kept):
            raise EngineError(
                f"{self._what}: its fsdp_post_all_gather allocates tensors, which the engine would not free; return "
                "one over what was gathered"
            )

    def _arguments(
        self, parameter: torch.Tensor, precision: Precision, mesh: DeviceMesh | None, module: nn.Module
    ) -> tuple[Any, ...]:
        """What the first hook is called with: the shard axis, and for those of the newer form also the whole's size and
        stride, the module and the precision.
        """
        axis = mesh
        if mesh is not None and mesh.ndim > 1:
            axis = DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
        if len(inspect.signature(self._alike.fsdp_pre_all_gather).parameters) == 1:
            return (axis,)
        from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes long to import

        policy = MixedPrecisionPolicy(param_dtype=precision.parameters, reduce_dtype=precision.reduction)
        return axis, parameter.shape, parameter.stride(), module, policy

    def _gathered(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to gather of elements of the master, and the metadata."""
        given = self._wrap(part if part.numel() else part.new_zeros(1))  # a maximum of nothing would raise
        try:
            with torch.inference_mode(False), torch.no_grad():
                tensors, metadata = given.fsdp_pre_all_gather(*self._given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise EngineError(
                f"{self._what}: its fsdp_pre_all_gather failed, given this rank's {part.numel()} elements as a 1-D "
                f"tensor: {error}"
            ) from error
        if [t.numel() for t in tensors] != [given.numel()]:
            raise EngineError(
                f"{self._what}: its fsdp_pre_all_gather must return one tensor with an element for each, got "
                f"{[tuple(t.shape) for t in tensors]} for {given.numel()} elements; shard before converting the model"
            )
        return tensors[0].reshape(-1), metadata

    def _post(self, gathered: torch.Tensor, **out: nn.Parameter) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return self._alike.fsdp_post_all_gather((gathered,), self._metadata, self._param_dtype, **out)

    def pack(self, part: torch.Tensor, place: torch.Tensor) -> None:
        """Write to ``place`` what to gather of this rank's ``part`` of the master. All ranks call it: hooks reduce."""
        gathered, self._metadata = self._gathered(part.to(place.device, non_blocking=True))
        self._packed = True
        if part.numel():
            place.copy_(gathered)

    def bind(self, views: Tensors, *, trained: bool) -> nn.Parameter:
        """The parameter over a slot, which need not have storage yet."""
        (self._view,) = views.values()
        return nn.Parameter(self._post(self._view)[0], requires_grad=trained)

    def ready(self, unsharded: nn.Parameter) -> None:
        """A pass computes with it next: update it after a gather."""
        if self._packed:
            self._packed = False
            self._post(self._view, out=unsharded)
