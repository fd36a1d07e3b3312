"""What the engine holds: shards, slots that its op stream fills and gives up, and the buffers of its exchanges.

The stream is walked as ``engine/executor.py`` walks it: what precedes a marker, the marker, and what follows it and
need not be awaited. Sizes are those of ``engine/unit.py`` and ``engine/buffers.py``, and where slots lie is what
``engine/arena.py`` says.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import final

from refshard.engine.arena import Lasting, aligned, plan_arena
from refshard.engine.layout import UnitLayout, lay_out
from refshard.engine.schedule import (
    BLOCKING,
    MARKERS,
    Op,
    OpKind,
    PassKind,
    Phase,
    Rings,
    assign_rings,
    build,
    chain_markers,
)
from refshard.estimate.recipe import MASTER_BYTES
from refshard.estimate.units import ModelUnit
from refshard.memory.holdings import Holdings, Setting, gloo_all_reduce, take_optimizer
from refshard.memory.ledger import Ledger


@final
class Slots(Holdings):
    """The engine in any of its modes."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        super().__init__(setting, ledger)
        self._mode = setting.recipe.mode
        self._layouts = _layouts(setting.units, setting.shards)
        whole = self._mode.optimizer == "replicate"
        self._aliased = whole and setting.element == MASTER_BYTES
        self._gradients_aliased = whole and setting.reduced == MASTER_BYTES
        facts = [unit.facts for unit in setting.units]
        enclosing = setting.units[0].role == "around"
        markers = chain_markers(len(facts), enclosing=enclosing)
        rings = assign_rings(markers, facts, self._mode)
        self._legs = 2 if setting.shards > 1 and setting.replicas > 1 else 1
        self._build = cache(lambda kind: build(markers, rings, self._mode, facts, kind))
        self._rooms = self._arena(rings) if self._mode.storage == "ring" else self._rooms_per_use()
        self._kind, self._stream = PassKind(), tuple[Op, ...]()
        self._position = 0
        self._fresh: dict[int, list[int]] = {}
        self._shard_gradients = False

    def settle(self) -> None:
        """See :meth:`Holdings.settle`."""
        setting, ledger = self.setting, self.ledger
        for layout in self._layouts:
            ledger.take("parameters", MASTER_BYTES * layout.shard_numel)
            if self._gradients_aliased:
                ledger.take("gradients", MASTER_BYTES * layout.numel)
            if self._mode.storage == "persistent" and not self._aliased:
                ledger.take("unsharded", setting.element * layout.numel)
            if self._mode.gradient_storage == "persistent" and not self._gradients_aliased:
                ledger.take("unsharded", setting.reduced * layout.numel)
            bounds = (layout.local_range(parameter, setting.rank) for parameter in layout.parameters)
            take_optimizer(ledger, [stop - start for start, stop in bounds])

    def open_pass(self, *, first: bool, last: bool) -> None:
        """See :meth:`Holdings.open_pass`."""
        kept, reduced_once = self._mode.parameters == "replicate", self._mode.gradients == "replicate"
        kind = PassKind(gather=first or not kept, reduce=last or not reduced_once, legs=self._legs)
        self._kind, self._stream, self._position = kind, self._build(kind), 0
        self._go_on()

    def begin(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.begin`."""
        self._mark(Op(OpKind.BEGIN, unit, phase))

    def end(self, unit: int, phase: Phase) -> None:
        """See :meth:`Holdings.end`: in backward a unit has ended with its last gradient."""
        if phase == "forward":
            self._mark(Op(OpKind.END, unit, phase))

    def forward_done(self) -> None:
        """See :meth:`Holdings.forward_done`: the stream goes on, and unused memory is freed."""
        for room in self._rooms.values():
            room.rest()

    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """See :meth:`Holdings.gradient`: it moves at once if the slot accumulates; else it waits for the others."""
        if self._mode.gradient_storage == "persistent":
            self.ledger.free("workspace", nbytes)
        else:
            self._fresh.setdefault(unit, []).append(nbytes)
        if completes:
            self._mark(Op(OpKind.END, unit, "backward"))

    def close_pass(self) -> None:
        """See :meth:`Holdings.close_pass`."""
        for op in self._stream[self._position :]:
            self._do(op)
        self._position = len(self._stream)
        self.forward_done()
        self._shard_gradients = self._kind.reduce and not self._gradients_aliased

    def drop_gradients(self) -> None:
        """See :meth:`Holdings.drop_gradients`."""
        for layout in self._layouts if self._shard_gradients else ():
            self.ledger.free("gradients", MASTER_BYTES * layout.shard_numel)
        self._shard_gradients = False

    def _mark(self, marker: Op) -> None:
        """Do what precedes a marker, and what follows it and need not be awaited."""
        while self._stream[self._position] != marker:
            self._do(self._stream[self._position])
            self._position += 1
        self._position += 1
        self._go_on()

    def _go_on(self) -> None:
        """Do what comes next, up to what is awaited or marked."""
        while self._position < len(self._stream):
            op = self._stream[self._position]
            if op.kind in MARKERS or op.kind in BLOCKING:
                return
            self._do(op)
            self._position += 1

    def _do(self, op: Op) -> None:
        layout = self._layouts[op.unit]
        if op.kind in (OpKind.GATHER, OpKind.RELEASE):
            if room := self._rooms.get(("parameters", op.unit)):
                (room.take if op.kind is OpKind.GATHER else room.give)()
        elif op.kind is OpKind.REDUCE:
            self._reduce(op.unit, layout)
        elif op.kind is OpKind.COMBINE:
            self._give_up_gradients(op.unit)
            self._all_reduce(layout.shard_numel)
        elif op.kind is OpKind.FINISH:
            self._finish(op.unit, layout)

    def _reduce(self, unit: int, layout: UnitLayout) -> None:
        """Gradients that waited move into their slot, one by one, and the reduction gets something to write to."""
        if room := self._rooms.get(("gradients", unit)):
            room.take()
            for nbytes in self._fresh.pop(unit, ()):
                self.ledger.free("workspace", nbytes)
        else:
            self.ledger.take("workspace", self._scratch(layout))
        alike = self.setting.reduced == MASTER_BYTES
        if self._gradients_aliased:
            self._all_reduce(layout.numel)
        elif alike and not self._shard_gradients:
            self.ledger.take("gradients", MASTER_BYTES * layout.shard_numel)
        elif self._legs == 2:
            self.ledger.take("workspace", self.setting.reduced * layout.shard_numel)

    def _finish(self, unit: int, layout: UnitLayout) -> None:
        """What was reduced becomes the gradient shard, or is added to it."""
        alike = self.setting.reduced == MASTER_BYTES
        if not self._gradients_aliased and not alike and not self._shard_gradients:
            self.ledger.take("gradients", MASTER_BYTES * layout.shard_numel)
        if self._legs == 2 and (self._shard_gradients or not alike):
            self.ledger.free("workspace", self.setting.reduced * layout.shard_numel)
        if self._legs == 1:
            self._give_up_gradients(unit)

    def _give_up_gradients(self, unit: int) -> None:
        if room := self._rooms.get(("gradients", unit)):
            room.give()
        else:
            self.ledger.free("workspace", self._scratch(self._layouts[unit]))

    def _all_reduce(self, numel: int) -> None:
        if self.setting.gloo and self.setting.replicas > 1:
            gloo_all_reduce(self.ledger, self.setting.reduced * numel, self.setting.replicas)

    def _bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Of each unit's unsharded parameters, and of their gradients."""
        units = range(len(self._layouts))
        of_gradients = {unit: self.setting.reduced * self._layouts[unit].numel for unit in units}
        if any(map(self._scratch, self._layouts)):
            of_gradients = {u: aligned(of_gradients[u]) + self._scratch(self._layouts[u]) for u in units}
        return {unit: self.setting.element * self._layouts[unit].numel for unit in units}, of_gradients

    def _scratch(self, layout: UnitLayout) -> int:
        """Bytes that an exchange over gloo receives."""
        exchanged = self.setting.gloo and self.setting.recipe.exchanges_reductions
        return self.setting.reduced * (layout.numel - layout.shard_numel) if exchanged else 0

    def _arena(self, rings: Rings) -> "dict[tuple[str, int], _Room]":
        """Units' rooms in the columns that the engine plans."""
        legs = self._legs
        kinds = PassKind(training=False, reduce=False), PassKind(legs=legs), PassKind(forward=False, legs=legs)
        arena = plan_arena([self._build(kind) for kind in kinds], rings, *self._bytes(), mixed=True)
        rooms: dict[tuple[str, int], _Room] = {}
        for column in arena.columns:
            room = _Room(self.ledger, column.nbytes, column.lasting)
            rooms |= {("parameters", unit): room for unit in column.parameters}
            rooms |= {("gradients", unit): room for unit in column.gradients}
        return rooms

    def _rooms_per_use(self) -> "dict[tuple[str, int], _Room]":
        """A room for each transient slot."""
        stored = {"parameters": self._mode.storage, "gradients": self._mode.gradient_storage}
        return {
            (role, unit): _Room(self.ledger, nbytes, "per use")
            for (role, storage), sizes in zip(stored.items(), self._bytes())
            for unit, nbytes in sizes.items()
            if storage != "persistent"
        }


@dataclass(slots=True)
class _Room:
    """An allocation that slots share, as the engine's ``Pool``."""

    ledger: Ledger
    nbytes: int
    lasting: Lasting
    users: int = 0
    there: bool = False

    def take(self) -> None:
        """A slot is in use."""
        if not self.there:
            self.ledger.take("unsharded", self.nbytes)
        self.there, self.users = True, self.users + 1

    def give(self) -> None:
        """A slot is unused again."""
        self.users -= 1
        if self.lasting == "per use":
            self.rest()

    def rest(self) -> None:
        """Free it, unless a slot is in use."""
        if self.there and not self.users:
            self.ledger.free("unsharded", self.nbytes)
            self.there = False


def _layouts(units: tuple[ModelUnit, ...], shards: int) -> tuple[UnitLayout, ...]:
    """Each unit's flat layout; units of the same shapes share one, whatever their parameters are called."""
    known: dict[Hashable, UnitLayout] = {}
    layouts = []
    for unit in units:
        shapes = tuple(shape for _, shape in unit.parameters)
        if shapes not in known:
            known[shapes] = lay_out(unit.name, unit.parameters, shards)
        layouts.append(known[shapes])
    return tuple(layouts)
