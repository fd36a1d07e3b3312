"""The interface of a strategy: one way to spread a model over ranks, and the proof that it did."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from refshard.models.data import Batch
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.world import World


class Loop(ABC):
    """What :meth:`Strategy.wrap` returns: a wrapped model with its optimizer, to be stepped."""

    @abstractmethod
    def train(self, batch: Batch) -> torch.Tensor:
        """Take one optimizer step on this rank's batch, and return its mean loss, scalar fp32.

        Raises:
            UnsupportedError: the strategy cannot train this case.
        """

    @abstractmethod
    def infer(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of this rank's batch, without gradients.

        Raises:
            UnsupportedError: the strategy cannot run forward alone.
        """


class Strategy(ABC):
    """Wraps one model. A subclass is final: strategies share code by composition.

    ``wrap`` is called once; the other methods describe the wrapped model.
    """

    @abstractmethod
    def wrap(self, model: Llama, world: World) -> Loop:
        """Spread ``model`` over the ranks of ``world`` and return its loop. A strategy that has the axis "own model" in
        its row takes any module.

        Raises:
            UnsupportedError: it cannot do that here; the message quotes the peer's own error, if there was one.
        """

    @abstractmethod
    def wrapped_units(self) -> tuple[str, ...]:
        """Names of the units as found on the wrapped model, not as requested."""

    @abstractmethod
    def announced(self) -> tuple[CollectiveCount, ...]:
        """Collectives of one step in closed form, as this backend's trace must show them.

        Called after at least two steps; the first step may differ.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name in the bare model and its full value; all ranks iterate to the end."""


def count_collectives(issued: Iterable[tuple[str, int]], *, times: int = 1) -> tuple[CollectiveCount, ...]:
    """Sum ``(op, bytes)`` pairs by op, sorted; ``times`` over, for as many microbatches."""
    counts, sizes = Counter[str](), Counter[str]()
    for op, nbytes in issued:
        counts[op] += 1
        sizes[op] += nbytes
    return tuple(CollectiveCount(op=op, count=times * counts[op], bytes=times * sizes[op]) for op in sorted(counts))
