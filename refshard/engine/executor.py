"""Walks the schedule: markers come in from the hooks, collectives and slot changes go out.

The first training pass observes: nothing is prefetched, each buffer is allocated for one use, and the order of
execution is recorded. Later passes follow the op stream that :mod:`refshard.engine.schedule` builds from that order,
marker by marker. If a later pass departs from the order, the engine warns once and runs every later pass on demand.
"""

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch

from refshard.engine.arena import Arena, Column, plan_arena
from refshard.engine.buffers import Pool, Sizes, Slot, carve, nbytes_of
from refshard.engine.collectives import Collectives
from refshard.engine.device import Lanes
from refshard.engine.effects import Effects
from refshard.engine.materialise import make_room_for_gradients
from refshard.engine.passes import Followed, OnDemand, Pass, Scene, cut
from refshard.engine.placement import Storage
from refshard.engine.schedule import Op, OpKind, PassKind, Presence, Rings, UnitFacts, assign_rings, build
from refshard.engine.transforms import outside_transforms
from refshard.engine.unit import Activity, Unit
from refshard.errors import EngineError


class Order(Enum):
    """What the engine knows about the order of execution."""

    OBSERVING = auto()
    FOLLOWING = auto()
    ON_DEMAND = auto()


class Executor:
    """Executes ops on units.

    A pass begins with ``begin_pass``, or with ``begin_call`` where the model's own forward is not what is called;
    ``mark`` is called at each marker; ``end_backward`` ends a training step, ``end_evaluation`` a pass that has no
    backward. While ``accumulating``, gradients that add up unsharded are not reduced. ``order`` says whether the order
    of execution is being observed, followed, or was found to vary.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, lanes: Lanes, *, debug: bool) -> None:
        self._units = tuple(units)
        self._collectives = collectives
        self._debug = debug
        self._effects = Effects(self._units, collectives, lanes)
        self.order = Order.OBSERVING
        self._observed_training: tuple[Op, ...] = ()
        self._rings: Rings = {}
        self._own_gradients: dict[int, Slot] = {}
        self._planned_gradients: dict[int, Slot] = {}
        self._pools: tuple[Pool, ...] = ()
        self.arena: Arena | None = None
        self._markers: tuple[Op, ...] = ()
        self._followed: set[bool] = set()
        self._scripts: dict[PassKind, tuple[Scene, ...]] = {}
        self._pass: Pass = self._on_demand(PassKind())
        self._backward_open = False
        self._open_forwards: set[object] = set()
        self._version = 0
        self._warned_of_left_out = False
        self.accumulating = False
        for unit in self._units:
            unit.computes = lanes.computes
            self._bind_first(unit)

    @property
    def stream(self) -> tuple[Op, ...]:
        """The op stream of a training step of one microbatch; empty until one has been observed."""
        return self._build(PassKind()) if True in self._followed else ()

    @property
    def _facts(self) -> tuple[UnitFacts, ...]:
        return tuple(unit.facts for unit in self._units)

    @outside_transforms
    def begin_pass(self, forward: object, *, training: bool) -> None:
        """Start a forward pass, known as ``forward``. Leftovers of an earlier pass are stale by now.

        Raises:
            EngineError: a parameter was replaced behind the engine's back, or the ranks observed different orders or
                froze different parameters.
        """
        changed = [unit for unit in self._units if unit.check_parameters()]
        self.abandon_pass(keep_ahead=True)
        if changed:
            self._take_over_freezing(changed)
        if self.order is Order.OBSERVING:
            self._forget_barred_forwards()
            # What such a backward reads is where its forward found it: units must not move to other slots before.
            if self._observed_training and not self._open_forwards:
                self._plan(self._observed_training, {True, False})
                self.order = Order.FOLLOWING
            elif training:
                self._leave_arena()
                self._open_forwards.add(forward)
        # An evaluation before the first training step is observed too: it may be all that the model is for.
        observes = self.order is Order.OBSERVING and (training or not self._followed)
        self._effects.masters_changed(self._units)
        self._open(training=training, forward=True, record=[] if observes else None)

    @outside_transforms
    def begin_call(self, unit: Unit, forward: object, *, training: bool) -> None:
        """A unit is called outside of the model's own forward: serve it on demand, next to the pass in progress.

        Raises:
            EngineError: a parameter was replaced behind the engine's back.
        """
        if unit.check_parameters():
            self._take_over_freezing([unit])
        if self.order is Order.OBSERVING and training:
            self._forget_barred_forwards()
            self._leave_arena()
            self._open_forwards.add(forward)
        self._effects.masters_changed([unit])
        self._effects.agreeing = True
        self._pass = self._on_demand(self._kind(training=training, forward=True))

    def _take_over_freezing(self, changed: Iterable[Unit]) -> None:
        """Parameters of these units were frozen, or are trained from now on."""
        for unit in changed:
            begun = unit.take_over_freezing()
            for flat in begun:
                make_room_for_gradients(flat, unit.mode, unit.collectives)
            if begun:
                self._bind_first(unit)
                self.replan()
        frozen = [[not p.unsharded.requires_grad for p in unit.trained] for unit in self._units]
        if not self._collectives.agree(zlib.crc32(repr(frozen).encode())):
            raise EngineError(
                f"rank {self._collectives.world_rank} has frozen other parameters than another rank has; change "
                "requires_grad alike on all ranks"
            )

    @outside_transforms
    def mark(self, marker: Op) -> None:
        """Do what the schedule asks for up to ``marker``, and issue what may start after it."""
        if marker.phase == "backward" and not self._backward_open:
            self._open_backward()
        if not self._pass.expects(marker):
            self._give_up_order(str(marker))
        self._pass.mark(marker)

    @outside_transforms
    def end_backward(self, forwards: Iterable[object], *, of_inputs: bool) -> None:
        """Flush what the backward of these ``forwards`` left open, and leave every gradient in its shard (or unsharded,
        while accumulating). One that is known to be ``of_inputs`` only brings no parameter's.
        """
        for unit in self._units:
            if unit.in_backward:
                self._on_gradients(unit)
        if not self._pass.expects(None):
            self._give_up_order("the end of backward")
        self._end_pass()
        units = self._units
        reduced = [unit for unit in units if unit.facts.reduces(self._pass.kind)]
        self._effects.reduce_rest(reduced)
        self._effects.claim_gradients(reduced)
        for unit in units:
            if not unit.facts.reduces(self._pass.kind):
                unit.gradients.show_unreduced()
        fruitless = any(u.gradients.wanted for u in units) and not any(
            u.gradients.arrived or u.gradients.read_outside for u in units
        )
        if not fruitless:
            self._open_forwards.difference_update(forwards)
            if isinstance(self._pass, OnDemand) and self._pass.record is not None:
                self._observed_training = tuple(self._pass.record)
        self._backward_open = False
        self.abandon_pass()
        if fruitless and not of_inputs:
            warnings.warn(
                "refshard: a backward gave no parameter a gradient; torch.autograd.grad, or a pipeline schedule that "
                "computes input and weight gradients apart, gives sharded parameters none: compute both by backward()",
                stacklevel=2,
            )

    @outside_transforms
    def unshard(self, unit: Unit) -> None:
        """Gather a unit before its next use, which then finds it there. This does nothing if the unit is there, if its
        slot is taken, or if this backward has no more use for its parameters.

        A pass does not notice: where it would gather the unit it finds it, and gives it up where it would anyway.

        Raises:
            EngineError: in debug, another rank calls this for another unit.
        """
        if self._debug and not self._collectives.agree(unit.index):
            raise EngineError(
                f"rank {self._collectives.world_rank} unshards unit '{unit.name}' where another rank does something "
                "else; unshard is a collective, which all ranks must call for the same modules in the same order"
            )
        needed = unit.activity is not Activity.ENDED and (unit.facts.read_in_backward or not self._backward_open)
        if unit.presence is not Presence.SHARDED or not unit.slot.free or not needed:
            return
        self._effects.execute(Op(OpKind.GATHER, unit.index, "forward"))
        unit.ahead = True

    def await_gather(self, unit: Unit) -> None:
        """Await the unit's gather, if one is under way."""
        self._effects.execute(Op(OpKind.WAIT, unit.index, "forward"))

    def reshard(self, unit: Unit) -> None:
        """Give up what :meth:`unshard` has gathered, unless the pass under way has claimed it.

        Raises:
            EngineError: the unit is computing.
        """
        if unit.exposed:
            raise EngineError(
                f"unit '{unit.name}' is computing, and cannot be resharded; call reshard after its forward or backward"
            )
        if unit.ahead:
            self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))

    def replan(self) -> None:
        """What the schedule was made from does not hold any more: observe the next training pass anew."""
        self._serve_on_demand()
        self._observed_training = ()
        if self.order is Order.FOLLOWING:
            self.order = Order.OBSERVING
            self._followed = set()

    def abandon_forward(self, forward: object) -> None:
        """Give up a forward that raised: no backward of it will come."""
        self._open_forwards.discard(forward)
        self.abandon_pass()

    def abandon_pass(self, *, keep_ahead: bool = False) -> None:
        """Free unsharded buffers and drop work in progress and the gradients of an unfinished backward. With
        ``keep_ahead``, units that were gathered ahead stay, for the pass that begins.
        """
        self._pass = self._on_demand(self._pass.kind)
        self._effects.agreeing = self._debug
        lost, self._backward_open = self._backward_open, False
        for unit in self._units:
            keep_gradients = unit.mode.gradients == "replicate" and not lost
            shards = unit.mode.parameters == "shard"
            self._effects.abandon(unit, keep_gradients=keep_gradients, keep_ahead=keep_ahead and shards)
            if shards and not unit.ahead:
                self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))
        self.rest()
        self._effects.settle()

    def rest(self) -> None:
        """Forward or a pass has ended: free unused memory."""
        for pool in self._pools:
            pool.rest()

    @outside_transforms
    def end_evaluation(self) -> None:
        """End a forward pass that has no backward; the first one shows the order of those to come."""
        if self._pass.expects(None):
            self._end_pass()
        observed = self._pass.record if isinstance(self._pass, OnDemand) else None
        self.abandon_pass()
        if observed is not None and not self._open_forwards:
            self._plan(tuple(observed), {False})

    def _serve_on_demand(self) -> None:
        """End reductions that are under way, and serve the rest of the pass on demand, with gradients in units' own
        slots.
        """
        for index in tuple(self._effects.reducing):
            self._effects.finish(self._units[index])
        self._lay_gradients(self._own_gradients)
        self._effects.agreeing = True
        self._pass = self._on_demand(self._pass.kind)

    def _bind(self, unit: Unit, slot: Slot, gradient_slot: Slot) -> None:
        self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))
        unit.bind(slot, gradient_slot, self._on_gradients)

    def _on_demand(self, kind: PassKind, record: list[Op] | None = None) -> OnDemand:
        return OnDemand(kind, self._units, self._effects, record)

    def _kind(self, *, training: bool, forward: bool) -> PassKind:
        return PassKind(training=training, forward=forward, reduce=training and not self.accumulating)

    def _open(self, *, training: bool, forward: bool, record: list[Op] | None = None) -> None:
        """Follow the schedule of a pass from its start, if one is known; without ``forward``, of a backward alone."""
        known, kind = training in self._followed, self._kind(training=training, forward=forward)
        for unit in self._units:
            if unit.presence is not Presence.SHARDED and not unit.current:  # before a gather has to wait for compute
                self._effects.execute(Op(OpKind.RELEASE, unit.index, "forward"))
        self._lay_gradients(self._planned_gradients if known else self._own_gradients)
        self._effects.agreeing = self._debug or not known
        self._pass = Followed(kind, self._units, self._script_of(kind)) if known else self._on_demand(kind, record)

    def _open_backward(self) -> None:
        self._backward_open = True
        for unit in self._units:
            unit.gradients.begin_backward()
        if self.order is Order.OBSERVING:
            self._leave_arena()  # a forward without gradients, which checkpointing recomputes now
        if isinstance(self._pass, OnDemand) and self._pass.record is None:
            # The last pass was a backward, as pipelines have it, or an evaluation; or nothing is followed. What a
            # forward on demand has gathered and kept is given up where the schedule of a backward alone starts anew.
            for unit in self._units if True in self._followed else ():
                if unit.mode.parameters == "shard":
                    self._effects.execute(Op(OpKind.RELEASE, unit.index, "backward"))
            self._open(training=True, forward=False)
        elif self._pass.kind.reduce == self.accumulating:
            # Forward ran within no_sync and backward does not, or the other way round.
            self._pass = self._pass.turned(replace(self._pass.kind, reduce=not self.accumulating), self._script_of)

    def _forget_barred_forwards(self) -> None:
        """The optimizer has stepped since they ran, and so barred every backward that had not come."""
        version = sum(unit.version for unit in self._units)
        if version != self._version:
            self._version = version
            self._open_forwards.clear()

    def _leave_arena(self) -> None:
        """Give up the arena before training is observed, or observed anew."""
        if self.arena is not None and not self._open_forwards:
            for unit in self._units:
                self._bind_first(unit)
            self._forget_arena()
            self._scripts.clear()
            self._followed = set()

    def _forget_arena(self) -> None:
        self.arena, self._pools, self._planned_gradients = None, (), {}

    @torch.inference_mode(False)
    def _plan(self, observed: tuple[Op, ...], followed: set[bool]) -> None:
        """Fix the ``observed`` order for passes with or without backward, and move the units into planned columns.

        Slots must be ordinary tensors even where an evaluation in inference mode is what comes after step 0.
        """
        if not self._collectives.agree(zlib.crc32(repr(observed).encode())):
            raise EngineError(
                f"rank {self._collectives.world_rank} ran the units in another order than another rank did in step 0; "
                "all ranks must run the same units in the same order: choose what runs by a seed that they share"
            )
        self._markers = observed
        self._rings = assign_rings(self._markers, self._facts)
        self._scripts.clear()
        self._followed = followed
        planned = [unit for unit in self._units if unit.mode.storage == "ring"]
        if planned:
            self._move_to_arena(planned, training=True in followed)

    def _move_to_arena(self, planned: Sequence[Unit], *, training: bool) -> None:
        kinds = [PassKind(training=False, reduce=False)]
        if training:
            kinds += [PassKind(), PassKind(forward=False)]
        parameters = {unit.index: nbytes_of(unit.parameter_sizes) for unit in planned}
        trained = [unit for unit in planned if training and unit.trained]
        gradients = {unit.index: nbytes_of(self._sizes(unit, gradients=True)) for unit in trained}
        self._forget_arena()
        keep = planned[0].mode.keep
        streams = [self._build(kind) for kind in kinds]
        self.arena = plan_arena(streams, self._rings, parameters, gradients, mixed=not keep)
        for column in self.arena.columns:
            pool = self._pool_of(column, keep=keep)
            for index in column.gradients:
                self._planned_gradients[index] = self._slot(self._units[index], pool, gradients=True)
            for index in column.parameters:
                slot = self._slot(self._units[index], pool, gradients=False)
                self._bind(self._units[index], slot, self._own_gradients[index])
            pool.rest()  # before the next is made: all at once could be the step's peak
            self._pools += (pool,)

    def _pool_of(self, column: Column, *, keep: bool) -> Pool:
        first = self._units[[*column.parameters, *column.gradients][0]]
        device = first.device
        if keep:
            return Pool(self._allocate(first, column.nbytes, reduced=not column.parameters))
        return Pool(torch.empty(column.nbytes, dtype=torch.uint8, device=device), column.lasting)

    def _lay_gradients(self, slots: Mapping[int, Slot]) -> None:
        """Let gradients go to these slots; no reduction may be under way."""
        for unit in self._units:
            slot = slots.get(unit.index, unit.gradients.slot)
            if slot is not unit.gradients.slot:
                unit.gradients.place(slot)

    def _build(self, kind: PassKind) -> tuple[Op, ...]:
        return build(self._markers, self._rings, self._facts, kind)

    def _script_of(self, kind: PassKind) -> tuple[Scene, ...]:
        """The op stream of a pass of this kind, scene by scene."""
        if kind not in self._scripts:
            self._scripts[kind] = cut(self._build(kind), self._effects)
        return self._scripts[kind]

    @torch.inference_mode(False)
    def _bind_first(self, unit: Unit) -> None:
        """Give a unit slots of its own: until the order is known, or for good if the mode plans no arena."""
        if unit.aliased:
            shards = [flat.shard for flat in unit.flats]
            slot = Slot(Pool(shards[0]), shards, unit.places)
            slot.acquire(unit.name)
        else:
            slot = self._own_slot(unit, unit.mode.storage, gradients=False)
        if unit.gradients.aliased:
            whole = [flat.whole_gradient for flat in unit.gradients.flats if flat.whole_gradient is not None]
            memory = whole[0] if whole else torch.empty(0)
            gradient_slot = Slot(Pool(memory), whole, unit.gradients.places, accumulates=True)
        else:
            gradient_slot = self._own_slot(unit, unit.mode.gradient_storage, gradients=True)
        self._own_gradients[unit.index] = gradient_slot
        self._bind(unit, slot, gradient_slot)

    def _own_slot(self, unit: Unit, storage: Storage, *, gradients: bool) -> Slot:
        """A slot in a pool of its own."""
        kept = storage == "persistent"
        nbytes = nbytes_of(self._sizes(unit, gradients=gradients, accumulates=kept))
        if kept:
            pool = Pool(self._allocate(unit, nbytes, reduced=gradients))
        else:
            pool = Pool(torch.empty(nbytes, dtype=torch.uint8, device=unit.device), "per use")
        slot = self._slot(unit, pool, gradients=gradients, accumulates=kept and gradients)
        pool.rest()
        return slot

    def _slot(self, unit: Unit, pool: Pool, *, gradients: bool, accumulates: bool = False) -> Slot:
        places = unit.gradients.places if gradients else unit.places
        sizes = self._sizes(unit, gradients=gradients, accumulates=accumulates)
        return Slot(pool, carve(pool, sizes), places, accumulates=accumulates, debug=self._debug)

    def _sizes(self, unit: Unit, *, gradients: bool, accumulates: bool = False) -> Sizes:
        """What a slot holds. One that accumulates has no scratch, which would be idle most of the time."""
        if not gradients:
            return unit.parameter_sizes
        return [*unit.gradients.sizes, *(() if accumulates else unit.gradients.scratch_sizes)]

    def _allocate(self, unit: Unit, nbytes: int, *, reduced: bool) -> torch.Tensor:
        return unit.collectives.allocate(nbytes, dtype=torch.uint8, device=unit.device, reduced=reduced)

    def _give_up_order(self, came: str) -> None:
        assert isinstance(self._pass, Followed)
        kind, due = self._pass.kind, self._pass.due or "the end"
        self._serve_on_demand()
        if not kind.forward:
            # A second backward of one forward, say, that reaches but a part of it: served on demand, like one more.
            return
        which = "training" if kind.training else "evaluation"
        warnings.warn(
            f"refshard: the order of execution changed ({came} came where step 0 had {due}), so nothing is prefetched "
            f"in {which} from now on; call the modules in the same order in every step",
            stacklevel=2,
        )
        # An evaluation that takes another way (an early exit, say) leaves training's order alone.
        self._followed.discard(kind.training)
        if kind.training:
            self.order = Order.ON_DEMAND

    def _end_pass(self) -> None:
        """Do what is due after the last marker; say once if a unit was left out."""
        self._pass.end()
        left_out = self._pass.left_out if isinstance(self._pass, Followed) and self._pass.kind.forward else None
        if left_out is not None and not self._warned_of_left_out:
            self._warned_of_left_out = True
            warnings.warn(
                f"refshard: unit '{left_out.name}' was left out, unlike in step 0; its collectives are issued all the "
                "same in this and all later passes, so that every rank issues the same ones",
                stacklevel=3,
            )

    def _on_gradients(self, unit: Unit) -> None:
        self.mark(Op(OpKind.END, unit.index, "backward"))
