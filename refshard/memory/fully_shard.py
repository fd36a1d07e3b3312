"""What torch's FSDP2 holds: sharded parameters, what it gathers into and copies out of, what it reduces from.

Read in torch 2.13, ``distributed/fsdp/_fully_shard/_fsdp_param_group.py`` and ``_fsdp_collectives.py``. A gather has an
output of its own, from which parameters are copied out; in forward that stays until the next one has been copied out.
Gradients wait where autograd puts them until the unit's last one, and are copied into the input of a reduce-scatter,
which stays until the next unit's; the last parameter's gradient stays while they are reduced. A unit whose input has no
gradient is reduced when backward has ended. With replicas, what their all-reduce was given stays until then too.
"""

import math
from typing import final

from refshard.engine.schedule import Phase
from refshard.estimate.recipe import MASTER_BYTES
from refshard.memory.holdings import (
    Holdings,
    Setting,
    gloo_all_reduce,
    gloo_reduce_scatter,
    numels,
    take_optimizer,
)
from refshard.memory.ledger import Ledger


@final
class FullyShard(Holdings):
    """FSDP2, with one unit around the blocks, or with units beside them.

    With units beside them it is tuned as ``strategies/fsdp2_tuned.py`` does it: the head's parameters are kept until
    their backward, and the embedding's are not gathered for it. Over gloo, hooks then gather one unit ahead.
    """

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        super().__init__(setting, ledger)
        self._shards = [_rows_split(unit.parameters, setting.shards) for unit in setting.units]
        self._hooked = setting.gloo and not setting.recipe.awaits_gathers
        self._gathered: set[int] = set()
        self._unsharded: set[int] = set()
        self._ahead: set[int] = set()
        self._copied_last: int | None = None
        self._reduced_last: int | None = None
        self._fresh = [0] * len(setting.units)
        self._all_reduced: list[int] = []
        self._shard_gradients = False

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        setting, ledger = self.setting, self.ledger
        for unit, shards in zip(setting.units, self._shards):
            for numel in shards:
                ledger.take("parameters", MASTER_BYTES * numel)
            take_optimizer(ledger, _local_numels(unit.parameters, setting.shards, setting.rank))

    def open_pass(self, *, first: bool, last: bool) -> None:
        """See :meth:`Holdings.open_pass`: every microbatch is reduced."""
        self._shard_gradients = not first

    def begin(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.begin`."""
        if phase == "forward":
            ahead = unit in self._ahead
            self._gather(unit)
            self._copy_out(unit, deferred=not ahead)
            if self._hooked and unit + 1 < len(self._shards):
                self._gather(unit + 1, ahead=True)
            return
        before = self._before(unit)
        if self._hooked and before is not None:
            self._gather(before, ahead=True)
        if unit not in self._unsharded and self._read_in_backward(unit):
            self._gather(unit)
            self._await(unit)
            self._take_unsharded(unit)
            self._let_go_of_gathered(unit)
        if before is not None:
            self._gather(before)

    def end(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.end`."""
        role = self.setting.units[unit].role
        if phase == "forward":
            if role not in ("around", "head"):
                self._reshard(unit)
        elif role in ("block", "head"):
            self._reduce(unit)

    def forward_done(self) -> None:
        """See :meth:`Holdings.forward_done`."""
        self._let_go_of_copied()

    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """See :meth:`Holdings.gradient`: it waits."""
        self._fresh[unit] += nbytes

    def close_pass(self) -> None:
        """See :meth:`Holdings.close_pass`."""
        for unit, waiting in enumerate(self._fresh):
            if waiting:
                self._reduce(unit)
        self._let_go_of_reduced()
        while self._all_reduced:
            self.ledger.free("workspace", self._all_reduced.pop())

    def drop_gradients(self) -> None:
        """See :meth:`Holdings.drop_gradients`."""
        for shards in self._shards:
            self.ledger.free("gradients", MASTER_BYTES * sum(shards))

    def _read_in_backward(self, unit: int) -> bool:
        return self.setting.units[unit].role != "embedding"

    def _before(self, unit: int) -> int | None:
        """The unit whose backward comes next, if it has to be gathered for that."""
        units = self.setting.units
        before = len(units) - 1 if units[unit].role == "around" else unit - 1
        return before if before >= 0 and units[before].role == "block" else None

    def _gather(self, unit: int, *, ahead: bool = False) -> None:
        """Issue a gather, unless it is under way or done. What gloo takes for one that is issued ``ahead`` may be there
        until it is awaited, where compute is quicker.
        """
        if unit in self._gathered or unit in self._unsharded:
            return
        setting, ledger = self.setting, self.ledger
        shard = setting.element * sum(self._shards[unit])
        cast = setting.element != MASTER_BYTES
        if cast:
            ledger.take("unsharded", shard)
        ledger.take("unsharded", shard * setting.shards)
        if setting.gloo:
            ledger.take("workspace", shard * setting.shards)
        if cast:
            ledger.free("unsharded", shard)
        self._gathered.add(unit)
        self._ahead.add(unit)
        if not ahead:
            self._await(unit)

    def _await(self, unit: int) -> None:
        """A gather has come; torch's own over gloo goes through a flat copy of the output."""
        if unit in self._ahead:
            self._ahead.remove(unit)
            if self.setting.gloo:
                self.ledger.free("workspace", self.setting.element * sum(self._shards[unit]) * self.setting.shards)

    def _copy_out(self, unit: int, *, deferred: bool) -> None:
        """In forward: the output of a gather that was not issued ahead stays until the next has been copied out."""
        self._await(unit)
        self._take_unsharded(unit)
        self._let_go_of_copied()
        if deferred:
            self._copied_last = unit
        else:
            self._let_go_of_gathered(unit)

    def _take_unsharded(self, unit: int) -> None:
        for numel in self._shards[unit]:
            self.ledger.take("unsharded", self.setting.element * numel * self.setting.shards)
        self._unsharded.add(unit)

    def _let_go_of_gathered(self, unit: int) -> None:
        self._gathered.remove(unit)
        self.ledger.free("unsharded", self.setting.element * sum(self._shards[unit]) * self.setting.shards)

    def _let_go_of_copied(self) -> None:
        if self._copied_last is not None:
            self._let_go_of_gathered(self._copied_last)
            self._copied_last = None

    def _reshard(self, unit: int) -> None:
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            for numel in self._shards[unit]:
                self.ledger.free("unsharded", self.setting.element * numel * self.setting.shards)

    def _reduce(self, unit: int) -> None:
        """Reshard, copy gradients in, reduce, and make the result the gradient or add it to that."""
        setting, ledger = self.setting, self.ledger
        self._reshard(unit)
        self._let_go_of_reduced()
        numel = sum(self._shards[unit])
        self._reduced_last = unit
        ledger.take("unsharded", setting.reduced * numel * setting.shards)
        # A loop in torch's foreach_reduce still names the last parameter's gradient when the others are let go.
        last = setting.element * numels(setting.units[unit])[-1]
        named = ledger.rounded(last) if setting.shards > 1 else 0
        ledger.free("workspace", self._fresh[unit] - named)
        self._fresh[unit] = 0
        ledger.take("workspace", setting.reduced * numel)
        if setting.gloo and setting.recipe.exchanges_reductions:
            received = setting.reduced * numel * (setting.shards - 1)
            ledger.take("workspace", received)
            ledger.free("workspace", received)
        elif setting.gloo:
            gloo_reduce_scatter(ledger, setting.reduced * numel * setting.shards, setting.shards)
        if setting.gloo and setting.replicas > 1:
            gloo_all_reduce(ledger, setting.reduced * numel, setting.replicas)
        cast = setting.reduced != MASTER_BYTES
        if cast:
            ledger.take("workspace", MASTER_BYTES * numel)
        if not self._shard_gradients:
            ledger.rename(MASTER_BYTES * numel, "workspace", "gradients")
        elif cast:
            ledger.free("workspace", MASTER_BYTES * numel)
        if cast or self._shard_gradients:
            self._let_go_of_output(setting.reduced * numel)
        ledger.free("workspace", named)

    def _let_go_of_output(self, nbytes: int) -> None:
        """Of a reduction whose result is elsewhere; with replicas, at the end of backward."""
        if self.setting.replicas > 1:
            self._all_reduced.append(nbytes)
        else:
            self.ledger.free("workspace", nbytes)

    def _let_go_of_reduced(self) -> None:
        if self._reduced_last is not None:
            numel = sum(self._shards[self._reduced_last]) * self.setting.shards
            self.ledger.free("unsharded", self.setting.reduced * numel)
            self._reduced_last = None


def _rows_split(parameters: tuple[tuple[str, tuple[int, ...]], ...], shards: int) -> list[int]:
    """Elements of each parameter's shard: its first dimension, padded to a multiple of the ranks, is split."""
    return [-(-shape[0] // shards) * math.prod(shape[1:]) for _, shape in parameters]


def _local_numels(parameters: tuple[tuple[str, tuple[int, ...]], ...], shards: int, rank: int) -> list[int]:
    """Elements of each parameter that ``rank`` has, without padding."""
    found = []
    for _, shape in parameters:
        rows = -(-shape[0] // shards)
        found.append(min(rows, max(0, shape[0] - rank * rows)) * math.prod(shape[1:]))
    return found
