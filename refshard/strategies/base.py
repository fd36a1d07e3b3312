"""What a strategy is: one way to spread a model over ranks, and the proof that it did."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Workload


class Strategy(ABC):
    """Wraps one model. A subclass is final: strategies share code by composition.

    ``wrap`` is called once; the other methods speak of what it wrapped.
    """

    @abstractmethod
    def wrap(self, model: Llama, group: dist.ProcessGroup) -> nn.Module:
        """Spread ``model`` over the ranks of ``group`` and return the module to train."""

    @abstractmethod
    def wrapped_units(self) -> tuple[str, ...]:
        """Names of the units as found on the wrapped model, not as asked for."""

    @abstractmethod
    def microbatch(self, workload: Workload, *, last: bool) -> AbstractContextManager[None]:
        """What one microbatch's forward, and in training its backward, runs in; ``last`` is true for a step's last one.

        Raises:
            UnsupportedError: the strategy cannot do this workload, or cannot accumulate.
        """

    @abstractmethod
    def announced(self, workload: Workload, microbatches: int) -> tuple[CollectiveCount, ...]:
        """Collectives of one step of ``microbatches`` in closed form, as this backend's trace must show them.

        Called after at least two steps of this kind, and tells of any step but the first.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name in the bare model and its full value; all ranks iterate to the end."""


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A unit of a peer that pads each parameter's first dimension to a multiple of the world size."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int

    def nbytes(self, world_size: int) -> int:
        """Bytes of the unit's gathered, padded parameters."""
        padded = 0
        for first, *rest in self.shapes:
            numel = -(-first // world_size) * world_size
            for size in rest:
                numel *= size
            padded += numel
        return padded * self.element_bytes


def count_collectives(issued: Iterable[tuple[str, int]], *, times: int = 1) -> tuple[CollectiveCount, ...]:
    """Sum ``(op, bytes)`` pairs by op, sorted; ``times`` over, for as many microbatches."""
    counts, sizes = Counter[str](), Counter[str]()
    for op, nbytes in issued:
        counts[op] += 1
        sizes[op] += nbytes
    return tuple(CollectiveCount(op=op, count=times * counts[op], bytes=times * sizes[op]) for op in sorted(counts))


def mesh_of(group: dist.ProcessGroup, model: nn.Module) -> DeviceMesh:
    """A 1-D device mesh over ``group``, on the model's device type."""
    return DeviceMesh.from_group(group, next(model.parameters()).device.type)
