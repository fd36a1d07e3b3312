"""Reductions over all elements of sharded tensors: each rank reduces its part, and one small collective does the rest.

All ranks that hold a part must call them together. 16-bit numbers are summed in fp32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refshard.engine.collectives import Axis
from refshard.engine.whole import Whole, by_axis, reduce_max
from refshard.errors import EngineError

Arguments = dict[str, Any]
"""An operator's arguments by name."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` are computed in."""
    if dtype.is_complex:
        return torch.complex128 if dtype is torch.complex128 else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return torch.int64


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def local_powers(parts: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """For each plain 1-D part the sum of ``|x|**p``, or the largest ``|x|`` for p = inf; 0 for an empty one.

    In fp32, or in fp64 where a part is: squares of 16-bit numbers would be rounded to 16 bits.

    Raises:
        EngineError: p is not positive, and the powers of parts do not add up.
    """
    if not p > 0:
        raise EngineError(f"norm of a sharded tensor: p must be > 0, got {p}; call full_tensor() first")
    real = torch.float64 if any(_real(part.dtype) is torch.float64 for part in parts) else torch.float32
    norms = [
        torch.linalg.vector_norm(part, p, dtype=wide(part.dtype)).to(real)
        if part.numel()
        else torch.zeros((), dtype=real, device=part.device)
        for part in parts
    ]
    stacked = torch.stack(norms)
    return stacked if p == math.inf else stacked**p


def whole_norms(powers: torch.Tensor, p: float, axis: Axis | None) -> torch.Tensor:
    """Norms of whole tensors from the local powers of their parts; one collective for all, and none for wholes."""
    if axis is None:
        return powers if p == math.inf else powers ** (1 / p)
    if p == math.inf:
        return reduce_max(powers, axis)
    axis.reduce_over_shards(powers, "sum")
    return powers ** (1 / p)


def foreach_norms(
    parts: Sequence[torch.Tensor], wholes: Sequence[Whole | None], p: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of each tensor, some or all of them sharded: one collective per axis."""
    for part, whole in zip(parts, wholes):
        _check_clipped(part, whole)
    norms: dict[int, torch.Tensor] = {}
    for axis, members in by_axis(wholes).items():
        chosen = [parts[i] for i in members]
        if axis is None:
            norms.update(zip(members, torch._foreach_norm(chosen, p, dtype=dtype)))
        else:
            found = whole_norms(local_powers(chosen, p), p, axis)
            norms.update((i, norm.to(dtype or _as_norm(parts[i].dtype))) for i, norm in zip(members, found))
    return [norms[i] for i in range(len(parts))]


def _check_clipped(local: torch.Tensor, whole: Whole | None) -> None:
    """Refuse the norm of a gradient that other ranks do not know of: torch's ``clip_grad_norm_`` would add up others on
    each rank.
    """
    if whole is not None and whole.master is not None and not whole.master.holds(local):
        whole.master.check_known(whole.name, whole.split, "be clipped")


def _as_norm(dtype: torch.dtype) -> torch.dtype:
    return _real(dtype) if dtype.is_complex else dtype


def norm(local: torch.Tensor, whole: Whole, given: Arguments) -> torch.Tensor:
    """``torch.linalg.vector_norm`` over all dimensions."""
    order = given.get("ord", given.get("p"))
    p = 2.0 if order is None else float(order)
    _check_clipped(local, whole)
    found = whole_norms(local_powers([local], p), p, whole.axis)[0]
    return found.to(given.get("dtype") or _as_norm(local.dtype))


def total(local: torch.Tensor, whole: Whole, given: Arguments) -> torch.Tensor:
    """``torch.sum`` over all dimensions."""
    dtype = given.get("dtype")
    found = whole.reduce(local.sum(dtype=wide(dtype or local.dtype)).reshape(1), "sum")[0]
    return found.to(dtype or (local.dtype if local.dtype.is_floating_point or local.dtype.is_complex else found.dtype))


def mean(local: torch.Tensor, whole: Whole, given: Arguments) -> torch.Tensor:
    """``torch.mean`` over all dimensions."""
    dtype = given.get("dtype") or local.dtype
    return (total(local, whole, {"dtype": wide(dtype)}) / whole.shape.numel()).to(dtype)


def variance(local: torch.Tensor, whole: Whole, given: Arguments) -> torch.Tensor:
    """``torch.var`` over all dimensions; two collectives."""
    correction = given.get("correction", given.get("unbiased", True))
    centred = local.to(wide(local.dtype)) - mean(local, whole, {"dtype": wide(local.dtype)})
    squares = whole.reduce(centred.abs().square().sum().reshape(1), "sum")[0]
    count = whole.shape.numel() - (1 if correction is None else float(correction))
    found: torch.Tensor = squares / max(count, 0)
    return found.to(_as_norm(local.dtype))


def deviation(local: torch.Tensor, whole: Whole, given: Arguments) -> torch.Tensor:
    """``torch.std`` over all dimensions; two collectives."""
    return variance(local, whole, given).sqrt()


def largest(local: torch.Tensor, whole: Whole, _: Arguments) -> torch.Tensor:
    """``torch.amax`` over all dimensions."""
    return _extreme(local, whole, 1)


def smallest(local: torch.Tensor, whole: Whole, _: Arguments) -> torch.Tensor:
    """``torch.amin`` over all dimensions."""
    return _extreme(local, whole, -1)


def _extreme(local: torch.Tensor, whole: Whole, sign: int) -> torch.Tensor:
    values = local.to(wide(local.dtype))
    lowest = -math.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    found = (values * sign).amax().reshape(1) if local.numel() else values.new_full((1,), lowest)
    return (reduce_max(found, whole.axis)[0] * sign).to(local.dtype)


def any_of(local: torch.Tensor, whole: Whole, _: Arguments) -> torch.Tensor:
    """``torch.any`` over all dimensions."""
    found = local.any()  # of integers in uint8: uint8
    return whole.reduce(found.reshape(1).to(torch.int64), "max")[0].to(found.dtype)


def all_of(local: torch.Tensor, whole: Whole, _: Arguments) -> torch.Tensor:
    """``torch.all`` over all dimensions."""
    found = local.all()
    return (1 - whole.reduce(1 - found.reshape(1).to(torch.int64), "max")[0]).to(found.dtype)


def count(local: torch.Tensor, whole: Whole, _: Arguments) -> torch.Tensor:
    """``torch.count_nonzero`` over all dimensions."""
    return whole.reduce(local.count_nonzero().reshape(1), "sum")[0]


def dot(local: torch.Tensor, other: torch.Tensor, whole: Whole, *, conjugate: bool) -> torch.Tensor:
    """``torch.dot`` or, with ``conjugate``, ``torch.vdot`` of two parts of equal wholes."""
    left, right = local.to(wide(local.dtype)), other.to(wide(other.dtype))
    product = torch.vdot(left, right) if conjugate else torch.dot(left, right)
    return whole.reduce(product.reshape(1), "sum")[0].to(local.dtype)


def agreed(here: bool, whole: Whole, device: torch.device) -> bool:
    """Whether it is so on every rank that holds a part."""
    return not whole.reduce(torch.tensor([not here], dtype=torch.int64, device=device), "max").item()


def item(local: torch.Tensor, whole: Whole) -> Any:
    """The value of a tensor of one element, which one rank holds."""
    kept = local.to(wide(local.dtype))
    return whole.reduce(kept.sum().reshape(1), "sum").to(local.dtype).item()


def unscale(
    parts: Sequence[torch.Tensor], wholes: Sequence[Whole | None], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """A gradient scaler's unscaling in place: an infinity in one rank's part makes every rank skip the step."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(parts), found_inf, inv_scale)
    for axis in by_axis(wholes):
        if axis is not None:
            axis.reduce_over_shards(found_inf, "max")


REDUCTIONS: dict[str, Callable[[torch.Tensor, Whole, Arguments], torch.Tensor]] = {
    "linalg_vector_norm": norm,
    "norm": norm,
    "sum": total,
    "mean": mean,
    "var": variance,
    "std": deviation,
    "max": largest,
    "amax": largest,
    "min": smallest,
    "amin": smallest,
    "any": any_of,
    "all": all_of,
    "count_nonzero": count,
}
"""By the operator's name; each is given the 1-D local tensor, what it is a part of, and the operator's arguments."""
