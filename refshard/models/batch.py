"""One rank's share of a step's batch, and how a model's loss on it is computed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from torch import Tensor, nn

from refshard.models.llama import next_token_loss


class Batch(ABC):
    """Some sequences, on the device of the model."""

    @abstractmethod
    def loss(self, module: nn.Module) -> Tensor:
        """The mean loss over these sequences, a scalar; ``module`` is the model in whatever it is wrapped."""

    @abstractmethod
    def split(self, parts: int) -> Sequence[Self]:
        """The same sequences as microbatches of one size; their number is a multiple of ``parts``."""


@final
@dataclass(frozen=True, slots=True)
class Tokens(Batch):
    """Inputs and next-token targets of a Llama, each (B, T) int64."""

    inputs: Tensor
    targets: Tensor

    def loss(self, module: nn.Module) -> Tensor:
        """See :meth:`Batch.loss`: mean cross entropy, fp32."""
        return next_token_loss(module(self.inputs), self.targets)

    def split(self, parts: int) -> Sequence[Self]:
        """See :meth:`Batch.split`."""
        return [type(self)(*both) for both in zip(self.inputs.chunk(parts), self.targets.chunk(parts))]
