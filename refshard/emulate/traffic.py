"""What each collective leaves in this rank's memory, where every other rank is taken to send what this one does.

So a gather fills its output with copies of this rank's part, and a reduction over ranks multiplies what is here. A
reduce-scatter takes this rank's contributions to the other parts for the other ranks' contributions to its own, so it
sums its input's parts: the gather ties the parts of a parameter together, and this is the gradient of what they are
copies of. So it trains a model with equal parts: its losses are finite, but not comparable with other runs.

All bytes are read and written that the real collective reads and writes here. Tensors are written as the real backends
write them, behind autograd's back: no version counter moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

_SPREAD = 0.02
"""Standard deviation of what nobody here can know: as large as weights are."""
_SAME = (ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR)
"""Reductions that leave equal tensors as they are."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a reduction does; ``factor`` is what a sum's terms are multiplied by."""

    kind: ReduceOp.RedOpType
    factor: float = 1.0


def spread(output: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    """Write ``own`` (n elements) to each part of ``output`` (world_size * n elements); it may be one of them."""
    if not own.numel():
        return
    parts, row = output.data.view(-1, own.numel()), own.data.view(-1)
    if parts[rank].data_ptr() != row.data_ptr():
        parts[rank].copy_(row)
    for others in (parts[:rank], parts[rank + 1 :]):
        others.copy_(row.expand_as(others))


def spread_list(outputs: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Write ``own`` to each of ``outputs``."""
    for output in outputs:
        if output.data_ptr() != own.data_ptr():
            output.data.copy_(own.data)


def combine(output: torch.Tensor, given: torch.Tensor | Sequence[torch.Tensor], by: Reduction) -> None:
    """Write to ``output`` (n elements) the reduction of the parts that are ``given`` (world_size times n elements).

    ``output`` may be one of them.
    """
    if not output.numel():
        return
    one = given if isinstance(given, torch.Tensor) else torch.stack([part.data for part in given])
    rows, into = one.data.view(-1, output.numel()), output.data.view(-1)
    if by.kind == ReduceOp.MAX:
        into.copy_(rows.amax(0))
    elif by.kind == ReduceOp.MIN:
        into.copy_(rows.amin(0))
    elif by.kind == ReduceOp.PRODUCT:
        into.copy_(rows.prod(0, dtype=rows.dtype))
    elif by.kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise _unknown(by)
    elif output.untyped_storage().data_ptr() == one.untyped_storage().data_ptr():
        into.copy_(rows.sum(0, dtype=rows.dtype))
    else:
        torch.sum(rows, 0, dtype=rows.dtype, out=into)
    if by.kind == ReduceOp.AVG:
        into.div_(len(rows))
    elif by.factor != 1:
        into.mul_(by.factor)


def multiply(tensor: torch.Tensor, by: Reduction, world_size: int) -> None:
    """Write to ``tensor`` the reduction of ``world_size`` tensors that equal it."""
    if tensor.dtype == torch.bool or by.kind in _SAME:
        touch(tensor)
    elif by.kind == ReduceOp.PRODUCT:
        tensor.data.pow_(world_size)
    elif by.kind == ReduceOp.SUM:
        tensor.data.mul_(world_size * by.factor if by.factor != 1 else world_size)
    else:
        raise _unknown(by)


def _unknown(by: Reduction) -> NotImplementedError:
    return NotImplementedError(f"the emulated backend has no such reduction over ranks: {by.kind.name}; sum, or gather")


def touch(tensor: torch.Tensor) -> None:
    """Read and write every byte, and change none."""
    tensor.data.view(-1).view(torch.uint8).bitwise_or_(0)


def exchange(output: torch.Tensor, given: torch.Tensor) -> None:
    """Fill ``output`` with what this rank sends, over and over where it receives more than that."""
    into, sent = output.data.view(-1), given.data.view(-1)
    if not sent.numel():
        invent(output)
        return
    for start in range(0, into.numel(), sent.numel()):
        part = into[start : start + sent.numel()]
        part.copy_(sent[: part.numel()])


def invent(output: torch.Tensor) -> None:
    """Fill ``output`` where nothing here tells what would arrive: with noise as large as weights are, or with ones."""
    if output.is_floating_point():
        # A generator of its own: the default one is the training's.
        output.data.normal_(std=_SPREAD, generator=torch.Generator(output.device).manual_seed(0))
    else:
        output.data.fill_(1)
