"""What a differentiable reduction over a sharded tensor gives: a plain number, whose gradient is the mean over ranks.

Every rank has the same number, and may multiply it with data of its own. The gradient that comes back is then each
rank's own, too, while each rank has a part of the tensor that it goes on to: it has to be the mean of all ranks', as
the engine averages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from refshard.engine.whole import Whole


class Total(torch.Tensor):
    """The number, until it is used; what is computed from it is plain.

    Autograd has yet to give it its history when it is made, so it gets its hook when a function is called with it.
    """

    _whole: Whole
    _hooked: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, cls) and value.requires_grad and not value._hooked:
                    value._hooked = True
                    value.register_hook(value._whole.mean)  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))


def total(value: torch.Tensor, part: torch.Tensor, whole: Whole) -> torch.Tensor:
    """``value``, which was reduced over all ranks from ``part`` of ``whole``; plain if it needs no gradient."""
    if not (torch.is_grad_enabled() and part.requires_grad):
        return value
    made: Total = torch.Tensor._make_subclass(Total, value)
    made._whole, made._hooked = whole, False
    return made
