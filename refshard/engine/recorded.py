"""Operators on local parts that autograd records, as in a loss that reads a sharded model's parameters.

Each rank computes with its own elements, and a reduction joins them. Two things would make that wrong in silence:

- A number or a plain tensor goes in that differs by rank. What goes in is therefore summed up in a *digest*, and a
  reduction compares the ranks' digests.
- A rank weighs the result of a reduction by something of its own. The gradient that comes back then differs by rank,
  and is therefore averaged, as the gradients of a unit are.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from refshard.engine.whole import Whole
from refshard.errors import EngineError

_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def recorded(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """What an operator returns to autograd: a part that knows its digest, or a reduction's :class:`GlobalValue`.

    Raises:
        EngineError: something other than parts has a gradient, or differs between ranks.
    """
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = [tensor for tensor in tensors if _is_part(tensor)]
    if not any(part.requires_grad for part in parts):
        return result
    whole: Whole = parts[0]._whole  # type: ignore[attr-defined]
    plain = [tensor for tensor in tensors if not _is_part(tensor)]
    if any(tensor.requires_grad for tensor in plain):
        raise EngineError(
            f"{name} of {whole.label} and a plain tensor that requires a gradient: this rank holds {whole.held}, and "
            "would leave the other elements out of that gradient; call full_tensor() first"
        )
    numbers = [leaf for leaf in leaves if isinstance(leaf, bool | int | float | complex)]
    digests = [getattr(part, "_digest", 0) for part in parts]
    digest = zlib.crc32(repr((name, numbers, digests, [_fingerprint(tensor) for tensor in plain])).encode())
    return tree_map_only(torch.Tensor, lambda made: _with_digest(name, made, digest, whole), result)


def check_alike(name: str, part: torch.Tensor, whole: Whole) -> None:
    """Check that every rank has computed ``part`` with the same numbers and plain tensors; a collective call.

    Raises:
        EngineError: one has not.
    """
    digest = getattr(part, "_digest", 0)
    if digest and not whole.collectives.agree(digest):
        raise EngineError(
            f"{name} of a tensor computed from {whole.label} with numbers or plain tensors that differ between ranks: "
            f"each rank would apply its own values to its part (here {whole.held}); compute from "
            "full_tensor() instead"
        )


class GlobalValue(torch.Tensor):
    """The result of a reduction, the same on all ranks, until it is used; what is computed from it is plain.

    Autograd has yet to give it its history when it is made, so the first use gives it its hook.
    """

    _of: Whole
    _hooked: bool = False

    def plain(self) -> torch.Tensor:
        """The value; its gradient will be averaged over ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad and not self._hooked:
                self._hooked = True
                self.register_hook(self._of.mean_over_ranks)  # type: ignore[no-untyped-call]
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the plain value."""
        args, kwargs = tree_map_only(GlobalValue, GlobalValue.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_part(tensor: torch.Tensor) -> bool:
    return isinstance(getattr(tensor, "_whole", None), Whole)


def _with_digest(name: str, made: Any, digest: int, whole: Whole) -> torch.Tensor:
    made._digest = digest
    if not _is_part(made):
        check_alike(name, made, whole)
        made = made.as_subclass(GlobalValue)
        made._of = whole
    found: torch.Tensor = made
    return found


def _fingerprint(tensor: torch.Tensor) -> int:
    """A number that differs where the tensor's bits differ, with near certainty."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    real = torch.view_as_real(whole) if whole.is_complex() else whole
    words = real.contiguous().view(-1).view(_WORDS[real.itemsize])
    return sum((i + 1) * found for i, found in enumerate(_sums(words)))


def _sums(words: torch.Tensor) -> Iterator[int]:
    for chunk in words.split(_CHUNK):
        wide = chunk.to(torch.int64)
        places = torch.arange(1, len(chunk) + 1, device=chunk.device)
        yield int((wide * places).sum().item()) * 31 + int(wide.sum().item())
