"""What torch's FSDP1 holds: flat shards, the flat parameters that it gathers, and flat gradients.

Read in torch 2.13, ``distributed/fsdp/_flat_param.py`` and ``_runtime_utils.py``. Modules see views of a gathered flat
parameter, so that autograd puts the gradients of a unit together once all of them, and that of its input, are there;
what is reduced is that, in the dtype of the reduction and padded where the ranks do not divide it. The root's unit (the
final norm and the head, or what lies around the blocks) is flattened first and so put together last: it is gathered
before the embedding, and reduced when backward has ended.
"""

from typing import final

from refshard.engine.schedule import Phase
from refshard.estimate.recipe import MASTER_BYTES
from refshard.memory.holdings import (
    Holdings,
    Setting,
    gloo_all_reduce,
    gloo_reduce_scatter,
    take_optimizer,
)
from refshard.memory.ledger import Ledger


@final
class FlatParameters(Holdings):
    """FSDP1 with a unit for the embedding, or with one around the blocks."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        super().__init__(setting, ledger)
        self._shards = [-(-unit.numel // setting.shards) for unit in setting.units]
        self._unsharded: set[int] = set()
        self._fresh = [0] * len(setting.units)
        self._shard_gradients = False
        self._root = 0 if setting.units[0].role == "around" else len(setting.units) - 1
        others = [unit for unit in range(len(setting.units)) if unit != self._root]
        self._before = dict(zip([*others[1:], self._root], others))

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        for numel in self._shards:
            self.ledger.take("parameters", MASTER_BYTES * numel)
            take_optimizer(self.ledger, [numel])

    def open_pass(self, *, first: bool, last: bool) -> None:
        """See :meth:`Holdings.open_pass`: every microbatch is reduced."""
        self._shard_gradients = not first
        self._gather(self._root)

    def begin(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.begin`: in backward the unit before is gathered ahead."""
        self._gather(unit)
        if phase == "backward" and unit in self._before:
            self._gather(self._before[unit])

    def end(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.end`."""
        if unit == self._root:
            return
        if phase == "backward":
            self._reduce(unit)
        else:
            self._reshard(unit)

    def forward_done(self) -> None:
        """See :meth:`Holdings.forward_done`."""

    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """See :meth:`Holdings.gradient`: it waits."""
        self._fresh[unit] += nbytes

    def close_pass(self) -> None:
        """See :meth:`Holdings.close_pass`."""
        self._reduce(self._root)

    def drop_gradients(self) -> None:
        """See :meth:`Holdings.drop_gradients`."""
        for numel in self._shards:
            self.ledger.free("gradients", MASTER_BYTES * numel)

    def _gather(self, unit: int) -> None:
        if unit in self._unsharded:
            return
        setting, ledger = self.setting, self.ledger
        self._unsharded.add(unit)
        shard = setting.element * self._shards[unit]
        cast = setting.element != MASTER_BYTES
        if cast:
            ledger.take("unsharded", shard)
        ledger.take("unsharded", shard * setting.shards)
        if setting.gloo:
            ledger.pass_by("workspace", shard * setting.shards)
        if cast:
            ledger.free("unsharded", shard)

    def _reshard(self, unit: int) -> None:
        self._unsharded.remove(unit)
        self.ledger.free("unsharded", self.setting.element * self._shards[unit] * self.setting.shards)

    def _reduce(self, unit: int) -> None:
        """Put gradients together, reshard, cast, pad, reduce, and make the result the gradient or add it to that."""
        setting, ledger, shard = self.setting, self.ledger, self._shards[unit]
        numel = setting.units[unit].numel
        flat = [setting.element * numel]
        ledger.take("workspace", flat[0])
        ledger.free("workspace", self._fresh[unit])
        self._fresh[unit] = 0
        self._reshard(unit)
        if setting.reduced != setting.element:
            flat.append(setting.reduced * numel)
        if shard * setting.shards > numel:
            flat.append(setting.reduced * shard * setting.shards)
        for nbytes in flat[1:]:
            ledger.take("workspace", nbytes)
        ledger.take("workspace", setting.reduced * shard)
        if setting.gloo:
            gloo_reduce_scatter(ledger, setting.reduced * shard * setting.shards, setting.shards)
        if setting.gloo and setting.replicas > 1:
            gloo_all_reduce(ledger, setting.reduced * shard, setting.replicas)
        if setting.reduced != MASTER_BYTES:
            ledger.take("workspace", MASTER_BYTES * shard)
            ledger.free("workspace", setting.reduced * shard)
        if self._shard_gradients:
            ledger.free("workspace", MASTER_BYTES * shard)
        else:
            ledger.rename(MASTER_BYTES * shard, "workspace", "gradients")
        for nbytes in flat:
            ledger.free("workspace", nbytes)
