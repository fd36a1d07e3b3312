"""The op stream of one training step: which unit's collective is issued, awaited and freed, and when.

Compute is given as *markers*: BEGIN and END of each unit in forward and in backward, in the order of execution. Around
them :func:`build` places the communication, by three rules:

1. A gather is issued ``prefetch`` units ahead of its use, but never before its slot's last occupant has ended.
2. Storage is released when its unit has ended, unless the prefetch would gather it again at once.
3. A unit's reduce-scatter starts when its last gradient is there, and is awaited before the backward of the unit
   ``gradient_slots`` places later begins, since that one writes where it read.

The engine walks the stream marker by marker, so every rank issues the same collectives in the same order; the
simulator prices it; a trace is held against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from refshard.plan.placement import Mode

Phase = Literal["forward", "backward"]


class OpKind(StrEnum):
    """What an op does to its unit."""

    GATHER = "gather"
    """Issue the all-gather into the unit's parameter slot."""
    WAIT = "wait"
    """Await that all-gather."""
    BEGIN = "begin"
    """Marker: the unit starts to compute."""
    END = "end"
    """Marker: the unit has finished computing (in backward: all its gradients are there)."""
    RELEASE = "release"
    """Give up the unit's parameter slot's content."""
    REDUCE = "reduce"
    """Issue the reduce-scatter of the unit's gradient slot."""
    FINISH = "finish"
    """Await that reduce-scatter, add its result to the gradient shard, give up the gradient slot."""


MARKERS = frozenset((OpKind.BEGIN, OpKind.END))
BLOCKING = frozenset((OpKind.WAIT, OpKind.FINISH))


@dataclass(frozen=True, slots=True)
class Op:
    """One op on the unit with index ``unit``."""

    kind: OpKind
    unit: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.kind}({self.unit}, {self.phase})"


SlotKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slots:
    """Which unit uses which slot of which ring; units with the same key take turns in one pre-allocated buffer.

    A key is ``(size, place)``: the place in the ring of buffers of ``size`` elements. A unit without a key has
    transient storage of its own.
    """

    parameters: Mapping[int, SlotKey]
    gradients: Mapping[int, SlotKey]


@dataclass(frozen=True, slots=True)
class _Use:
    """One span of compute of a unit: indices of its BEGIN and END in the markers."""

    unit: int
    phase: Phase
    begin: int
    end: int


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


def assign_slots(markers: Sequence[Op], sizes: Sequence[int], mode: Mode) -> Slots:
    """Give the repeated size classes a ring of ``mode.ring_slots`` each, in order of first use.

    A unit whose compute overlaps that of another unit in the same slot (one that encloses others, say) is left out:
    it keeps transient storage. ``sizes`` is each unit's ``numel``.
    """
    if mode.storage != "ring":
        return Slots({}, {})
    uses = _uses(markers)
    in_order = list(dict.fromkeys(u.unit for u in uses))
    turns: dict[int, tuple[int, int]] = {}
    for size in dict.fromkeys(sizes[u] for u in in_order):
        members = [u for u in in_order if sizes[u] == size and not _encloses_another(u, uses)]
        if len(members) > mode.ring_slots:
            turns.update({unit: (size, turn) for turn, unit in enumerate(members)})
    return Slots(
        parameters={unit: (size, turn % mode.ring_slots) for unit, (size, turn) in turns.items()},
        gradients={unit: (size, turn % mode.gradient_slots) for unit, (size, turn) in turns.items()},
    )


def build(markers: Sequence[Op], slots: Slots, mode: Mode) -> tuple[Op, ...]:
    """Place the communication of one step around ``markers`` (all forward before all backward)."""
    uses = _uses(markers)
    before: dict[int, list[Op]] = {i: [] for i in range(len(markers) + 1)}
    awaited: dict[int, list[Op]] = {i: [] for i in range(len(markers) + 1)}
    for position, use in enumerate(uses):
        kept = _previous_residency(position, uses, slots, mode)
        if not kept:
            issue = _issue_position(position, uses, slots, mode)
            before[issue].append(Op(OpKind.GATHER, use.unit, use.phase))
            awaited[use.begin].append(Op(OpKind.WAIT, use.unit, use.phase))
    for position, use in enumerate(uses):
        if not _kept_until_next_use(position, uses, slots, mode):
            # A release comes before the gathers at its place: one of them may take the freed storage.
            before[use.end + 1].insert(0, Op(OpKind.RELEASE, use.unit, use.phase))
        if use.phase == "backward":
            before[use.end + 1].append(Op(OpKind.REDUCE, use.unit, use.phase))
            awaited[_finish_position(position, uses, slots, mode, len(markers))].append(
                Op(OpKind.FINISH, use.unit, use.phase)
            )
    ops: list[Op] = []
    for index in range(len(markers) + 1):
        ops += [*before[index], *awaited[index], *markers[index : index + 1]]
    return tuple(ops)


def on_demand(marker: Op, gathered: bool | None, reducing: Sequence[int], mode: Mode) -> tuple[Op, ...]:
    """The ops that ``marker`` asks for when the order of execution is not known: nothing is prefetched.

    ``gathered`` says whether the unit is unsharded now, None while its gather is under way; ``reducing`` lists the
    units whose reduce-scatter is under way, oldest first.
    """
    unit, phase = marker.unit, marker.phase
    if marker.kind is OpKind.BEGIN:
        gather = (Op(OpKind.GATHER, unit, phase),) if gathered is False else ()
        wait = (Op(OpKind.WAIT, unit, phase),) if not gathered else ()
        return (*gather, *wait, marker)
    if phase == "forward":
        return (marker, Op(OpKind.RELEASE, unit, phase))
    # This unit's reduce and the next unit's gradients come on top of those that stay.
    done = reducing[: max(0, len(reducing) + 2 - mode.gradient_slots)]
    return (
        marker,
        Op(OpKind.RELEASE, unit, phase),
        *(Op(OpKind.FINISH, u, phase) for u in done),
        Op(OpKind.REDUCE, unit, phase),
    )


def forward_only(markers: Sequence[Op]) -> tuple[Op, ...]:
    """The markers of the forward pass alone, as an evaluation under ``no_grad`` meets them."""
    return tuple(m for m in markers if m.phase == "forward")


def _uses(markers: Sequence[Op]) -> list[_Use]:
    """Spans in order of their BEGIN. A span that never ends lasts to the end of its phase."""
    uses = []
    for begin, marker in enumerate(markers):
        if marker.kind is not OpKind.BEGIN:
            continue
        closing = Op(OpKind.END, marker.unit, marker.phase)
        end = next((i for i in range(begin, len(markers)) if markers[i] == closing), None)
        if end is None:
            end = max(i for i, m in enumerate(markers) if m.phase == marker.phase)
        uses.append(_Use(marker.unit, marker.phase, begin, end))
    return uses


def _conflict(keys: Mapping[int, SlotKey], a: int, b: int) -> bool:
    """Whether two units take turns in one slot, so that they cannot both hold it at once."""
    return a != b and a in keys and keys[a] == keys.get(b)


def _encloses_another(unit: int, uses: Sequence[_Use]) -> bool:
    mine = [u for u in uses if u.unit == unit]
    return any(m.begin < other.begin < m.end for m in mine for other in uses if other.unit != unit)


def _issue_position(position: int, uses: Sequence[_Use], slots: Slots, mode: Mode) -> int:
    """Index of the marker before which the gather for ``uses[position]`` is issued."""
    ahead = position - mode.prefetch
    wanted = uses[ahead].begin if ahead >= 0 else 0
    unit = uses[position].unit
    own = [u.end + 1 for u in uses[:position] if u.unit == unit]
    occupants = [u.end + 1 for u in uses[:position] if _conflict(slots.parameters, u.unit, unit)]
    return max([wanted, *own, *occupants])


def _previous_residency(position: int, uses: Sequence[_Use], slots: Slots, mode: Mode) -> bool:
    """Whether ``uses[position]`` finds its unit still unsharded from the use before."""
    unit = uses[position].unit
    previous = next((p for p in range(position - 1, -1, -1) if uses[p].unit == unit), None)
    return previous is not None and _kept_until_next_use(previous, uses, slots, mode)


def _kept_until_next_use(position: int, uses: Sequence[_Use], slots: Slots, mode: Mode) -> bool:
    """Whether the unit stays unsharded after ``uses[position]`` until its next use."""
    use = uses[position]
    following = next((p for p in range(position + 1, len(uses)) if uses[p].unit == use.unit), None)
    if following is None:
        return False
    if use.unit in slots.parameters:
        return not any(_conflict(slots.parameters, u.unit, use.unit) for u in uses[position + 1 : following])
    return _issue_position(following, uses, slots, mode) <= use.end + 1


def _finish_position(position: int, uses: Sequence[_Use], slots: Slots, mode: Mode, end_of_step: int) -> int:
    """Index of the marker before which the reduce-scatter of ``uses[position]`` is awaited."""
    later = position + mode.gradient_slots
    by_depth = uses[later].begin if later < len(uses) else end_of_step
    own_end = uses[position].end + 1
    same_slot = [u.begin for u in uses[position + 1 :] if _conflict(slots.gradients, u.unit, uses[position].unit)]
    return max(own_end, min([by_depth, *same_slot]))
