"""One pass through the units, forward and backward: by a known schedule, or on demand.

Both take markers one at a time, and execute the ops that are due. A pass on demand needs no known order; it may record
the markers, from which a schedule is built.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from refshard.engine.effects import Effects
from refshard.engine.schedule import BLOCKING, MARKERS, Op, OpKind, PassKind, Phase, Presence, on_demand
from refshard.engine.unit import Activity, Unit
from refshard.errors import EngineError


class Pass(ABC):
    """A pass of the given ``kind``."""

    kind: PassKind

    @abstractmethod
    def expects(self, marker: Op | None) -> bool:
        """Whether ``marker``, or the end of the pass where it is None, may come now."""

    @abstractmethod
    def mark(self, marker: Op) -> None:
        """Do what is due up to ``marker``, which is expected, and issue what may start after it.

        Raises:
            EngineError: the marker's unit has no place to be gathered to.
        """

    @abstractmethod
    def end(self) -> None:
        """Do what is due after the last marker."""

    @abstractmethod
    def turned(self, kind: PassKind, scenes_of: Callable[[PassKind], Sequence["Scene"]]) -> "Pass":
        """The same pass with the rest of another ``kind``, which differs in what backward does."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is done at one marker, in order: what it needs, the marker itself, and what may be issued right after it.

    The first scene of a pass, its opening, has no marker, and neither has the last, which ends it.
    """

    marker: Op | None
    effects: tuple[Callable[[], None], ...]
    skipping: tuple[Callable[[], None], ...]

    def play(self) -> None:
        """Do it."""
        for effect in self.effects:
            effect()

    def skip(self) -> None:
        """Do it for a unit that does not begin to compute: its collectives, so that all ranks issue the same ones."""
        for effect in self.skipping:
            effect()


def cut(stream: Sequence[Op], effects: Effects) -> tuple[Scene, ...]:
    """Cut an op stream where the engine waits for a marker. What follows one and need not be awaited belongs to it."""
    awaited = BLOCKING | MARKERS
    starts = [i for i, op in enumerate(stream) if op.kind in MARKERS]
    ends = [next((i for i in range(s + 1, len(stream)) if stream[i].kind in awaited), len(stream)) for s in starts]
    first = next(i for i, op in enumerate(stream) if op.kind in awaited)
    scenes = []
    for marker_at, (start, stop) in zip([None, *starts, None], pairwise([0, first, *ends, len(stream)])):
        effects_of = [(op, effects.of(op)) for op in stream[start:stop]]
        scenes.append(
            Scene(
                None if marker_at is None else stream[marker_at],
                tuple(effect for _, effect in effects_of),
                tuple(effect for op, effect in effects_of if op.kind is not OpKind.BEGIN),
            )
        )
    return tuple(scenes)


@final
class Followed(Pass):
    """A pass in a known order: scene after scene of its op stream. Its opening is played at once.

    A unit may be left out, on some ranks or on all: its collectives are issued all the same. ``left_out`` is the first.
    """

    def __init__(self, kind: PassKind, units: Sequence[Unit], scenes: Sequence[Scene], position: int = 0) -> None:
        self.kind = kind
        self.left_out: Unit | None = None
        self._units = units
        self._scenes = scenes
        self._next = position or 1
        if position == 0:
            scenes[0].play()

    @property
    def due(self) -> Op | None:
        """The marker that comes next; None at the end."""
        return self._scenes[self._next].marker

    def expects(self, marker: Op | None) -> bool:
        return self.due == marker or self._place_of(marker) is not None

    def _place_of(self, marker: Op | None) -> int | None:
        """Where in the rest of the pass ``marker`` comes, if all that comes before can be left out."""
        for place in range(self._next, len(self._scenes)):
            due = self._scenes[place].marker
            if due == marker:
                return place
            if due is None or (due.kind is OpKind.END and not self._units[due.unit].may_end(due.phase)):
                return None
        return None

    def mark(self, marker: Op) -> None:
        self._advance(marker)

    def end(self) -> None:
        self._advance(None)

    def _advance(self, marker: Op | None) -> None:
        while self.due != marker:
            left_out = self._scenes[self._next]
            left_out.skip()
            if left_out.marker is not None and left_out.marker.kind is OpKind.BEGIN:
                self.left_out = self.left_out or self._units[left_out.marker.unit]
            self._next += 1
        self._next += 1
        self._scenes[self._next - 1].play()

    def turned(self, kind: PassKind, scenes_of: Callable[[PassKind], Sequence[Scene]]) -> Pass:
        turned = Followed(kind, self._units, scenes_of(kind), self._next)
        turned.left_out = self.left_out
        return turned


@final
class OnDemand(Pass):
    """A pass in an unknown order: each unit is gathered when it is needed. ``record``, if given, takes the markers."""

    def __init__(self, kind: PassKind, units: Sequence[Unit], effects: Effects, record: list[Op] | None = None) -> None:
        self.kind = kind
        self.record = record
        self._units = units
        self._effects = effects

    def expects(self, marker: Op | None) -> bool:
        """See :meth:`Pass.expects`: anything."""
        return True

    def mark(self, marker: Op) -> None:
        unit = self._units[marker.unit]
        if marker.kind is OpKind.BEGIN:
            self._end_others(unit)
            self._make_room(unit, marker.phase)
        facts = [unit.facts for unit in self._units]
        for op in on_demand(marker, unit.presence, self._effects.reducing, facts, self.kind):
            self._effects.execute(op)
        if self.record is not None:
            self.record.append(marker)

    def end(self) -> None:
        """See :meth:`Pass.end`: nothing is left to be done."""

    def turned(self, kind: PassKind, scenes_of: Callable[[PassKind], Sequence[Scene]]) -> Pass:
        return OnDemand(kind, self._units, self._effects, self.record)

    def _end_others(self, unit: Unit) -> None:
        """End the backward of units that have nothing more to bring and no gradient that said so."""
        for other in self._units:
            if other is not unit and other.in_backward and other.complete:
                other.on_gradients(other)

    def _make_room(self, unit: Unit, phase: Phase) -> None:
        """Free the unit's slot: another may hold it after a gather that was not used, or an unfinished backward."""
        for other in self._units:
            if other is unit or not unit.slot.overlaps(other.slot):
                continue
            if other.in_backward and not (unit.lasts or other.activity is Activity.RECOMPUTED):
                # What it still lacks comes later, if at all, and it begins again then.
                other.on_gradients(other)
            if other.presence is not Presence.SHARDED:
                self._check_free(unit, other)
                self._effects.execute(Op(OpKind.RELEASE, other.index, phase))

    def _check_free(self, unit: Unit, other: Unit) -> None:
        if other.exposed:
            raise EngineError(
                f"unit '{unit.name}' needs the slot that unit '{other.name}' still holds: in step 0 one ended before "
                "the other began, but now they run nested in each other; shard with mode='fsdp', or "
                "make them one block"
            )
