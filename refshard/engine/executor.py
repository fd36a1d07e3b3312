"""Walks the schedule: markers come in from the hooks, collectives and slot changes go out.

The first training pass observes: nothing is prefetched, rings are transient storage still, and the order of execution
is written down. From then on the op stream that :mod:`refshard.plan.schedule` builds from that order is followed,
marker by marker. Where a later pass departs from the order, the engine says so once and serves every later pass on
demand.
"""

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

import torch

from refshard.engine.buffers import Slot
from refshard.engine.collectives import Collectives
from refshard.engine.device import Lanes
from refshard.engine.effects import Effects
from refshard.engine.unit import Unit
from refshard.errors import EngineError
from refshard.plan.placement import Mode
from refshard.plan.schedule import (
    BLOCKING,
    MARKERS,
    Op,
    OpKind,
    PassKind,
    Phase,
    Presence,
    SlotKey,
    Slots,
    assign_slots,
    build,
    on_demand,
)


class Order(Enum):
    """What the engine knows about the order of execution."""

    OBSERVING = auto()
    FOLLOWING = auto()
    ON_DEMAND = auto()


@dataclass(frozen=True, slots=True)
class _Scene:
    """What is done at one marker, in order: what it needs, the marker itself, and what may be issued right after it.

    The first scene of a pass, its opening, has no marker, and neither has the last, which ends it.
    """

    marker: Op | None
    effects: tuple[Callable[[], None], ...]


class Executor:
    """Executes ops on units.

    ``mark`` is called at each marker; ``begin_pass`` starts a forward, ``end_backward`` ends a training step, and
    ``abandon_pass`` any other pass. While ``accumulating``, gradients that add up unsharded are not reduced.
    """

    def __init__(
        self, units: Sequence[Unit], mode: Mode, collectives: Collectives, lanes: Lanes, *, debug: bool
    ) -> None:
        self._units = tuple(units)
        self._facts = tuple(unit.facts for unit in units)
        self._mode = mode
        self._collectives = collectives
        self._debug = debug
        self._effects = Effects(self._units, collectives, lanes)
        self._order = Order.OBSERVING
        self._observed: list[Op] = []
        self._observed_training: tuple[Op, ...] = ()
        self._recording = False
        self._kind = PassKind(legs=collectives.legs)
        self._slots = Slots({}, {})
        self._rings: dict[tuple[str, SlotKey], Slot] = {}
        self._markers: tuple[Op, ...] = ()
        self._followed: set[bool] = set()
        self._scripts: dict[PassKind, tuple[_Scene, ...]] = {}
        self._script: tuple[_Scene, ...] | None = None
        self._position = 0
        self._backward_open = False
        self._open_forwards: set[object] = set()
        self._version = 0
        self.accumulating = False
        for unit in self._units:
            unit.bind(*self._first_slots(unit), self._on_gradients)

    @property
    def order(self) -> Order:
        """Whether the order of execution is being observed, followed, or was found to vary."""
        return self._order

    @property
    def stream(self) -> tuple[Op, ...]:
        """The op stream of a training step of one microbatch; empty until one has been observed."""
        return self._build(PassKind(legs=self._collectives.legs)) if True in self._followed else ()

    def begin_pass(self, forward: object, *, training: bool) -> None:
        """Start a forward pass, known as ``forward``. Whatever an earlier pass left behind is stale by now.

        Raises:
            EngineError: a parameter was replaced behind the engine's back, or the ranks observed different orders.
        """
        for unit in self._units:
            unit.check_parameters()
        self.abandon_pass()
        if self._order is Order.OBSERVING:
            version = sum(unit.version for unit in self._units)
            if version != self._version:
                # The optimizer has stepped, and so barred every backward that had not come.
                self._version = version
                self._open_forwards.clear()
            # What such a backward reads is where its forward found it: units must not move to other slots before.
            if self._observed_training and not self._open_forwards:
                self._plan(self._observed_training, {True, False})
                self._order = Order.FOLLOWING
            elif training:
                self._open_forwards.add(forward)
        self._observed.clear()
        # An evaluation before the first training step is observed too: it may be all that the model is for.
        self._recording = self._order is Order.OBSERVING and (training or not self._followed)
        self._effects.masters_changed()
        self._open(training=training, forward=True)

    def mark(self, marker: Op) -> None:
        """Do what the schedule asks for up to ``marker``, and issue what may start after it."""
        if marker.phase == "backward" and not self._backward_open:
            self._backward_open = True
            if self._script is None:
                # The last pass was a backward, as pipelines have it, or an evaluation; or nothing is followed.
                self._open(training=True, forward=False)
        if self._script is not None:
            expected = self._skipped()
            if expected == marker:
                self._play(self._script[self._position])
                return
            self._give_up_order(f"{marker} came where step 0 had {expected or 'the end'}")
        unit = self._units[marker.unit]
        if marker.kind is OpKind.BEGIN:
            self._make_room(unit, marker.phase)
        for op in on_demand(marker, _presence(unit), self._effects.reducing, self._mode, unit.facts, self._kind):
            self._effects.execute(op)
        if self._recording:
            self._observed.append(marker)

    def end_backward(self, forwards: Iterable[object]) -> None:
        """Flush what the backward of these ``forwards`` left open, and leave every gradient in its shard (or unsharded,
        while accumulating).

        Raises:
            EngineError: in debug, the ranks used different parameters.
        """
        for unit in self._units:
            if unit.in_backward:
                self._on_gradients(unit)
        if self._script is not None and (skipped := self._skipped()) is not None:
            self._give_up_order(f"backward ended before {skipped}")
        if self._script is not None:
            self._play(self._script[-1])
        if self._debug:
            self._check_agreement()
        if self._kind.reduce:
            self._effects.reduce_rest()
        fruitless = any(unit.trained for unit in self._units) and not any(unit.arrived for unit in self._units)
        if not fruitless:
            self._open_forwards.difference_update(forwards)
            if self._recording:
                self._observed_training = tuple(self._observed)
        self._backward_open = False
        self.abandon_pass()
        if fruitless:
            warnings.warn(
                "refshard: a backward brought no parameter a gradient; one for inputs alone (torch.autograd.grad, or a "
                "pipeline schedule that computes gradients of inputs and weights apart) gives sharded parameters none",
                stacklevel=2,
            )

    def abandon_forward(self, forward: object) -> None:
        """Give up a forward that raised: no backward of it will come."""
        self._open_forwards.discard(forward)
        self.abandon_pass()

    def abandon_pass(self) -> None:
        """Give up whatever is unsharded or under way; gradients of a backward that did not end are dropped."""
        self._script = None
        self._recording = False
        lost = self._backward_open
        self._backward_open = False
        for unit in self._units:
            for pending in (unit.gathering, unit.reducing):
                if pending is not None:
                    # Nobody will use its result; if it failed, the next collective says so.
                    with suppress(RuntimeError):
                        pending.wait()
            unit.gathering = None
            unit.resident = unit.slot.owner == unit.name
            if self._mode.parameters == "shard":
                self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))
            unit.computing = False
            self._effects.drop_gradients(unit, keep=self._mode.gradients == "replicate" and not lost)
            unit.expose_sharded()
        self._effects.reducing.clear()
        self._effects.settle()

    def end_evaluation(self) -> None:
        """End a forward pass that has no backward; the first one shows the order of those to come."""
        observed = self._recording
        self.abandon_pass()
        if observed and not self._open_forwards:
            self._plan(tuple(self._observed), {False})

    def _open(self, *, training: bool, forward: bool) -> None:
        """Follow the schedule of a pass from its start, if one is known; without ``forward``, of a backward alone."""
        known = training in self._followed
        for unit in self._units:
            unit.arrived.clear()
        self._kind = PassKind(
            training=training,
            forward=forward,
            gather=(forward or known) and self._must_gather(),
            reduce=training and not (self.accumulating and self._mode.gradients == "replicate"),
            legs=self._collectives.legs,
        )
        self._script = self._script_of(self._kind) if known else None
        self._position = 0
        if self._script is not None:
            self._play(self._script[0])

    @torch.inference_mode(False)
    def _plan(self, observed: tuple[Op, ...], followed: set[bool]) -> None:
        """Fix the ``observed`` order for passes with or without backward, and move the units into their rings.

        Slots must be ordinary tensors even where an evaluation in inference mode is what comes after step 0.
        """
        if not self._collectives.agree(zlib.crc32(repr(observed).encode())):
            raise EngineError(
                f"rank {self._collectives.world_rank} ran the units in another order, or used other parameters, than "
                "another rank did in step 0; all ranks must call the same modules and use the same parameters in every "
                "step"
            )
        self._markers = observed
        self._slots = assign_slots(self._markers, self._facts, self._mode)
        if True not in followed:
            self._slots = Slots(self._slots.parameters, {})
        for unit in self._units:
            slot = self._ring_slot(unit, "parameters", self._slots.parameters) or unit.slot
            gradient_slot = self._ring_slot(unit, "gradients", self._slots.gradients) or unit.gradient_slot
            if (slot, gradient_slot) != (unit.slot, unit.gradient_slot):
                unit.bind(slot, gradient_slot, self._on_gradients)
        self._scripts.clear()
        self._followed = followed

    def _ring_slot(self, unit: Unit, role: str, assigned: Mapping[int, SlotKey]) -> Slot | None:
        """The unit's slot in a ring, made when it is first asked for; None for a unit outside of the rings."""
        key = assigned.get(unit.index)
        if key is None:
            return None
        if (role, key) not in self._rings:
            self._rings[role, key] = self._new_slot(unit, role, persistent=True)
        return self._rings[role, key]

    def _build(self, kind: PassKind) -> tuple[Op, ...]:
        return build(self._markers, self._slots, self._mode, self._facts, kind)

    def _script_of(self, kind: PassKind) -> tuple["_Scene", ...]:
        """The op stream of a pass of this kind, scene by scene."""
        if kind not in self._scripts:
            self._scripts[kind] = self._scenes(self._build(kind))
        return self._scripts[kind]

    def _scenes(self, stream: tuple[Op, ...]) -> tuple["_Scene", ...]:
        """Cut a stream where the engine waits for a marker. What follows one and need not be awaited belongs to it."""
        awaited = BLOCKING | MARKERS
        starts = [i for i, op in enumerate(stream) if op.kind in MARKERS]
        ends = [next((i for i in range(s + 1, len(stream)) if stream[i].kind in awaited), len(stream)) for s in starts]
        first = next(i for i, op in enumerate(stream) if op.kind in awaited)
        scenes = []
        for marker_at, (start, stop) in zip([None, *starts, None], pairwise([0, first, *ends, len(stream)])):
            effects = tuple(self._effects.of(op) for op in stream[start:stop])
            scenes.append(_Scene(None if marker_at is None else stream[marker_at], effects))
        return tuple(scenes)

    def _play(self, scene: "_Scene") -> None:
        for effect in scene.effects:
            effect()
        self._position += 1

    def _must_gather(self) -> bool:
        """Whether this pass has to gather; replicated parameters that the optimizer changed are given up for it."""
        if self._mode.parameters == "shard":
            return True
        stale = [u for u in self._units if not u.aliased and (not u.resident or u.gathered_version != u.version)]
        for unit in self._units if stale else ():
            if not unit.aliased:
                self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))
        return bool(stale)

    def _first_slots(self, unit: Unit) -> tuple[Slot, Slot]:
        """Where a unit lives until the order is known; with persistent or transient storage, for good."""
        if unit.aliased:
            slot = Slot([flat.shard for flat in unit.flats], persistent=True)
            unit.generation = slot.acquire(unit.name)
            unit.resident = True
        else:
            slot = self._new_slot(unit, "parameters", persistent=self._mode.storage == "persistent")
        if unit.gradients_aliased:
            return slot, Slot(
                [f.whole_gradient for f in unit.trained_flats if f.whole_gradient is not None], persistent=True
            )
        persistent = self._mode.gradient_storage == "persistent"
        return slot, self._new_slot(unit, "gradients", persistent=persistent)

    def _new_slot(self, unit: Unit, role: str, *, persistent: bool) -> Slot:
        wanted = (
            [(flat.layout.numel, flat.dtype) for flat in unit.flats]
            if role == "parameters"
            else [(flat.layout.numel, flat.reduce_dtype) for flat in unit.trained_flats]
        )
        allocate = self._collectives.allocate if persistent else torch.empty
        flats = [allocate(numel, dtype=dtype, device=unit.device) for numel, dtype in wanted]
        return Slot(flats, persistent=persistent, debug=self._debug)

    def _skipped(self) -> Op | None:
        """The marker that the script expects next, None at its end."""
        assert self._script is not None
        return self._script[self._position].marker

    def _give_up_order(self, why: str) -> None:
        if not self._kind.forward:
            # A second backward of one forward, say, that reaches but a part of it: served on demand, like one more.
            self._script = None
            return
        which = "training" if self._kind.training else "evaluation"
        warnings.warn(
            f"refshard: the order of execution changed ({why}); nothing is prefetched in {which} from now on",
            stacklevel=2,
        )
        # An evaluation that takes another way (an early exit, say) leaves training's order alone.
        self._followed.discard(self._kind.training)
        self._script = None
        if self._kind.training:
            self._order = Order.ON_DEMAND

    def _on_gradients(self, unit: Unit) -> None:
        self.mark(Op(OpKind.END, unit.index, "backward"))

    def _check_agreement(self) -> None:
        used = repr([sorted(unit.arrived) for unit in self._units])
        if not self._collectives.agree(zlib.crc32(used.encode())):
            raise EngineError(
                f"rank {self._collectives.world_rank} used other parameters in this step than another rank did; all "
                "ranks must use the same ones, if need be by adding 0 * parameter.sum() to the loss"
            )

    def _make_room(self, unit: Unit, phase: Phase) -> None:
        """Without a schedule, the unit's slots may hold what was prefetched and not used, or is being reduced."""
        for other in self._units:
            if other is unit:
                continue
            if other.slot is unit.slot and other.gathering is not None:
                self._effects.execute(Op(OpKind.WAIT, other.index, phase))
            if phase == "backward" and unit.gradient_slot is other.gradient_slot:
                if other.in_backward:
                    # Backward has moved on without the gradients that it still lacks: they will not come.
                    self._on_gradients(other)
                self._effects.finish(other)
            if other.slot is unit.slot and not other.computing:
                self._effects.execute(Op(OpKind.RELEASE, other.index, phase))


def _presence(unit: Unit) -> Presence:
    if unit.gathering is not None:
        return Presence.GATHERING
    return Presence.UNSHARDED if unit.resident else Presence.SHARDED
