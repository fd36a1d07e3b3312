"""What is held where every rank holds everything: one rank alone, and torch's DDP."""

from typing import final

from refshard.plan.schedule import Phase
from refshard.simulate.holdings import MASTER_BYTES, Holdings, gloo_all_reduce, numels, take_optimizer


@final
class Whole(Holdings):
    """Parameters, and gradients where autograd puts them; with buckets (DDP), gradients are views of those.

    Without buckets to reduce in, as DDP has none before the last microbatch, a gradient stays as it came and later ones
    are added to it. A bucket takes a gradient as it arrives, with what was there before. In bf16, a copy of all
    parameters is held to compute with, as the engine does where it replicates.
    """

    _own: bool
    _buckets: bool
    _filled: int
    _limit: int
    _kept: int

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        setting = self.setting
        every = [numel for unit in setting.units for numel in numels(unit)]
        for numel in every:
            self.ledger.take("parameters", MASTER_BYTES * numel)
            if setting.element != MASTER_BYTES:
                self.ledger.take("unsharded", setting.element * numel)
        if setting.recipe.bucket_bytes:
            for numel in self._bucket_numels():
                self.ledger.take("gradients", setting.reduced * numel)
        take_optimizer(self.ledger, every)
        self._kept = 0

    def open_pass(self, *, first: bool, last: bool) -> None:
        """See :meth:`Holdings.open_pass`."""
        self._buckets = last and bool(self.setting.recipe.bucket_bytes)
        self._own = not first
        self._filled, self._limit = 0, self.setting.recipe.first_bucket_bytes

    def begin(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.begin`: everything is there."""

    def end(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.end`: everything stays."""

    def forward_done(self) -> None:
        """See :meth:`Holdings.forward_done`."""

    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """See :meth:`Holdings.gradient`."""
        if self._own or self._buckets:
            self.ledger.free("workspace", nbytes)
        else:
            self.ledger.rename(nbytes, "workspace", "gradients")
            self._kept += nbytes
        if self._buckets:
            if self._own:
                self._kept -= nbytes
                self.ledger.free("gradients", nbytes)
            self._fill(nbytes // self.setting.element * self.setting.reduced)

    def close_pass(self) -> None:
        """See :meth:`Holdings.close_pass`."""
        if self._filled:
            self._reduce()

    def drop_gradients(self) -> None:
        """See :meth:`Holdings.drop_gradients`: buckets stay."""
        self.ledger.free("gradients", self._kept)
        self._kept = 0

    def _fill(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled >= self._limit:
            self._reduce()
            self._limit = self.setting.recipe.bucket_bytes

    def _reduce(self) -> None:
        if self.setting.gloo and self.setting.replicas > 1:
            gloo_all_reduce(self.ledger, self._filled, self.setting.replicas)
        self._filled = 0

    def _bucket_numels(self) -> list[int]:
        """Elements of each bucket; parameters enter them in the reverse of their order."""
        sizes, filled, limit = [], 0, self.setting.recipe.first_bucket_bytes
        for unit in reversed(self.setting.units):
            for numel in reversed(numels(unit)):
                filled += numel
                if filled * self.setting.reduced >= limit:
                    sizes.append(filled)
                    filled, limit = 0, self.setting.recipe.bucket_bytes
        return [*sizes, filled] if filled else sizes
