"""Slots: the storage that unsharded parameters and gradients live in, and who owns it now.

A slot's tensor objects are stable; only their storage comes and goes (transient) or changes hands (ring). Parameters
are views of them, so that an all-gather lands in place and nothing is copied out. Autograd's version counters do not
see such a refill: :class:`~refshard.engine.unit.Unit` sets them.
"""

from collections.abc import Sequence

import torch

from refshard.errors import EngineError
from refshard.plan.layout import ParameterLayout


class Slot:
    """Storage for one unit's flat buffers at a time.

    ``flats`` are 1-D tensors, one for each of the unit's flat parameters. A persistent slot keeps its storage for
    good; a transient one has storage only between :meth:`acquire` and :meth:`release`. With ``debug``, released content
    is filled with NaN, so that a read after release cannot pass unnoticed.
    """

    __slots__ = ("_bytes", "_debug", "flats", "owner", "persistent")

    def __init__(self, flats: Sequence[torch.Tensor], *, persistent: bool, debug: bool = False) -> None:
        self.flats = tuple(flats)
        self._bytes = tuple(flat.untyped_storage().nbytes() for flat in flats)
        self.persistent = persistent
        self._debug = debug
        self.owner: str | None = None
        if not persistent:
            self._resize(0)

    def views(self, places: Sequence[Sequence[ParameterLayout]]) -> list[list[torch.Tensor]]:
        """A view per flat and place, each with a version counter of its own, so that a refill is no change to autograd.

        Views survive the storage's coming and going, but torch only makes them where storage is.
        """
        if not self.persistent and self.owner is None:
            self._resize(None)
        made = [
            [flat[p.offset : p.offset + p.numel].view(p.shape).data for p in places_of_flat]
            for flat, places_of_flat in zip(self.flats, places)
        ]
        if not self.persistent and self.owner is None:
            self._resize(0)
        return made

    def acquire(self, owner: str) -> None:
        """Hand the slot to ``owner``.

        Raises:
            EngineError: another owner holds it.
        """
        if self.owner is not None:
            raise EngineError(
                f"unit '{owner}' needs the slot that unit '{self.owner}' still holds; two units that share a slot ran "
                "nested in each other: shard with mode='fsdp', or make them one block"
            )
        if not self.persistent:
            self._resize(None)
        self.owner = owner

    def release(self) -> None:
        """Give the slot up; its content is gone."""
        if self._debug:
            for flat in self.flats:
                flat.detach().fill_(float("nan"))
        if not self.persistent:
            self._resize(0)
        self.owner = None

    def _resize(self, nbytes: int | None) -> None:
        """Give every flat ``nbytes`` of storage, or all that it needs."""
        for flat, needed in zip(self.flats, self._bytes):
            flat.untyped_storage().resize_(needed if nbytes is None else nbytes)
