"""Walks the schedule: markers come in from the hooks, collectives and slot changes go out.

The first training pass observes: nothing is prefetched, every slot is transient, and the order of execution is written
down. From then on the op stream that :mod:`refshard.plan.schedule` builds from that order is followed, marker by
marker. Where a later pass departs from the order, the engine says so once and serves every later pass on demand.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto

import torch
from torch.profiler import record_function

from refshard.engine.buffers import Slot
from refshard.engine.collectives import Collectives, Pending
from refshard.engine.unit import Unit
from refshard.errors import EngineError
from refshard.plan.placement import Mode
from refshard.plan.schedule import (
    BLOCKING,
    MARKERS,
    Op,
    OpKind,
    Phase,
    assign_slots,
    build,
    forward_only,
    on_demand,
)


class Order(Enum):
    """What the engine knows about the order of execution."""

    OBSERVING = auto()
    FOLLOWING = auto()
    ON_DEMAND = auto()


class Executor:
    """Executes ops on units.

    ``mark`` is called at each marker; ``begin_pass`` starts a forward, ``end_backward`` ends a training step, and
    ``abandon_pass`` any other pass.
    """

    def __init__(self, units: Sequence[Unit], mode: Mode, collectives: Collectives, *, debug: bool) -> None:
        self._units = tuple(units)
        self._mode = mode
        self._collectives = collectives
        self._debug = debug
        self._order = Order.OBSERVING
        self._observed: list[Op] = []
        self._recording = False
        self._pass = "training"
        self._streams: dict[str, tuple[Op, ...]] = {}
        self._stream: tuple[Op, ...] | None = None
        self._position = 0
        self._reducing: list[int] = []
        self._effects: dict[OpKind, Callable[[Unit, Phase], None]] = {
            OpKind.GATHER: self._gather,
            OpKind.WAIT: self._wait,
            OpKind.BEGIN: self._begin,
            OpKind.END: self._end,
            OpKind.RELEASE: self._release,
            OpKind.REDUCE: self._reduce,
            OpKind.FINISH: self._finish,
        }
        for unit in self._units:
            slot, gradient_slot = (self._new_slot(unit, persistent=False) for _ in range(2))
            unit.bind(slot, gradient_slot, self._on_gradients)

    @property
    def order(self) -> Order:
        """Whether the order of execution is being observed, followed, or was found to vary."""
        return self._order

    @property
    def stream(self) -> tuple[Op, ...]:
        """The op stream of a training step; empty until one has been observed."""
        return self._streams.get("training", ())

    def begin_pass(self, *, training: bool) -> None:
        """Start a forward pass. Whatever an earlier pass left behind is stale by now.

        Raises:
            EngineError: a parameter was replaced behind the engine's back.
        """
        for unit in self._units:
            unit.check_parameters()
        self.abandon_pass()
        if self._order is Order.OBSERVING and self._complete():
            self._plan()
        self._observed.clear()
        self._recording = training and self._order is Order.OBSERVING
        self._pass = "training" if training else "evaluation"
        self._stream = self._streams.get(self._pass)
        self._position = 0
        self._run_ahead()

    def mark(self, marker: Op) -> None:
        """Do what the schedule asks for up to ``marker``, and issue what may start after it."""
        if self._stream is not None:
            if self._reach(marker):
                self._run_ahead()
                return
            self._give_up_order(f"{marker} came where step 0 had {self._next_marker() or 'the end'}")
        unit = self._units[marker.unit]
        if marker.kind is OpKind.BEGIN:
            self._make_room(unit, marker.phase)
        gathered = None if unit.gathering is not None else unit.resident
        for op in on_demand(marker, gathered, self._reducing, self._mode):
            self._execute(op)
        if self._recording:
            self._observed.append(marker)

    def end_backward(self) -> None:
        """Flush what backward left open, and leave every gradient in its shard."""
        for unit in self._units:
            if unit.in_backward:
                self._on_gradients(unit)
        if self._stream is not None and (skipped := self._next_marker()) is not None:
            self._give_up_order(f"backward ended before {skipped}")
        while self._stream is not None and self._position < len(self._stream):
            self._execute(self._stream[self._position])
            self._position += 1
        for index in tuple(self._reducing):
            self._finish(self._units[index], "backward")
        self.abandon_pass()

    def abandon_pass(self) -> None:
        """Give up whatever is unsharded or under way; gradients of a backward that did not end are dropped."""
        self._stream = None
        self._recording = False
        for unit in self._units:
            for pending in (unit.gathering, unit.reducing):
                if pending is not None:
                    # Nobody will use its result; if it failed, the next collective says so.
                    with suppress(RuntimeError):
                        pending.wait()
            unit.gathering = unit.reducing = None
            unit.resident = unit.computing = False
            if unit.slot.owner == unit.name:
                unit.slot.release()
            if unit.gradient_slot.owner == unit.name:
                unit.gradient_slot.release()
            unit.expose_sharded()
        self._reducing.clear()

    @contextmanager
    def unsharded(self, unit: Unit) -> Iterator[None]:
        """Hold one unit gathered outside of a pass; a collective call that ends any pass."""
        self.abandon_pass()
        self._gather(unit, "forward")
        self._wait(unit, "forward")
        try:
            yield
        finally:
            self._release(unit, "forward")

    def _complete(self) -> bool:
        """Whether a whole step, forward and backward, has been observed."""
        return any(m.phase == "backward" for m in self._observed)

    @torch.inference_mode(False)
    def _plan(self) -> None:
        """Build the op streams from the observed order and move the units into their slots.

        Slots must be ordinary tensors even where an evaluation in inference mode is what comes after step 0.
        """
        slots = assign_slots(self._observed, [u.layout.numel for u in self._units], self._mode)
        forward = forward_only(self._observed)
        self._streams = {
            "training": build(self._observed, slots, self._mode),
            "evaluation": build(forward, slots, self._mode),
        }
        rings: dict[tuple[str, tuple[int, int]], Slot] = {}
        for index, key in slots.parameters.items():
            unit = self._units[index]
            pair = []
            for role, role_key in (("parameters", key), ("gradients", slots.gradients[index])):
                if (role, role_key) not in rings:
                    rings[role, role_key] = self._new_slot(unit, persistent=True)
                pair.append(rings[role, role_key])
            unit.bind(pair[0], pair[1], self._on_gradients)
        self._order = Order.FOLLOWING

    def _new_slot(self, unit: Unit, *, persistent: bool) -> Slot:
        shard = unit.shard
        return Slot(unit.layout.numel, shard.dtype, shard.device, persistent=persistent, debug=self._debug)

    def _reach(self, marker: Op) -> bool:
        """Execute the stream up to and with ``marker``; False, and nothing done, where another marker comes first."""
        assert self._stream is not None
        if self._next_marker() != marker:
            return False
        end = self._stream.index(marker, self._position) + 1
        for op in self._stream[self._position : end]:
            self._execute(op)
        self._position = end
        return True

    def _next_marker(self) -> Op | None:
        """The marker that the stream expects next, None at its end."""
        assert self._stream is not None
        return next((op for op in self._stream[self._position :] if op.kind in MARKERS), None)

    def _run_ahead(self) -> None:
        """Issue what comes next in the stream and need not be waited for."""
        while self._stream is not None and self._position < len(self._stream):
            op = self._stream[self._position]
            if op.kind in MARKERS or op.kind in BLOCKING:
                return
            self._execute(op)
            self._position += 1

    def _give_up_order(self, why: str) -> None:
        warnings.warn(
            f"refshard: the order of execution changed ({why}); nothing is prefetched in {self._pass} from now on",
            stacklevel=2,
        )
        # An evaluation that takes another way (an early exit, say) leaves training's order alone.
        del self._streams[self._pass]
        self._stream = None
        if self._pass == "training":
            self._order = Order.ON_DEMAND

    def _execute(self, op: Op) -> None:
        self._effects[op.kind](self._units[op.unit], op.phase)

    def _gather(self, unit: Unit, phase: Phase) -> None:
        with record_function(f"refshard::all_gather({unit.name})"):
            unit.generation = unit.slot.acquire(unit.name)
            unit.gathering = self._collectives.all_gather(unit.slot.flat, unit.shard)

    def _wait(self, unit: Unit, phase: Phase) -> None:
        assert unit.gathering is not None
        self._await(unit.gathering, "all_gather", unit)
        unit.gathering = None
        unit.resident = True

    def _begin(self, unit: Unit, phase: Phase) -> None:
        unit.slot.check(unit.name, unit.generation)
        if phase == "backward":
            unit.gradient_slot.acquire(unit.name)
            unit.arrived.clear()
        unit.computing = True
        # In backward too: what is recomputed there reads the modules' parameters again.
        unit.expose_unsharded()

    def _end(self, unit: Unit, phase: Phase) -> None:
        unit.computing = False
        unit.expose_sharded()

    def _release(self, unit: Unit, phase: Phase) -> None:
        if unit.resident:
            unit.resident = False
            unit.slot.release()

    def _reduce(self, unit: Unit, phase: Phase) -> None:
        with record_function(f"refshard::reduce_scatter({unit.name})"):
            unit.zero_missing_gradients()
            unit.reducing = self._collectives.reduce_scatter(unit.open_reduce_target(), unit.gradient_slot.flat)
        self._reducing.append(unit.index)

    def _finish(self, unit: Unit, phase: Phase) -> None:
        if unit.reducing is None:
            return
        self._await(unit.reducing, "reduce_scatter", unit)
        unit.reducing = None
        self._reducing.remove(unit.index)
        unit.take_reduced()
        unit.gradient_slot.release()

    def _await(self, pending: Pending, collective: str, unit: Unit) -> None:
        try:
            with record_function(f"refshard::wait({unit.name})"):
                pending.wait()
        except RuntimeError as error:
            raise EngineError(
                f"{collective} of unit '{unit.name}' failed on rank {self._collectives.rank}; "
                f"another rank has probably ended: {error}"
            ) from error

    def _on_gradients(self, unit: Unit) -> None:
        self.mark(Op(OpKind.END, unit.index, "backward"))

    def _make_room(self, unit: Unit, phase: Phase) -> None:
        """Without a schedule, the unit's slots may hold what was prefetched and not used, or is being reduced."""
        for other in self._units:
            if other is unit:
                continue
            if other.slot is unit.slot and other.gathering is not None:
                self._wait(other, phase)
            if phase == "backward" and unit.gradient_slot is other.gradient_slot:
                if other.in_backward:
                    # Backward has moved on without the gradients that it still lacks: they will not come.
                    self._on_gradients(other)
                self._finish(other, phase)
            if other.slot is unit.slot and not other.computing:
                self._release(other, phase)
