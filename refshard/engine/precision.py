"""Mixed precision: the dtypes of compute, of gradient reductions and of masters."""

from dataclasses import dataclass
from typing import Any

import torch

from refshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of mixed precision.

    ``parameters`` is the dtype of gathers, forward and backward; None keeps the model's dtype, without casts.
    ``reduction`` is the dtype in which gradients are summed over ranks (and over microbatches, if they accumulate
    unsharded); None uses the masters' dtype. The masters that the optimizer updates, and their gradients, keep the
    dtype that the model had before sharding, usually fp32.

    Floating-point outputs of the model's forward are cast to ``output``; None does not cast them. With
    ``cast_inputs=False``, inputs of units are not cast to the dtype of compute.

    Frozen parameters have no master; only their cast is kept. Parameters in float8 are not cast.

    Raises:
        SpecError: a dtype is not a floating-point dtype.
    """

    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("parameters", "reduction", "output"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise SpecError(
                    f"precision: {field} must be a floating-point dtype such as torch.bfloat16, got {dtype}"
                )

    def of_parameters(self) -> "Precision":
        """The fields that must be equal for parameters of one flat parameter."""
        return Precision(parameters=self.parameters, reduction=self.reduction)

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of the model's ``dtype`` is gathered and computed."""
        casts = dtype.is_floating_point and dtype.itemsize > 1  # no float8
        return self.parameters if self.parameters is not None and casts else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of the model's ``dtype`` are reduced."""
        return self.reduction or dtype

    def cast_input(self, leaf: Any) -> Any:
        """A unit's input, cast to the dtype of its parameters."""
        return _cast(leaf, self.parameters if self.cast_inputs else None)

    def cast_output(self, leaf: Any) -> Any:
        """An output of the model's forward, cast to ``output``."""
        return _cast(leaf, self.output)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(dtype)
