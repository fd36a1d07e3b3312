"""What the engine holds: shards, slots that its op stream fills and gives up, and the buffers of its exchanges.

The stream is walked as ``engine/executor.py`` walks it: what precedes a marker, the marker, and what follows it and
need not be awaited. Sizes are those of ``engine/unit.py`` and ``engine/buffers.py``.
"""

from collections import Counter
from collections.abc import Hashable
from functools import cache
from typing import Literal, final

from refshard.memory.holdings import Holdings, Setting, gloo_all_reduce, take_optimizer
from refshard.memory.ledger import Ledger
from refshard.plan.layout import UnitLayout, lay_out
from refshard.plan.recipe import MASTER_BYTES
from refshard.plan.schedule import (
    BLOCKING,
    MARKERS,
    Op,
    OpKind,
    PassKind,
    Phase,
    SlotKey,
    assign_slots,
    build,
    chain_markers,
)
from refshard.plan.units import ModelUnit


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
        slots = assign_slots(markers, facts, self._mode)
        self._ring: dict[str, dict[int, SlotKey]] = {
            "parameters": dict(slots.parameters), "gradients": dict(slots.gradients)
        }  # fmt: skip
        self._legs = 2 if setting.shards > 1 and setting.replicas > 1 else 1
        self._build = cache(lambda kind: build(markers, slots, self._mode, facts, kind))
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
        self._take_ring("parameters", setting.element)
        self._take_ring("gradients", setting.reduced)
        self._take_receive_buffers()

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
        """See :meth:`Holdings.forward_done`: the stream goes on."""

    def gradient(self, unit: int, nbytes: int, *, completes: bool) -> None:
        """See :meth:`Holdings.gradient`: it moves into a slot that is there; a transient one waits for all of them."""
        if self._persistent("gradients", unit):
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
        if op.kind in (OpKind.GATHER, OpKind.RELEASE) and not self._persistent("parameters", op.unit):
            change = self.ledger.take if op.kind is OpKind.GATHER else self.ledger.free
            change("unsharded", self.setting.element * layout.numel)
        elif op.kind is OpKind.REDUCE:
            self._reduce(op.unit, layout)
        elif op.kind is OpKind.COMBINE:
            self._give_up_gradients(op.unit, layout)
            self._all_reduce(layout.shard_numel)
        elif op.kind is OpKind.FINISH:
            self._finish(op.unit, layout)

    def _reduce(self, unit: int, layout: UnitLayout) -> None:
        """Gradients that waited move into their slot, one by one, and the reduction gets something to write to."""
        if not self._persistent("gradients", unit):
            self.ledger.take("unsharded", self.setting.reduced * layout.numel)
            for nbytes in self._fresh.pop(unit, ()):
                self.ledger.free("workspace", nbytes)
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
            self._give_up_gradients(unit, layout)

    def _give_up_gradients(self, unit: int, layout: UnitLayout) -> None:
        if not self._persistent("gradients", unit):
            self.ledger.free("unsharded", self.setting.reduced * layout.numel)

    def _all_reduce(self, numel: int) -> None:
        if self.setting.gloo and self.setting.replicas > 1:
            gloo_all_reduce(self.ledger, self.setting.reduced * numel, self.setting.replicas)

    def _persistent(self, role: Literal["parameters", "gradients"], unit: int) -> bool:
        """Whether a unit's slot has storage for good, of its own or in a ring."""
        storage = self._mode.storage if role == "parameters" else self._mode.gradient_storage
        return storage == "persistent" or unit in self._ring[role]

    def _take_ring(self, role: Literal["parameters", "gradients"], size: int) -> None:
        """The buffers of a ring: one for all units with the same key, which are of one size."""
        for key in dict.fromkeys(self._ring[role].values()):
            unit = next(unit for unit, other in self._ring[role].items() if other == key)
            self.ledger.take("unsharded", size * self._layouts[unit].numel)

    def _take_receive_buffers(self) -> None:
        """As many for each size of shard as reductions of that size are ever under way at once."""
        if not (self.setting.gloo and self.setting.recipe.exchanges_reductions and self.setting.shards > 1):
            return
        under_way, most = Counter[int](), Counter[int]()
        for op in self._build(PassKind(legs=self._legs)):
            numel = self._layouts[op.unit].shard_numel
            if op.kind is OpKind.REDUCE:
                under_way[numel] += 1
                most[numel] = max(most[numel], under_way[numel])
            elif op.kind is (OpKind.COMBINE if self._legs == 2 else OpKind.FINISH):
                under_way[numel] -= 1
        for numel in most.elements():
            self.ledger.take("workspace", self.setting.reduced * numel * (self.setting.shards - 1))


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
