"""Unsharded parameters and gradients share memory if they are never in use at the same time.

An op stream says when each buffer is in use. Buffers that are not in use at the same time share a *column*, which is
one allocation. Columns are found by interval colouring: parameters first and then gradients, the largest first, each
joins the first column of about its size that is free whenever it is in use, or opens a new one. Units that take turns
in a slot of a ring do so together. ``Arena.bound``, the most that is in use at one time, tells how good a plan is.

Columns are separate allocations because the allocator can fit each into a gap between activations, but rarely one
block of their total size. Those with few members are freed after each use, and others when forward or backward ends,
so that they are not there when activations peak.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from refshard.engine.schedule import Op, OpKind, Rings

ALIGNMENT = 512
"""Bytes: a unit's flat buffers start on multiples of it, as blocks of CUDA's caching allocator do."""

IDLE = 0.1
"""A buffer joins a column only if it leaves at most this part of it idle."""
FEW = 4
"""Columns with at most this many members, mostly those of the embedding and the head, are freed after each use."""
Lasting = Literal["always", "per pass", "per use"]
"""How long memory stays allocated: always; until forward or backward ends and it is unused; or until it is unused."""
Span = tuple[int, int]
"""From one op up to another, half-open."""


@dataclass(slots=True)
class Column:
    """An allocation of ``nbytes``, and the units with ``parameters`` and with ``gradients`` that take turns in it, each
    during some of ``spans``.
    """

    nbytes: int
    parameters: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def lasting(self) -> Lasting:
        """How long it stays allocated, unless it is kept always."""
        return "per pass" if len(self.parameters) + len(self.gradients) > FEW else "per use"

    def has_room(self, nbytes: int, spans: Iterable[Span]) -> bool:
        """Whether a buffer of this size fits well enough, and nothing is held during ``spans``."""
        fits = (1 - IDLE) * self.nbytes <= nbytes <= self.nbytes
        return fits and not any(begin < b and a < end for begin, end in spans for a, b in self.spans)


@dataclass(frozen=True, slots=True)
class Arena:
    """All columns. ``bound`` is the most bytes that are held at one time."""

    columns: tuple[Column, ...]
    bound: int

    @property
    def nbytes(self) -> int:
        """Bytes of all columns together."""
        return sum(column.nbytes for column in self.columns)


def plan_arena(
    streams: Sequence[Sequence[Op]], rings: Rings, parameters: Mapping[int, int], gradients: Mapping[int, int], *,
    mixed: bool,
) -> Arena:  # fmt: skip
    """Plan columns for passes that follow any of ``streams``. ``parameters`` and ``gradients`` map units to bytes.
    Without ``mixed``, parameters and gradients never share a column.
    """
    gathered = _held(streams, OpKind.GATHER, (OpKind.RELEASE,))
    reduced = _held(streams, OpKind.REDUCE, (OpKind.COMBINE, OpKind.FINISH))
    columns: list[Column] = []
    slots: dict[object, list[int]] = {}
    for unit in parameters:
        slots.setdefault(rings.get(unit, unit), []).append(unit)
    for units in sorted(slots.values(), key=lambda units: -parameters[units[0]]):
        spans = [span for unit in units for span in gathered.get(unit, ())]
        column = _column(columns, parameters[units[0]], spans)
        column.parameters += units
    shared = columns if mixed else []
    for unit in sorted(gradients, key=lambda unit: -gradients[unit]):
        before = len(shared)
        _column(shared, gradients[unit], reduced.get(unit, ())).gradients.append(unit)
        if not mixed and len(shared) > before:
            columns.append(shared[-1])
    held = [(parameters[u], spans) for u, spans in gathered.items() if u in parameters]
    held += [(gradients[u], spans) for u, spans in reduced.items() if u in gradients]
    return Arena(tuple(columns), _most_held(held))


def _column(columns: list[Column], nbytes: int, spans: Sequence[Span]) -> Column:
    """The first column that has room, or a new one, added to ``columns``. It is held during ``spans`` from now on."""
    column = next((column for column in columns if column.has_room(nbytes, spans)), None)
    if column is None:
        column = Column(nbytes)
        columns.append(column)
    column.spans += spans
    return column


def _most_held(buffers: Iterable[tuple[int, Sequence[Span]]]) -> int:
    """The most bytes that are held at one time."""
    changes = sorted(
        change for nbytes, spans in buffers for begin, end in spans for change in ((begin, nbytes), (end, -nbytes))
    )
    most = now = 0
    for _, change in changes:  # At the same place, what is freed comes first.
        now += change
        most = max(most, now)
    return most


def _held(streams: Sequence[Sequence[Op]], opens: OpKind, closes: tuple[OpKind, ...]) -> dict[int, list[Span]]:
    """When each unit's buffer is held: from an op of the kind ``opens`` to the next of a kind in ``closes``, or to the
    end of the stream. Streams follow each other in time.
    """
    spans: dict[int, list[Span]] = {}
    start = 0
    for stream in streams:
        since: dict[int, int] = {}
        for place, op in enumerate(stream, start):
            if op.kind is opens:
                since[op.unit] = place
            elif op.kind in closes and op.unit in since:
                spans.setdefault(op.unit, []).append((since.pop(op.unit), place))
        start += len(stream)
        for unit, begin in since.items():
            spans.setdefault(unit, []).append((begin, start))
    return spans


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
