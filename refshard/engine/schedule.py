"""The op stream of one training step: which unit's collective is issued, awaited and freed, and when.

Compute is given as *markers*: BEGIN and END of each unit in forward and in backward, in the order of execution. Around
them :func:`build` places the communication, by three rules:

1. A gather is issued ``prefetch`` units ahead of its use, but never before its slot's last occupant has ended. With a
   ring, units outside of it are gathered one unit earlier still.
2. Storage is released when its unit has ended, unless the prefetch would gather it again at once. A unit stays in a
   ring from forward to backward if no other needs its slot in between, and either its next gather would be issued
   before backward begins, or the ring is to be kept.
3. A unit's reduction starts when its last gradient is there, and is awaited before the unit ``gradient_slots`` places
   later ends its backward and is reduced itself. It is issued after the gathers at the same place, which are needed
   sooner. With a ring, a unit outside of it (embedding, head) is reduced before those gathers, because its gradients
   are large. Over two axes a reduction has two legs: a reduce-scatter, and an all-reduce of the shard that is issued
   where a single leg would have been awaited.

The engine walks the stream marker by marker, so every rank issues the same collectives in the same order. The
strategies announce them from it, and a trace is checked against that.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from refshard.engine.placement import Mode

Phase = Literal["forward", "backward"]


class OpKind(StrEnum):
    """What an op does to its unit."""

    GATHER = "gather"
    """Issue the all-gather into the unit's parameter slot, unless that holds the current parameters."""
    WAIT = "wait"
    """Await that all-gather."""
    BEGIN = "begin"
    """Marker: the unit starts to compute."""
    END = "end"
    """Marker: the unit has finished computing (in backward: all its gradients are there)."""
    RELEASE = "release"
    """Give up the unit's parameter slot's content."""
    REDUCE = "reduce"
    """Issue the reduction of the unit's gradient slot over the shard axis."""
    COMBINE = "combine"
    """Await that, release the gradient slot, and issue the all-reduce of the result over the replicate axis."""
    FINISH = "finish"
    """Await the last leg, add its result to the gradient shard, release the gradient slot if a COMBINE has not."""


OUTSIDE_AHEAD = 1
"""How many units earlier a unit outside of a ring is gathered than one inside. It waits for no slot, and is large: the
head's gather would outlast the one block that runs before it.
"""

MARKERS = frozenset((OpKind.BEGIN, OpKind.END))
BLOCKING = frozenset((OpKind.WAIT, OpKind.COMBINE, OpKind.FINISH))


class Op(NamedTuple):
    """One op on the unit with index ``unit``."""

    kind: OpKind
    unit: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.kind}({self.unit}, {self.phase})"


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What the schedule has to know of a unit.

    ``mode`` is the unit's own: those of a model may differ. ``size_class`` is equal for units with interchangeable
    buffers. ``trained`` says that it has gradients to reduce, ``read_in_backward`` that its backward reads the
    parameters (that of an embedding does not). ``legs`` is 2 where shards are replicated too.
    """

    mode: Mode
    size_class: Hashable
    trained: bool = True
    read_in_backward: bool = True
    legs: int = 1

    def reduces(self, kind: "PassKind") -> bool:
        """Whether the unit's gradients are reduced in a pass of this kind."""
        return kind.training and self.trained and (kind.reduce or self.mode.gradients == "shard")


@dataclass(frozen=True, slots=True)
class PassKind:
    """What one pass has to communicate.

    ``training`` passes have a backward; one without ``forward`` is that alone, where the pass before was another
    microbatch's backward, as pipelines have it. ``reduce`` is false where gradients that add up unsharded wait for a
    later microbatch.
    """

    training: bool = True
    forward: bool = True
    reduce: bool = True


SlotKey = tuple[Hashable, int]
Rings = Mapping[int, SlotKey]
"""Which unit's parameters use which slot of which ring, ``(size class, place in the ring)``: units with the same key
take turns. A unit without a key is outside of all rings, and waits for no other's.
"""


@dataclass(frozen=True, slots=True)
class _Use:
    """One span of compute of a unit: indices of its BEGIN and END in the markers, and whether it reads parameters."""

    unit: int
    phase: Phase
    begin: int
    end: int
    reads: bool


def chain_markers(n_units: int, *, enclosing: bool = False) -> tuple[Op, ...]:
    """Markers of a chain of units: forward in order, backward in reverse.

    With ``enclosing``, unit 0 computes first and last and so encloses the others, as a tied embedding and head do.
    """
    first = 1 if enclosing else 0
    forward = [Op(k, u, "forward") for u in range(first, n_units) for k in (OpKind.BEGIN, OpKind.END)]
    backward = [Op(k, u, "backward") for u in reversed(range(first, n_units)) for k in (OpKind.BEGIN, OpKind.END)]
    if enclosing:
        forward = [Op(OpKind.BEGIN, 0, "forward"), *forward, Op(OpKind.END, 0, "forward")]
        backward = [Op(OpKind.BEGIN, 0, "backward"), *backward, Op(OpKind.END, 0, "backward")]
    return tuple(forward + backward)


def assign_rings(markers: Sequence[Op], facts: Sequence[UnitFacts]) -> Rings:
    """Give the repeated size classes a ring of as many slots as their mode says, in order of first use.

    A unit whose compute overlaps that of another unit in the same slot (one that encloses others, say) is left out.
    ``facts`` are by unit.
    """
    uses = _uses(markers, facts)
    classes: dict[tuple[Mode, Hashable], list[int]] = {}
    for unit in dict.fromkeys(u.unit for u in uses if facts[u.unit].mode.storage == "ring"):
        if not _encloses_another(unit, uses):
            classes.setdefault((facts[unit].mode, facts[unit].size_class), []).append(unit)
    turns: dict[int, SlotKey] = {}
    for (mode, size), members in classes.items():
        if len(members) > mode.ring_slots:
            turns.update({unit: (size, turn % mode.ring_slots) for turn, unit in enumerate(members)})
    return turns


def build(
    markers: Sequence[Op],
    rings: Rings,
    facts: Sequence[UnitFacts],
    kind: PassKind = PassKind(),
) -> tuple[Op, ...]:
    """Place the communication of one pass around its part of ``markers`` (all forward before all backward)."""
    markers = [m for m in markers if (kind.forward if m.phase == "forward" else kind.training)]
    before: dict[int, list[Op]] = {i: [] for i in range(len(markers) + 1)}
    awaited: dict[int, list[Op]] = {i: [] for i in range(len(markers) + 1)}
    reading = [u for u in _uses(markers, facts) if u.reads]
    for position, use in enumerate(reading):
        if not _previous_residency(position, reading, rings, facts):
            issue = _issue_position(position, reading, rings, facts)
            before[issue].append(Op(OpKind.GATHER, use.unit, use.phase))
            awaited[use.begin].append(Op(OpKind.WAIT, use.unit, use.phase))
        if not _kept_until_next_use(position, reading, rings, facts):
            # A release comes before the gathers at its place: one of them may take the freed storage.
            before[use.end + 1].insert(0, Op(OpKind.RELEASE, use.unit, use.phase))
    _place_reductions(before, awaited, markers, rings, facts, kind)
    ops: list[Op] = []
    for index in range(len(markers) + 1):
        ops += [*before[index], *awaited[index], *markers[index : index + 1]]
    return tuple(ops)


def _place_reductions(
    before: dict[int, list[Op]],
    awaited: dict[int, list[Op]],
    markers: Sequence[Op],
    rings: Rings,
    facts: Sequence[UnitFacts],
    kind: PassKind,
) -> None:
    uses = [u for u in _uses(markers, facts) if u.phase == "backward" and facts[u.unit].reduces(kind)]
    slot_free = [_finish_position(position, uses, facts, len(markers)) for position in range(len(uses))]
    for use, awaited_at, following in zip(uses, slot_free, [*slot_free[1:], len(markers)]):
        here = before[use.end + 1]
        first = sum(op.kind is OpKind.RELEASE for op in here) if _outside(use.unit, rings, facts) else len(here)
        here.insert(first, Op(OpKind.REDUCE, use.unit, use.phase))
        if facts[use.unit].legs == 1:
            awaited[awaited_at].append(Op(OpKind.FINISH, use.unit, use.phase))
        else:
            awaited[awaited_at].append(Op(OpKind.COMBINE, use.unit, use.phase))
            awaited[max(awaited_at, following)].append(Op(OpKind.FINISH, use.unit, use.phase))


class Presence(StrEnum):
    """Where a unit's parameters are, to a scheduler that does not know the order."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


def on_demand(
    marker: Op, presence: Presence, reducing: Sequence[int], facts: Sequence[UnitFacts], kind: PassKind
) -> tuple[Op, ...]:
    """The ops that ``marker`` asks for when the order of execution is not known: nothing is prefetched.

    ``reducing`` lists the units with a reduction in flight, oldest first; ``facts`` are by unit.
    """
    unit, phase, mode = marker.unit, marker.phase, facts[marker.unit].mode
    if marker.kind is OpKind.BEGIN:
        if phase == "backward" and not facts[unit].read_in_backward:
            return (marker,)
        gather = (Op(OpKind.GATHER, unit, phase),) if presence is Presence.SHARDED else ()
        wait = (Op(OpKind.WAIT, unit, phase),) if presence is not Presence.UNSHARDED else ()
        return (*gather, *wait, marker)
    kept = mode.parameters == "replicate" or (phase == "forward" and mode.storage == "persistent" and kind.training)
    release = () if kept else (Op(OpKind.RELEASE, unit, phase),)
    if phase == "forward" or not facts[unit].reduces(kind):
        return (marker, *release)
    done = reducing[: max(0, len(reducing) + 1 - mode.gradient_slots)]  # this unit's reduction comes on top
    return (
        marker,
        *release,
        *(Op(k, u, phase) for u in done for k in _LAST_LEGS[-facts[u].legs :]),
        Op(OpKind.REDUCE, unit, phase),
    )


_LAST_LEGS = (OpKind.COMBINE, OpKind.FINISH)
"""How reductions of two legs are brought to an end; those of one have the last only."""


def _uses(markers: Sequence[Op], facts: Sequence[UnitFacts]) -> list[_Use]:
    """Spans in order of their BEGIN. A span that never ends lasts to the end of its phase."""
    uses = []
    for begin, marker in enumerate(markers):
        if marker.kind is not OpKind.BEGIN:
            continue
        closing = Op(OpKind.END, marker.unit, marker.phase)
        end = next((i for i in range(begin, len(markers)) if markers[i] == closing), None)
        if end is None:
            end = max(i for i, m in enumerate(markers) if m.phase == marker.phase)
        reads = marker.phase == "forward" or facts[marker.unit].read_in_backward
        uses.append(_Use(marker.unit, marker.phase, begin, end, reads))
    return uses


def _outside(unit: int, keys: Mapping[int, SlotKey], facts: Sequence[UnitFacts]) -> bool:
    """Whether a unit is outside of all rings: it has its own storage, and waits for no other unit's."""
    return facts[unit].mode.storage == "ring" and unit not in keys


def _conflict(keys: Mapping[int, SlotKey], a: int, b: int) -> bool:
    """Whether two units take turns in one slot, so that they cannot both hold it at once."""
    return a != b and a in keys and keys[a] == keys.get(b)


def _encloses_another(unit: int, uses: Sequence[_Use]) -> bool:
    mine = [u for u in uses if u.unit == unit]
    return any(m.begin < other.begin < m.end for m in mine for other in uses if other.unit != unit)


def _issue_position(position: int, uses: Sequence[_Use], rings: Rings, facts: Sequence[UnitFacts]) -> int:
    """Index of the marker before which the gather for ``uses[position]`` is issued."""
    unit = uses[position].unit
    ahead = position - facts[unit].mode.prefetch - (OUTSIDE_AHEAD if _outside(unit, rings, facts) else 0)
    wanted = uses[ahead].begin if ahead >= 0 else 0
    slot = rings.get(unit)
    freed = [u.end + 1 for u in uses[:position] if u.unit == unit or (slot and rings.get(u.unit) == slot)]
    return max([wanted, *freed])


def _previous_residency(position: int, uses: Sequence[_Use], rings: Rings, facts: Sequence[UnitFacts]) -> bool:
    """Whether ``uses[position]`` finds its unit still unsharded from the use before."""
    unit = uses[position].unit
    previous = next((p for p in range(position - 1, -1, -1) if uses[p].unit == unit), None)
    return previous is not None and _kept_until_next_use(previous, uses, rings, facts)


def _kept_until_next_use(position: int, uses: Sequence[_Use], rings: Rings, facts: Sequence[UnitFacts]) -> bool:
    """Whether the unit stays unsharded after ``uses[position]`` until its next use."""
    use = uses[position]
    mode = facts[use.unit].mode
    if mode.parameters == "replicate":
        return True
    following = next((p for p in range(position + 1, len(uses)) if uses[p].unit == use.unit), None)
    if following is None:
        return False
    if mode.storage == "persistent":
        return True
    issue = _issue_position(following, uses, rings, facts)
    stays = use.unit in rings and not any(_conflict(rings, u.unit, use.unit) for u in uses[position + 1 : following])
    turn = next((u.begin for u in uses if u.phase == "backward"), 0)
    return issue <= use.end + 1 or (stays and (mode.keep or issue <= turn))


def _finish_position(position: int, uses: Sequence[_Use], facts: Sequence[UnitFacts], end_of_step: int) -> int:
    """Index of the marker before which the gradients of ``uses[position]`` must be reduced."""
    mode = facts[uses[position].unit].mode
    if mode.gradient_storage == "persistent":
        return end_of_step
    later = position + mode.gradient_slots
    return max(uses[position].end + 1, uses[later].end if later < len(uses) else end_of_step)
