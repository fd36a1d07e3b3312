"""What an optimizer sees of a sharded model: gradients whose norms are those of the whole, and refusals by name.

Elementwise optimizers work on this rank's parts as they are. A *norm* taken of a part would be the part's, silently:
sharded gradients therefore answer it over the shard axis, so that ``torch.nn.utils.clip_grad_norm_`` and
``torch.amp.GradScaler`` are right as they stand. :func:`clip_gradients` does the former with a single collective.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from refshard.engine.collectives import Collectives
from refshard.errors import EngineError

WHOLE_TENSOR_OPTIMIZERS = frozenset(
    {
        "Adafactor",
        "DistributedShampoo",
        "GaLoreAdamW",
        "LAMB",
        "LARS",
        "LBFGS",
        "Lamb",
        "Lars",
        "Muon",
        "SOAP",
        "Shampoo",
    }
)
"""Class names of optimizers whose update of an element depends on the rest of its tensor."""

_MARK = "_refshard_sharded"


class Axis(Protocol):
    """The ranks that have the other parts of a gradient."""

    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Replace the small ``tensor`` by its sum or maximum over them, synchronously."""


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient, 1-D. Norms are those of the whole gradient, and collective calls: all ranks of
    the shard axis take them together. The same holds for a gradient scaler's search for infinities. Anything else,
    ``abs().max()`` say, sees the local part.
    """

    collectives: Axis

    @classmethod
    def of(cls, part: torch.Tensor, collectives: Axis) -> "ShardedGradient":
        """A view of ``part`` that knows its shard axis."""
        gradient = part.as_subclass(cls)
        gradient.collectives = collectives
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer norms for the whole; everything else as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _WHOLE.get(func, func)(*args, **(kwargs or {}))


def clip_gradients(
    parameters: Sequence[torch.Tensor], collectives: Collectives, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` in place so that their total norm is at most ``max_norm``.

    One all-reduce over the shard axis, and one more for parameters that tensor parallelism has split; the padding of
    flat parameters takes no part. Returns the total norm before
    clipping, a 0-d tensor. ``norm_type`` is any p > 0, and may be infinite.

    Raises:
        EngineError: ``max_norm`` or ``norm_type`` is not positive.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise EngineError(f"clip_grad_norm_: {name} must be > 0, got {value}")
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    axes: dict[Axis, list[torch.Tensor]] = {}
    for gradient in gradients:
        axis = gradient.collectives if isinstance(gradient, ShardedGradient) else collectives
        axes.setdefault(axis, []).append(gradient.as_subclass(torch.Tensor))
    norms = [_total_norm(parts, norm_type, axis) for axis, parts in axes.items()]
    norm = torch.linalg.vector_norm(torch.cat(norms), norm_type) if len(norms) > 1 else norms[0][0]
    plain = [part for parts in axes.values() for part in parts]
    torch._foreach_mul_(plain, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _total_norm(parts: Sequence[torch.Tensor], norm_type: float, axis: Axis) -> torch.Tensor:
    """The norm of all that ``parts`` are parts of, 1-D of one element."""
    powers = _local_powers(parts, norm_type)
    total = powers.amax(0, keepdim=True) if norm_type == math.inf else powers.sum(0, keepdim=True)
    return _whole_norms(total, norm_type, axis)


def watch_optimizers(parameters: Sequence[torch.Tensor]) -> None:
    """From now on refuse a step over ``parameters`` by an optimizer that needs whole tensors, and see to it that every
    other optimizer's step raises their version: fused ones write unseen, and the engine would not gather again.
    """
    _register_once()
    for parameter in parameters:
        setattr(parameter, _MARK, True)


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_refuse_whole_tensor_optimizers)
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, *_: object) -> None:
    increment_version(p for g in optimizer.param_groups for p in g["params"] if hasattr(p, _MARK))


def _refuse_whole_tensor_optimizers(optimizer: torch.optim.Optimizer, *_: object) -> None:
    name = type(optimizer).__name__
    if name in WHOLE_TENSOR_OPTIMIZERS and any(hasattr(p, _MARK) for g in optimizer.param_groups for p in g["params"]):
        raise EngineError(
            f"{name} needs whole tensors, and a sharded model's parameters are 1-D parts of them; use an elementwise "
            "optimizer (AdamW, Adam, SGD, ...)"
        )


def _local_powers(parts: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Of each part the sum of ``|x|**p``, or the largest ``|x|`` for p = inf; 0 for an empty one.

    In fp32, or in fp64 where a part is: squares of 16-bit numbers would be rounded to 16 bits.

    Raises:
        EngineError: p is not positive, and the powers of parts do not add up.
    """
    if not p > 0:
        raise EngineError(f"norm of a sharded gradient: p must be > 0, got {p}")
    wide = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    norms = [
        torch.linalg.vector_norm(part, p, dtype=wide) if part.numel() else part.new_zeros((), dtype=wide)
        for part in parts
    ]
    stacked = torch.stack(norms)
    return stacked if p == math.inf else stacked**p


def _whole_norms(powers: torch.Tensor, p: float, collectives: Axis) -> torch.Tensor:
    """Norms of whole tensors from the local powers of their parts; one collective for all."""
    collectives.reduce_over_shards(powers, "max" if p == math.inf else "sum")
    return powers if p == math.inf else powers ** (1 / p)


def _foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2, *_: Any) -> list[torch.Tensor]:  # noqa: A002
    """``torch._foreach_norm`` of gradients, some or all of them sharded: one collective per shard axis."""
    norms: dict[int, torch.Tensor] = {}
    axes = {id(t.collectives): t.collectives for t in tensors if isinstance(t, ShardedGradient)}
    for axis, collectives in axes.items():
        members = [i for i, t in enumerate(tensors) if isinstance(t, ShardedGradient) and id(t.collectives) == axis]
        powers = _local_powers([tensors[i] for i in members], float(ord))
        norms.update(zip(members, _whole_norms(powers, float(ord), collectives)))
    return [norms[i] if i in norms else torch.linalg.vector_norm(t, ord) for i, t in enumerate(tensors)]


def _vector_norm(
    gradient: ShardedGradient,
    ord: float | str | None = 2,  # noqa: A002
    *_: Any,
    p: float | str | None = None,
    **__: Any,
) -> torch.Tensor:
    """The norm of one whole gradient, over all its dimensions: it has but one. Some callers' order is ``p``."""
    chosen = ord if p is None else p
    order = 2.0 if chosen in (None, "fro") else float(chosen)
    return _whole_norms(_local_powers([gradient], order), order, gradient.collectives)[0]


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """A gradient scaler's unscaling: an infinity in one rank's part makes every rank skip the step."""
    plain = [gradient.as_subclass(torch.Tensor) for gradient in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    axes = {id(g.collectives): g.collectives for g in gradients if isinstance(g, ShardedGradient)}
    for collectives in axes.values():
        collectives.reduce_over_shards(found_inf, "max")


_WHOLE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _vector_norm,
    torch.Tensor.norm: _vector_norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
