"""Optimizers over a sharded model: clipping with one collective, raised versions, errors for unsupported optimizers.

Parameters, gradients and state are local parts (:mod:`refshard.engine.local_part`), so that elementwise optimizers,
``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` work unchanged.
"""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from refshard.engine.collectives import Axis, Collectives
from refshard.engine.local_part import LocalPart, gatherable, gradient_of, local_of, whole_of
from refshard.engine.reductions import local_powers, whole_norms
from refshard.engine.unit import UNSHARDED_IN
from refshard.engine.whole import by_axis
from refshard.engine.whole_tensors import WholeTensors
from refshard.errors import EngineError

WHOLE_TENSOR_OPTIMIZERS = frozenset(
    {
        "Adafactor",
        "DistributedShampoo",
        "GaLoreAdamW",
        "LBFGS",
        "Muon",
        "SOAP",
        "Shampoo",
    }
)
"""Class names of optimizers that need more than a norm of the rest of a tensor to update an element."""

PLAIN_TENSOR_PACKAGES = frozenset({"bitsandbytes", "torchao"})
"""Packages with optimizers that address the memory of their tensors themselves."""

_MARK = "_refshard_sharded"


def clip_gradients(
    parameters: Sequence[torch.Tensor],
    ignored: Sequence[torch.Tensor],
    collectives: Collectives,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` and ``ignored`` in place so that their total norm is at most ``max_norm``.

    Each rank has the gradients of ``ignored`` whole, and maybe others than the next rank. They are counted by the mean
    of their powers over ranks (for p = inf, the maximum over the shard axis), so that all ranks scale alike.

    One all-reduce over the shard axis, one more for parameters that tensor parallelism has split, and one over the
    replicate axis for ``ignored``; the padding of flat parameters takes no part. Returns the total norm before
    clipping, a 0-d tensor. ``norm_type`` is any p > 0, and may be infinite.

    Raises:
        EngineError: ``max_norm`` or ``norm_type`` is not positive.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise EngineError(f"clip_grad_norm_: {name} must be > 0, got {value}")
    gradients = [gradient_of(p) for p in parameters if p.grad is not None]
    if not gradients and not ignored:
        return torch.zeros(())
    parts = [local_of(gradient) for gradient in gradients]
    wholes = [whole_of(gradient) for gradient in gradients]
    powers: dict[Axis | None, list[torch.Tensor]] = {
        axis: [_power([parts[i] for i in members], norm_type)] for axis, members in by_axis(wholes).items()
    }
    if ignored:
        own = collectives.mean_over_replicas(_power([_own_gradient(p) for p in ignored], norm_type))
        own = own if norm_type == math.inf else own / collectives.world_size
        powers.setdefault(collectives, []).append(own.to(parts[0].device if parts else own.device))
    norms = [whole_norms(_joined(torch.cat(found), norm_type), norm_type, axis) for axis, found in powers.items()]
    norm = torch.linalg.vector_norm(torch.cat(norms), norm_type) if len(norms) > 1 else norms[0][0]
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if parts:
        torch._foreach_mul_(parts, factor)
    for parameter in ignored:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
    return norm


def _power(parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Their sum of ``|x|**p``, or largest ``|x|``, 1-D of one element."""
    return _joined(local_powers(parts, norm_type), norm_type)


def _joined(powers: torch.Tensor, norm_type: float) -> torch.Tensor:
    return powers.amax(0, keepdim=True) if norm_type == math.inf else powers.sum(0, keepdim=True)


def _own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that is not sharded, whole; nothing if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class _Elements(nn.Parameter):
    """This rank's elements of a part as a plain 1-D parameter; its gradient is the part's, read and written through."""

    _part: nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's elements of the part's gradient."""
        return None if self._part.grad is None else local_of(gradient_of(self._part))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        whole = whole_of(self._part)
        assert whole is not None
        self._part.grad = None if value is None else LocalPart(value, whole)


def local_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """This rank's elements of each parameter of a sharded model, as plain 1-D parameters over the same memory.

    Use it for elementwise optimizers that only take plain tensors, such as those of bitsandbytes and torchao.
    :mod:`refshard.checkpoint` cannot save optimizer state whose shapes differ from those of the parameters.
    A parameter that is not sharded is returned unchanged.
    """
    made: list[nn.Parameter] = []
    for parameter in parameters:
        if whole_of(parameter) is not None:
            elements = _Elements(local_of(parameter).detach(), requires_grad=parameter.requires_grad)
            elements._part = parameter
            setattr(elements, _MARK, getattr(parameter, _MARK))
            made.append(elements)
        else:
            made.append(parameter)
    return made


class Forwards(Protocol):
    """What knows of a model's forwards: whether the last one, which had gradients enabled, still waits for one."""

    unanswered: bool


def watch_optimizers(parameters: Sequence[torch.Tensor], forwards: Forwards) -> None:
    """From now on refuse a step over ``parameters`` by an optimizer that needs whole tensors, or if gradients have gone
    elsewhere. Every other optimizer's step raises their version: fused ones write unseen by autograd, and the engine
    would not gather again.
    """
    _register_once()
    for parameter in parameters:
        setattr(parameter, _MARK, weakref.ref(forwards))


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_prepare)
    register_optimizer_step_post_hook(_raise_versions)


def _watched(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, _MARK))


def _raise_versions(optimizer: torch.optim.Optimizer, *_: object) -> None:
    increment_version(local_of(getattr(p, "_part", p)) for p in _watched(optimizer))


def _prepare(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Before a step: refuse an optimizer that needs whole tensors; make parts of what was given as a whole."""
    _check_own(optimizer)
    _check_answered(optimizer)
    parts = [p for p in _watched(optimizer) if isinstance(p, LocalPart)]
    if not parts or isinstance(optimizer, WholeTensors):
        return
    if type(optimizer).__module__.partition(".")[0] in PLAIN_TENSOR_PACKAGES:
        raise EngineError(
            f"{type(optimizer).__name__} takes plain tensors only; build it over "
            "refshard.local_parameters(model.parameters())"
        )
    name, kinds = type(optimizer).__name__, {kind.__name__ for kind in type(optimizer).__mro__}
    if "LBFGS" in kinds:
        raise EngineError(
            f"{name} needs whole tensors, and all of them together, while a sharded model's parameters are local parts "
            "of them; use another optimizer (AdamW, Adam, SGD, ...)"
        )
    if kinds & WHOLE_TENSOR_OPTIMIZERS:
        raise EngineError(
            f"{name} needs whole tensors, and a sharded model's parameters are local parts of them; build it as "
            f"refshard.whole_tensors({name}, model, parameters, **options)"
        )
    for part in parts:
        if part.grad is not None:
            gradient_of(part)
    if not hasattr(optimizer, _MARK):
        setattr(optimizer, _MARK, True)
        optimizer.register_state_dict_post_hook(_show_gatherable)
        optimizer.register_load_state_dict_post_hook(_take_state)
        _take_state(optimizer)


def _take_state(optimizer: torch.optim.Optimizer) -> None:
    """Make parts of state that was loaded for whole tensors, or by torch's state-dict functions."""
    for part in _watched(optimizer):
        if isinstance(part, LocalPart):
            state = optimizer.state.get(part, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and type(value) is not LocalPart:
                    state[key] = _as_part(value, part)


def _check_own(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, UNSHARDED_IN):
                raise EngineError(
                    f"{type(optimizer).__name__} was built over the gathered parameters of unit "
                    f"'{getattr(parameter, UNSHARDED_IN)}', during a forward or after an interrupted one; build it "
                    "between steps, when model.parameters() yields this rank's parts"
                )


def _check_answered(optimizer: torch.optim.Optimizer) -> None:
    if any(p.grad is not None for p in _watched(optimizer)):
        return
    for forwards in {getattr(p, _MARK) for p in _watched(optimizer)}:
        if (found := forwards()) is not None and found.unanswered:
            raise EngineError(
                f"{type(optimizer).__name__} found no gradients since the sharded model's last forward: "
                "backward(inputs=...) and torch.autograd.grad do not reach sharded parameters; call backward() without "
                "inputs, or run forwards that are not trained under torch.no_grad()"
            )


def _as_part(value: torch.Tensor, part: LocalPart) -> torch.Tensor:
    """Optimizer state that was loaded for the whole, or from a state dict, as the part's."""
    whole = whole_of(value)
    if whole is not None:
        return LocalPart(local_of(value), whole)
    if isinstance(value, DTensor):  # replicated, by torch's set_optimizer_state_dict
        value = value.full_tensor()
    if value.dim() and value.shape == part.shape:
        return LocalPart(part._whole.cut(value).clone(), part._whole)
    return value


def _show_gatherable(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict as torch's state-dict functions can gather it."""
    state = {p: {k: gatherable(v) for k, v in of_p.items()} for p, of_p in state_dict["state"].items()}
    return {**state_dict, "state": state}
