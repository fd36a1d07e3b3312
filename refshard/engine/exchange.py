"""Whole tensors for a moment: from every rank's part to the tensor's owner, and from there back to the parts.

The ranks hold consecutive ranges of a flat parameter. So what arrives at an owner, in the order of the ranks, is the
whole tensors that it owns, end to end, and nothing is copied. That is why gradients and parameters travel in two
all-to-alls, which are issued together: in one, those of each rank would follow each other.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from refshard.engine.collectives import Collectives, Pending, Together, named
from refshard.engine.labels import label
from refshard.engine.local_part import gradient_of, local_of
from refshard.engine.whole import Whole

ALIGNMENT = 64
"""Bytes. Matrix products may take other instructions, and round otherwise, where a matrix starts elsewhere."""


@dataclass(slots=True, eq=False)
class Owned:
    """A parameter that its owner alone steps, in ``group`` of the optimizer's groups.

    ``tensor`` is the parameter as the owner's optimizer knows it, of the whole shape: it has values and a gradient
    within a step, and is one NaN, expanded, at any other time. A ``parameter`` that is not sharded (``whole`` is None)
    is itself ``tensor``, and every rank is its owner.
    """

    parameter: nn.Parameter
    whole: Whole | None
    group: int
    owner: int
    tensor: nn.Parameter
    nothing: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """``nothing`` is what ``tensor`` is made of between steps."""
        self.nothing = self.tensor.data

    @property
    def present(self) -> bool:
        """Whether it has a gradient, and so takes part in a step."""
        return self.parameter.grad is not None

    def length(self, rank: int) -> int:
        """Elements that a rank holds."""
        assert self.whole is not None
        start, stop = self.whole.ranges[rank]
        return stop - start


def stand_in(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape, dtype and ``requires_grad`` without memory for its elements, which are NaN."""
    number = math.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    one = torch.full((), number, dtype=parameter.dtype, device=device)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


@final
class Exchange:
    """What travels for the ``members`` of one flat parameter of a ``unit``, which are in the order of their places.

    A step calls :meth:`bring`, :meth:`arrive`, :meth:`send_back` and :meth:`land`, in this order, on every rank. Only
    members that have a gradient take part; all ranks must agree on which these are.
    """

    def __init__(self, unit: str, members: Sequence[Owned], collectives: Collectives, device: torch.device) -> None:
        self._unit = unit
        self._members = tuple(members)
        self._collectives = collectives
        self._device = device
        self._present: list[Owned] = []
        self._going: list[Owned] = []
        self._mine: list[Owned] = []
        self._sent: list[int] = []
        self._received: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._pending: Pending = Together(())

    def bring(self) -> None:
        """Issue what brings the owners whole gradients and parameters."""
        present = [m for m in self._members if m.present]
        if present != self._present:  # as in the first step, and rarely again
            self._plan(present)
        self._tensors = []
        if not present:
            return
        with label("all_to_all", self._unit), self._named():
            gradients = torch.cat([local_of(gradient_of(m.parameter)) for m in self._going])
            parameters = torch.cat([local_of(m.parameter) for m in self._going])
            works = tuple(self._send(t.to(self._device), self._received, self._sent) for t in (gradients, parameters))
        self._pending = Together(works)

    def _plan(self, present: list[Owned]) -> None:
        """How much this rank sends to each owner, and receives from each rank of what it owns itself."""
        rank, ranks = self._collectives.rank, range(self._collectives.world_size)
        self._present, self._going = present, sorted(present, key=lambda m: m.owner)
        self._mine = [m for m in present if m.owner == rank]
        self._sent = [0 for _ in ranks]
        for member in present:
            self._sent[member.owner] += member.length(rank)
        self._received = [sum(m.length(source) for m in self._mine) for source in ranks]

    def arrive(self) -> None:
        """Await them, and give each tensor that this rank owns its values and its gradient."""
        if not self._going:
            return
        self._wait()
        gradients, parameters = self._tensors
        for member, place in self._places():
            member.tensor.data = _aligned(parameters[place], member.parameter.shape)
            member.tensor.grad = _aligned(gradients[place], member.parameter.shape)

    def send_back(self) -> None:
        """Issue what brings every rank its parts of the tensors, which have been stepped, and let go of them here."""
        if not self._going:
            return
        _, parameters = self._tensors
        for member, place in self._places():
            stepped, there = member.tensor.detach().reshape(-1), parameters[place]
            if stepped.data_ptr() != there.data_ptr():
                there.copy_(stepped)
            member.tensor.data, member.tensor.grad = member.nothing, None
        self._tensors = []
        with label("all_to_all", self._unit), self._named():
            self._pending = self._send(parameters, self._sent, self._received)

    def land(self) -> None:
        """Await it, and write to the parts."""
        if not self._going:
            return
        self._wait()
        (arrived,), self._tensors = self._tensors, []
        parts = [local_of(m.parameter) for m in self._going]
        with label("copy_out", self._unit):
            torch._foreach_copy_(parts, list(arrived.split([part.numel() for part in parts])))

    def _send(self, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        output = given.new_empty(sum(received))
        self._tensors.append(output)
        return self._collectives.all_to_all(output, given, received, sent)

    def _wait(self) -> None:
        with label("wait", self._unit), self._named():
            self._pending.wait()
        self._pending = Together(())

    def _places(self) -> Iterator[tuple[Owned, slice]]:
        """This rank's own members, and where each lies in what arrives here."""
        start = 0
        for member in self._mine:
            stop = start + member.parameter.numel()
            yield member, slice(start, stop)
            start = stop

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            what = f"all_to_all of whole tensors of unit '{self._unit}'"
            raise named(error, what, self._collectives.world_rank) from error


def _aligned(elements: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The elements in this shape: a view, or a copy where they do not start on :data:`ALIGNMENT`."""
    return (elements if elements.data_ptr() % ALIGNMENT == 0 else elements.clone()).view(shape)
