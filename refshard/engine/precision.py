"""In which dtypes parameters are computed with, gradients reduced, and masters kept."""

from dataclasses import dataclass
from typing import Any

import torch

from refshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of mixed precision.

    ``parameters`` is the dtype that is gathered and that forward and backward compute in; None keeps the model's own,
    without casts. ``reduction`` is the dtype in which gradients are summed over ranks (and over microbatches, if they
    accumulate unsharded); None uses the masters' dtype. The masters that the optimizer updates, and their gradients,
    keep the model's dtype from before sharding, usually fp32.

    ``output`` is the dtype that floating-point outputs of the model's own forward are cast to; None leaves them as they
    are. With ``cast_inputs=False``, inputs of units are not cast to the dtype that they compute in.

    Frozen parameters have no master; only their cast is kept. Those in float8 are not cast.

    Raises:
        SpecError: a dtype is no floating-point one.
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
        """What of it tells how parameters are kept: those for which it is equal may lie in one flat parameter."""
        return Precision(parameters=self.parameters, reduction=self.reduction)

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """What a parameter of the model's ``dtype`` is gathered and computed in."""
        casts = dtype.is_floating_point and dtype.itemsize > 1  # no float8
        return self.parameters if self.parameters is not None and casts else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of a parameter of the model's ``dtype`` are reduced in."""
        return self.reduction or dtype

    def cast_input(self, leaf: Any) -> Any:
        """What a unit is given, as its parameters meet it."""
        return _cast(leaf, self.parameters if self.cast_inputs else None)

    def cast_output(self, leaf: Any) -> Any:
        """What the model's forward returns, as its caller meets it."""
        return _cast(leaf, self.output)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(dtype)
