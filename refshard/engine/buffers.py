"""Pools of memory, and the slots in them: where unsharded parameters and gradients lie, and who owns them now.

A slot's tensor objects are stable; only their storage comes and goes (with its pool's), and bytes change hands between
slots that overlap. Parameters are views of slots, so that an all-gather lands in place and nothing is copied
out. Autograd's version counters do not see such a refill: :class:`~refshard.engine.unit.Unit` sets them.
"""

from collections.abc import Sequence

import torch

from refshard.engine.arena import Lasting, aligned
from refshard.engine.layout import ParameterLayout
from refshard.errors import EngineError

Sizes = Sequence[tuple[int, torch.dtype]]
"""Elements and dtype of each of a unit's flat buffers."""
Places = Sequence[Sequence[ParameterLayout]]
"""Where the parameters lie in each flat buffer."""


class Pool:
    """One allocation, ``memory``: a 1-D tensor of bytes."""

    __slots__ = ("_lasting", "_nbytes", "memory", "taken")

    def __init__(self, memory: torch.Tensor, lasting: Lasting = "always") -> None:
        self.memory, self._lasting = memory, lasting
        self._nbytes = memory.untyped_storage().nbytes()
        self.taken: list[Slot] = []

    def take(self, slot: "Slot") -> None:
        """Mark a slot as in use, and allocate the storage if it is not there."""
        if self._lasting != "always" and not self.memory.untyped_storage().nbytes():
            self.memory.untyped_storage().resize_(self._nbytes)
        self.taken.append(slot)

    def give(self, slot: "Slot") -> None:
        """Mark it as unused."""
        self.taken.remove(slot)
        if self._lasting == "per use":
            self.rest()

    def rest(self) -> None:
        """Free the storage, unless a slot is in use or it lasts always."""
        if self._lasting != "always" and not self.taken:
            self.memory.untyped_storage().resize_(0)


class Slot:
    """A place in a pool for one unit's flat buffers, made of ``tensors`` there: one for each flat, then any scratch.

    ``flats`` are 1-D tensors, one for each of the unit's flat parameters, and ``views`` those of their parameters, each
    with a version counter of its own. ``scratch`` is what the reduction of each flat may write to. A slot that
    ``accumulates`` takes gradients as they arrive and keeps them from pass to pass. With ``debug``, released content is
    filled with NaN, so that a read after release cannot pass unnoticed.
    """

    __slots__ = ("_begin", "_debug", "_end", "accumulates", "flats", "owner", "pool", "scratch", "views")

    def __init__(
        self, pool: Pool, tensors: Sequence[torch.Tensor], places: Places, *,
        accumulates: bool = False, debug: bool = False,
    ) -> None:  # fmt: skip
        self.pool, self.accumulates = pool, accumulates
        self._debug = debug
        self.owner: str | None = None
        self.lay(tensors, places)

    def lay(self, tensors: Sequence[torch.Tensor], places: Places) -> None:
        """Let the slot from now on be made of these tensors."""
        self.flats = tuple(tensors[: len(places)])
        self.scratch = tuple(tensors[len(places) :]) or (None,) * len(places)
        starts = [tensor.storage_offset() * tensor.itemsize for tensor in tensors]
        self._begin = min(starts, default=0)
        self._end = max((start + tensor.nbytes for start, tensor in zip(starts, tensors)), default=0)
        self.views = [
            [flat[p.offset : p.offset + p.numel].view(p.shape).data for p in places_of_flat]
            for flat, places_of_flat in zip(self.flats, places)
        ]

    def overlaps(self, other: "Slot") -> bool:
        """Whether both have bytes in common."""
        return self.pool is other.pool and self._begin < other._end and other._begin < self._end

    def holds(self, address: int) -> bool:
        """Whether memory at this address is the slot's."""
        return any(flat.data_ptr() <= address < flat.data_ptr() + flat.nbytes for flat in self.flats)

    @property
    def free(self) -> bool:
        """Whether no slot that overlaps this one is in use."""
        return not any(self.overlaps(other) for other in self.pool.taken)

    def acquire(self, owner: str) -> None:
        """Hand the slot to ``owner``.

        Raises:
            EngineError: another owner holds it, or one that it has bytes in common with.
        """
        for other in self.pool.taken:
            if self.overlaps(other):
                raise EngineError(
                    f"unit '{owner}' needs the slot that unit '{other.owner}' still holds; two units that share a slot "
                    "ran nested in each other: shard with mode='fsdp', or make them one block"
                )
        self.pool.take(self)
        self.owner = owner

    def release(self) -> None:
        """Give the slot up; its content is gone."""
        assert self.owner is not None
        if self._debug:
            for flat in self.flats:
                flat.detach().view(torch.uint8).fill_(255)  # NaN in every floating-point dtype but few of float8
        self.owner = None
        self.pool.give(self)


def carve(pool: Pool, sizes: Sizes) -> list[torch.Tensor]:
    """Flat buffers, one after the other, from the start of a pool that has storage."""
    flats, end = [], 0
    for numel, dtype in sizes:
        begin = aligned(end)
        end = begin + numel * dtype.itemsize
        flats.append(pool.memory[begin:end].view(dtype))
    return flats


def nbytes_of(sizes: Sizes) -> int:
    """What :func:`carve` takes."""
    end = 0
    for numel, dtype in sizes:
        end = aligned(end) + numel * dtype.itemsize
    return end
