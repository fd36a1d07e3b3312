"""Slots: the storage that unsharded parameters and gradients live in, and who owns it now.

A slot's tensor object is stable; only its storage comes and goes (transient) or changes hands (ring). Parameters are
views of it, so that an all-gather lands in place and nothing is copied out. Because such a refill must not be seen by
autograd's version counters, a slot counts *generations* instead: whoever reads checks that the content is still theirs.
"""

from collections.abc import Sequence

import torch

from refshard.errors import EngineError
from refshard.plan.layout import ParameterLayout


class Slot:
    """Storage for one unit's flat buffer at a time.

    ``flat`` is a 1-D tensor of ``numel`` elements. A persistent slot keeps its storage for good; a transient one has
    storage only between :meth:`acquire` and :meth:`release`. With ``debug``, released content is filled with NaN, so
    that a read after release cannot pass unnoticed.
    """

    __slots__ = ("_bytes", "_debug", "_persistent", "flat", "generation", "owner")

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, persistent: bool, debug: bool = False
    ) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()
        self._persistent = persistent
        self._debug = debug
        self.owner: str | None = None
        self.generation = 0
        if not persistent:
            self.flat.untyped_storage().resize_(0)

    def views(self, places: Sequence[ParameterLayout]) -> list[torch.Tensor]:
        """A view per place, each with a version counter of its own, so that a refill is no change to autograd.

        Views survive the storage's coming and going, but torch only makes them where storage is.
        """
        storage = self.flat.untyped_storage()
        had_storage = storage.nbytes() > 0
        if not had_storage:
            storage.resize_(self._bytes)
        made = [self.flat[p.offset : p.offset + p.numel].view(p.shape).data for p in places]
        if not had_storage:
            storage.resize_(0)
        return made

    def acquire(self, owner: str) -> int:
        """Hand the slot to ``owner`` and return the new generation.

        Raises:
            EngineError: another owner holds it.
        """
        if self.owner is not None:
            raise EngineError(
                f"unit '{owner}' needs the slot that unit '{self.owner}' still holds; two units that share a slot ran "
                "nested in each other: shard with mode='fsdp', or make them one block"
            )
        if not self._persistent:
            self.flat.untyped_storage().resize_(self._bytes)
        self.owner = owner
        self.generation += 1
        return self.generation

    def release(self) -> None:
        """Give the slot up; its content is gone."""
        if self._debug:
            self.flat.detach().fill_(float("nan"))
        if not self._persistent:
            self.flat.untyped_storage().resize_(0)
        self.owner = None

    def check(self, owner: str, generation: int) -> None:
        """Check that the slot still holds what ``owner`` put there in ``generation``.

        Raises:
            EngineError: it was refilled since; computing with it would be silently wrong.
        """
        if (self.owner, self.generation) != (owner, generation):
            raise EngineError(
                f"unit '{owner}' expects generation {generation} in its slot, which holds generation "
                f"{self.generation} of unit '{self.owner}'; backward would compute with another unit's weights"
            )
