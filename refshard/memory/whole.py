"""What is held where every rank holds everything: one rank alone, and torch's DDP."""

from typing import final

from refshard.engine.schedule import Phase
from refshard.estimate.recipe import MASTER_BYTES
from refshard.memory.buckets import Buckets
from refshard.memory.holdings import Holdings, gloo_all_reduce, numels, take_optimizer


@final
class Whole(Holdings):
    """Parameters, and gradients where autograd puts them; with buckets (DDP), gradients are views of those.

    Without buckets to reduce in, as DDP has none before the last microbatch, a gradient stays as it came and later ones
    are added to it. A bucket takes a gradient as it arrives, with what was there before. In bf16, forward runs
    under autocast (:mod:`refshard.memory.autocast`); gradients arrive in fp32 all the same.

    DDP's first step has one bucket for all gradients. The second step makes the buckets of all later ones, while NCCL
    still holds the first until one of them is reduced: this is the step that is counted.
    """

    _own: bool
    _buckets: bool
    _open: Buckets
    _kept: int
    _first_bucket: int

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        setting = self.setting
        every = [numel for unit in setting.units for numel in numels(unit)]
        for numel in every:
            self.ledger.take("parameters", MASTER_BYTES * numel)
        if setting.recipe.bucket_bytes:
            buckets = Buckets(setting.recipe, setting.reduced)
            full = [buckets.add(numel) for unit in reversed(setting.units) for numel in reversed(numels(unit))]
            for numel in filter(None, [*full, buckets.take_rest()]):
                self.ledger.take("gradients", setting.reduced * numel)
        take_optimizer(self.ledger, every)
        self._kept = 0

    def open_pass(self, *, first: bool, last: bool) -> None:
        """See :meth:`Holdings.open_pass`."""
        self._buckets = last and bool(self.setting.recipe.bucket_bytes)
        self._first_bucket = 0
        if self._buckets and self.setting.library == "nccl":
            self._first_bucket = self.setting.reduced * sum(sum(numels(unit)) for unit in self.setting.units)
            self.ledger.take("gradients", self._first_bucket)
        self._own = not first
        self._open = Buckets(self.setting.recipe, self.setting.reduced)

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
            self._reduce(self._open.add(nbytes // MASTER_BYTES))

    def close_pass(self) -> None:
        """See :meth:`Holdings.close_pass`."""
        self._reduce(self._open.take_rest())

    def drop_gradients(self) -> None:
        """See :meth:`Holdings.drop_gradients`: buckets stay."""
        self.ledger.free("gradients", self._kept)
        self._kept = 0

    def _reduce(self, numel: int) -> None:
        """Reduce a bucket of so many elements, if it has any."""
        if numel:
            self.ledger.free("gradients", self._first_bucket)
            self._first_bucket = 0
        if numel and self.setting.gloo and self.setting.replicas > 1:
            gloo_all_reduce(self.ledger, self.setting.reduced * numel, self.setting.replicas)
