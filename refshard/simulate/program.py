"""A strategy's step as a list of items: what runs on which lane, for how long, and after what.

The list is in the order in which the host issues it. Items of one lane run in that order; an item also waits for those
it names. The waits are those of ``engine/effects.py``, and of torch's own wrappers as ``plan/recipe.py`` describes
them: on a device that the host runs ahead of, a gather waits for the release of the storage it may write to; on a CPU
everything is issued when the host gets there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from refshard.plan.buckets import Buckets
from refshard.plan.checkpointing import NO_CHECKPOINTING, Checkpointing
from refshard.plan.placement import Mode
from refshard.plan.recipe import Recipe
from refshard.plan.schedule import MARKERS, Op, OpKind, PassKind, Phase, assign_slots, build, chain_markers
from refshard.plan.units import ModelUnit
from refshard.simulate.pricing import Call, Pricing
from refshard.timeline import Kind

Lane = Literal["compute", "gather", "reduce", "combine"]
Stage = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One piece of work. ``seconds`` is what it takes undisturbed; of a collective, how long it occupies its link.
    ``after`` are indices of items that must have ended. ``call`` says what a collective is, None for all else.
    """

    lane: Lane
    kind: Kind
    name: str
    unit: str
    stage: Stage
    seconds: float
    after: tuple[int, ...] = ()
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one step does: microbatches, and the layers that compute their activations again in backward."""

    microbatches: int = 1
    checkpointing: Checkpointing = NO_CHECKPOINTING


@dataclass(slots=True)
class _Writer:
    """The program so far, and what the next item of compute must wait for."""

    items: list[Item] = field(default_factory=list)
    last_compute: int | None = None
    released: int | None = None
    compute_after: set[int] = field(default_factory=set)

    def add(self, item: Item) -> int:
        """Append; an item of compute takes up everything that compute was told to wait for."""
        self.items.append(item)
        return len(self.items) - 1

    def compute(self, kind: Kind, name: str, unit: str, stage: Stage, seconds: float) -> None:
        """Append an item of compute, unless it takes nothing."""
        if seconds > 0:
            after = tuple(sorted(self.compute_after))
            self.compute_after.clear()
            self.last_compute = self.add(
                Item(lane="compute", kind=kind, name=name, unit=unit, stage=stage, seconds=seconds, after=after)
            )

    def so_far(self) -> tuple[int, ...]:
        """What an item issued now must wait for if it needs all that compute has done, and was told to wait for."""
        waited = set(self.compute_after)
        if self.last_compute is not None:
            waited.add(self.last_compute)
        return tuple(sorted(waited))


def step_program(recipe: Recipe, units: tuple[ModelUnit, ...], pricing: Pricing, shape: StepShape) -> tuple[Item, ...]:
    """One training step of ``recipe``: forward and backward of each microbatch, and the optimizer."""
    writer = _Writer()
    issue = _Buckets(recipe, units, pricing, shape, writer) if recipe.grouping == "buckets" else None
    for index in range(shape.microbatches):
        if issue is not None:
            issue.microbatch(last=index == shape.microbatches - 1)
        else:
            _Walk(recipe, units, pricing, shape, writer).microbatch(index)
    writer.compute(Kind.COMPUTE, "optimizer", "", "optimizer", pricing.optimizer(units))
    return tuple(writer.items)


class _Walk:
    """Turns the op stream of one microbatch into items."""

    def __init__(
        self, recipe: Recipe, units: tuple[ModelUnit, ...], pricing: Pricing, shape: StepShape, writer: _Writer
    ) -> None:
        self._recipe, self._units, self._pricing, self._shape, self._out = recipe, units, pricing, shape, writer
        self._gathering: dict[int, int] = {}
        self._reducing: dict[int, int] = {}
        self._landed: set[int] = set()

    def microbatch(self, index: int) -> None:
        """Append what one microbatch does, the ``index``-th from 0."""
        mode, units = self._recipe.mode, self._units
        facts = [unit.facts for unit in units]
        if self._recipe.gathers_all:
            facts = [replace(fact, read_in_backward=True) for fact in facts]
        markers = chain_markers(len(units), enclosing=units[0].role == "around")
        stream = build(markers, assign_slots(markers, facts, mode), mode, facts, self._kind(mode, index))
        for op in _reductions_first(stream) if self._recipe.reduces_first else stream:
            self._issue(op)
        self._out.compute_after.update(self._reducing.values())

    def _kind(self, mode: Mode, index: int) -> PassKind:
        kept, last = mode.parameters == "replicate", index == self._shape.microbatches - 1
        return PassKind(
            gather=not (kept and index) and (mode.optimizer == "shard" or self._pricing.casts),
            reduce=mode.gradients == "shard" or last,
            legs=2 if self._pricing.replicas > 1 and self._pricing.shards > 1 else 1,
        )

    def _issue(self, op: Op) -> None:
        match op.kind:
            case OpKind.GATHER:
                self._gather(op.unit, op.phase)
            case OpKind.WAIT:
                self._wait(op.unit, op.phase)
            case OpKind.BEGIN | OpKind.END:
                self._compute(self._units[op.unit], op.phase, begins=op.kind is OpKind.BEGIN)
            case OpKind.RELEASE:
                self._out.released = self._out.last_compute
            case OpKind.REDUCE:
                self._reduce(op.unit)
            case OpKind.COMBINE:
                self._combine(op.unit)
            case OpKind.FINISH:
                self._finish(op.unit)

    def _compute(self, unit: ModelUnit, phase: Phase, *, begins: bool) -> None:
        role = unit.role
        if role == "around":
            # Such a unit computes at both ends of the pass: the embedding where forward begins and backward ends.
            role = "embedding" if begins == (phase == "forward") else "head"
        elif begins:
            return
        seconds = self._pricing.compute(role, phase, self._shape.checkpointing.recompute(unit.layer))
        self._out.compute(Kind.COMPUTE, f"{phase} {role}", unit.name, phase, seconds)

    def _gather(self, index: int, phase: Phase) -> None:
        unit, out = self._units[index], self._out
        issued = out.so_far()
        if self._pricing.asynchronous:
            issued = () if out.released is None else (out.released,)
        copy = self._pricing.own_part(unit)
        if copy > 0 and self._pricing.asynchronous:
            issued = (out.add(_item("gather", Kind.COPY, "copy own part", unit, phase, copy, issued)),)
        elif copy > 0:
            out.compute(Kind.COPY, "copy own part", unit.name, phase, copy)
            issued = out.so_far()
        if self._pricing.shards == 1:
            out.compute_after.update(issued)  # there is nothing to gather, only to cast
            return
        self._gathering[index] = self._collective("gather", self._pricing.gather(unit), unit, phase, issued)
        if self._pricing.awaits("gather"):
            out.compute_after.add(self._gathering[index])

    def _wait(self, index: int, phase: Phase) -> None:
        unit = self._units[index]
        if index not in self._gathering:
            return
        self._out.compute_after.add(self._gathering.pop(index))
        copies = self._pricing.copy_out(unit)
        self._out.compute(Kind.COPY, "copy out", unit.name, phase, copies)

    def _reduce(self, index: int) -> None:
        unit, out = self._units[index], self._out
        out.compute(Kind.PREP, "copy in", unit.name, "backward", self._pricing.copy_in(unit))
        after = out.so_far()
        prepared = self._pricing.divide(unit)
        if prepared > 0:
            after = (out.add(_item("reduce", Kind.PREP, "divide", unit, "backward", prepared, after)),)
        self._reducing[index] = self._collective("reduce", self._pricing.reduce(unit), unit, "backward", after)
        if self._pricing.awaits("reduce"):
            self._land(index)

    def _combine(self, index: int) -> None:
        unit, first = self._units[index], self._reducing[index]
        self._land(index)
        # A host that does not run ahead issues it when the first leg, and a sum of its parts, are done.
        after = (first,) if self._pricing.asynchronous else self._out.so_far()
        self._reducing[index] = self._collective("combine", self._pricing.combine(unit), unit, "backward", after)
        if self._pricing.awaits("reduce"):
            self._out.compute_after.add(self._reducing[index])

    def _finish(self, index: int) -> None:
        if self._pricing.replicas == 1 or self._pricing.shards == 1:
            self._land(index)
        elif self._recipe.awaits_second_leg:
            self._out.compute_after.add(self._reducing.pop(index))

    def _land(self, index: int) -> None:
        """Await a reduction's first leg, once, and add up what an exchange brought."""
        if index in self._landed or index not in self._reducing:
            return
        unit = self._units[index]
        self._landed.add(index)
        self._out.compute_after.add(self._reducing[index])
        if self._pricing.replicas == 1 or self._pricing.shards == 1:
            del self._reducing[index]
        summed = self._pricing.local_sum(unit)
        self._out.compute(Kind.COPY, "local sum", unit.name, "backward", summed)

    def _collective(self, lane: Lane, call: Call, unit: ModelUnit, phase: Phase, after: tuple[int, ...]) -> int:
        # One communicator runs its collectives in the order in which they were issued.
        lane = "gather" if self._recipe.one_communicator and lane == "reduce" else lane
        return self._out.add(_collective(lane, call, unit, phase, after))


def _reductions_first(stream: Sequence[Op]) -> list[Op]:
    """The same stream, a reduction issued before the gathers that stand between it and the marker before."""
    ordered: list[Op] = []
    between = 0
    for op in stream:
        if op.kind is OpKind.REDUCE:
            ordered.insert(between, op)
            between += 1
        else:
            ordered.append(op)
        if op.kind in MARKERS:
            between = len(ordered)
    return ordered


class _Buckets:
    """DDP: gradients are all-reduced in buckets, each as soon as its last gradient is there.

    Parameters enter buckets in the reverse of their order; a block's gradients are taken to arrive evenly, by their
    size, over its backward.
    """

    def __init__(
        self, recipe: Recipe, units: tuple[ModelUnit, ...], pricing: Pricing, shape: StepShape, writer: _Writer
    ) -> None:
        self._recipe, self._units, self._pricing, self._shape, self._out = recipe, units, pricing, shape, writer

    def microbatch(self, *, last: bool) -> None:
        """Append what one microbatch does; only the last one reduces."""
        for unit in self._units:
            cast = self._pricing.cast(unit.numel) if self._pricing.casts else 0.0
            self._out.compute(Kind.COPY, "copy own part", unit.name, "forward", cast)
            seconds = self._pricing.compute(unit.role, "forward")
            self._out.compute(Kind.COMPUTE, f"forward {unit.role}", unit.name, "forward", seconds)
        pending: list[int] = []
        buckets = Buckets(self._recipe, self._pricing.gradient_bytes(1))
        for unit in reversed(self._units):
            arrived = 0
            for _, shape in reversed(unit.parameters):
                arrived += math.prod(shape)
                if last and (full := buckets.add(math.prod(shape))):
                    self._backward(unit, arrived)
                    pending.append(self._all_reduce(unit, full))
                    arrived = 0
            self._backward(unit, arrived)
        if rest := buckets.take_rest():
            pending.append(self._all_reduce(self._units[0], rest))
        self._out.compute_after.update(pending)

    def _backward(self, unit: ModelUnit, arrived: int) -> None:
        """The part of the unit's backward in which gradients of ``arrived`` elements come."""
        if not arrived:
            return
        whole = self._pricing.compute(unit.role, "backward", self._shape.checkpointing.recompute(unit.layer))
        self._out.compute(Kind.COMPUTE, f"backward {unit.role}", unit.name, "backward", whole * arrived / unit.numel)

    def _all_reduce(self, unit: ModelUnit, numel: int) -> int:
        cast = self._pricing.cast(numel) if self._pricing.casts else 0.0
        scaled = cast + self._pricing.move(2 * self._pricing.gradient_bytes(numel))
        self._out.compute(Kind.PREP, "scale", unit.name, "backward", scaled)
        call = self._pricing.all_reduce(numel)
        return self._out.add(_collective("gather", call, unit, "backward", self._out.so_far()))


def _item(
    lane: Lane, kind: Kind, name: str, unit: ModelUnit, stage: Stage, seconds: float, after: tuple[int, ...]
) -> Item:
    return Item(lane=lane, kind=kind, name=name, unit=unit.name, stage=stage, seconds=seconds, after=after)


def _collective(lane: Lane, call: Call, unit: ModelUnit, stage: Stage, after: tuple[int, ...]) -> Item:
    return Item(
        lane=lane, kind=Kind.COMM, name=call.op, unit=unit.name, stage=stage, seconds=call.cost.transfer_s,
        after=after, call=call,
    )  # fmt: skip
