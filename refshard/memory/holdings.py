"""What a strategy holds around compute, and when it takes and lets go of it: the seam between walk and strategies.

The order is the host's. On CUDA too an allocator counts by it: a tensor is there from the call that makes it to the
call that lets it go, whatever the device has done by then.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from refshard.engine.schedule import Phase
from refshard.estimate.recipe import MASTER_BYTES, Recipe
from refshard.estimate.units import ModelUnit
from refshard.memory.ledger import Ledger
from refshard.quantities import MIB
from refshard.specs.cluster import Library
from refshard.specs.hardware import ELEMENT_BYTES, Dtype

_STEP_BYTES = 4
"""AdamW counts steps in an fp32 number a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all holdings have to know.

    The mesh is ``replicas`` times ``shards`` ranks, side by side; ``rank`` is the place on the shard axis of the one
    that is looked at. Parameters are computed with in ``dtype`` and gradients reduced in ``reduction``.
    """

    recipe: Recipe
    units: tuple[ModelUnit, ...]
    shards: int
    replicas: int
    rank: int
    dtype: Dtype
    reduction: Dtype
    library: Library

    @property
    def element(self) -> int:
        """Bytes of an element of a gathered parameter."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def reduced(self) -> int:
        """Bytes of an element of a gradient as it is reduced."""
        return ELEMENT_BYTES[self.reduction]

    @property
    def gloo(self) -> bool:
        """Whether collectives are gloo's, which takes memory for itself."""
        return self.library == "gloo"


class Holdings(ABC):
    """One strategy's memory beside activations. All methods change the ledger, and are called in the host's order."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self.setting, self.ledger = setting, ledger

    @abstractmethod
    def settle(self) -> None:
        """Take what is held between steps."""

    @abstractmethod
    def open_pass(self, *, first: bool, last: bool) -> None:
        """A microbatch begins, the step's ``first`` or ``last`` one or neither."""

    @abstractmethod
    def begin(self, unit: int, phase: Phase) -> None:
        """A unit is about to compute."""

    @abstractmethod
    def end(self, unit: int, phase: Phase) -> None:
        """A unit has computed; in backward, the gradient of its input is there."""

    @abstractmethod
    def forward_done(self) -> None:
        """The model's forward has returned."""

    @abstractmethod
    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """A weight's gradient has arrived, ``nbytes`` of workspace; ``completes``, it is its unit's last one."""

    @abstractmethod
    def close_pass(self) -> None:
        """The microbatch's backward has ended."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """The optimizer has stepped, and gradients are let go."""


def take_optimizer(ledger: Ledger, numels: list[int]) -> None:
    """AdamW's two moments of each parameter of so many elements here, and its number of steps."""
    for numel in numels:
        for nbytes in (MASTER_BYTES * numel, MASTER_BYTES * numel, _STEP_BYTES):
            ledger.take("optimizer", nbytes)


def numels(unit: ModelUnit) -> list[int]:
    """Elements of each parameter of a unit."""
    return [math.prod(shape) for _, shape in unit.parameters]


def gloo_all_reduce(ledger: Ledger, nbytes: int, ranks: int) -> None:
    """What gloo's ring takes for itself while it sums ``nbytes``: two segments, of 1 MiB at most (gloo's
    ``allreduce.cc``).
    """
    segments = max(2 * ranks, -(-nbytes // MIB))
    ledger.pass_by("workspace", 2 * (-(-nbytes // segments)))


def gloo_reduce_scatter(ledger: Ledger, nbytes: int, ranks: int) -> None:
    """What torch's reduce-scatter over gloo takes: a copy of its input, which is summed whole."""
    ledger.take("workspace", nbytes)
    gloo_all_reduce(ledger, nbytes, ranks)
    ledger.free("workspace", nbytes)
