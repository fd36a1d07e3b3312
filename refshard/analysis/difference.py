"""How the steps of one job differ from those of another: pieces of work that own time are matched.

The closest descriptions are matched first: the same operator in the same unit and phase with the same inputs; with
inputs of another type, or as another library's operator; in the same order within its unit; the same operator in the
same unit; in the same phase. Unmatched work is *gone* or *new*. All parts add up to the change of the mean step.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

import msgspec

from refshard.analysis.analyse import Analysis
from refshard.analysis.attribution import IDLE, Attribution, Work, family
from refshard.analysis.figures import TraceFigures
from refshard.errors import TraceError
from refshard.events.timeline import Kind
from refshard.quantities import format_bytes

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_APART_OF_TIME, _APART_OF_SPREAD, _APART_OF_STEP, _FEW_UNITS = 0.25, 5, 0.001, 3
_MOST_KERNELS = 3
_CAUSES = {
    "launch": "launch-bound", "call": "blocked call", "dependency": "waiting for a stream", "unknown": "cause unknown",
}  # fmt: skip
"""Causes of idle time in labels, where not by their own names."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One work in two jobs: nanoseconds and spans per step, as means over the steps and then over the ranks of each.

    ``delta_ns`` is B's less A's. ``new`` is what only B does, ``gone`` what only A does; else ``matched`` says by what
    the two were found to be the same. Fields of ``work`` that differ among what was matched are empty, or name both
    sides. ``units`` units were summed. ``a_kernels`` and ``b_kernels`` ran for it, the longest first, up to three.
    ``most_rank`` is the rank on which it changed most, by ``most_ns``; None where ranks are not paired.
    """

    kind: str
    label: str
    work: Work
    a_ns: float
    b_ns: float
    delta_ns: float
    a_count: float
    b_count: float
    new: bool
    gone: bool
    matched: str
    units: int
    a_kernels: tuple[str, ...]
    b_kernels: tuple[str, ...]
    most_rank: int | None
    most_ns: float | None


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step of one rank that both jobs have, in nanoseconds."""

    rank: int
    a_ns: float
    b_ns: float
    delta_ns: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The mean steps of two jobs, means over their ranks, and the changes that account for ``delta_ns``.

    ``changes`` add up to ``delta_ns``, the greatest first. ``ranks`` are the ranks in both jobs, by number; empty
    where the mean ranks are compared.
    """

    a_ns: float
    b_ns: float
    delta_ns: float
    changes: tuple[Change, ...]
    ranks: tuple[RankChange, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Part:
    """Time of a work on each rank, and its spans on all, in units of 1 / :attr:`_Scale.steps` of a step."""

    ns: list[int]
    count: int = 0
    kernels: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, other: "_Part") -> None:
        self.ns = [mine + more for mine, more in zip(self.ns, other.ns)]
        self.count += other.count
        for name, ns in other.kernels.items():
            self.kernels[name] += ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """What whole numbers are divided by, so that nothing is rounded before the end."""

    steps: int
    ranks: tuple[int, int]
    names: tuple[int, ...]

    def mean(self, total: int, side: int) -> float:
        return total / (self.steps * self.ranks[side])

    def change(self, a: int, b: int) -> float:
        return (b * self.ranks[0] - a * self.ranks[1]) / (self.steps * self.ranks[0] * self.ranks[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What was matched, or is only on one side, where the other's works are none."""

    work: Work
    matched: str
    a: _Part
    b: _Part
    sides: tuple[bool, bool] = (True, True)
    units: int = 1


_Side = dict[Work, _Part]
_Key = Callable[[Work], tuple[object, ...]]
_LEVELS: tuple[tuple[str, _Key], ...] = (
    ("inputs", lambda w: (w.kind, w.unit, w.phase, w.operator, w.bound, w.dims, w.dtype, w.bytes, w.group)),
    ("shapes", lambda w: (w.kind, w.unit, w.phase, family(w.operator), w.bound, w.dims, w.bytes)),
    ("order", lambda w: (w.kind, w.unit, w.phase, family(w.operator), w.bound, w.ordinal)),
    ("unit", lambda w: (w.kind, w.unit, w.phase, family(w.operator), w.bound)),
    ("operator", lambda w: (w.kind, w.phase, family(w.operator), w.bound)),
)
"""What two works are matched by, the closest match first."""


def difference(a: Sequence[Attribution], b: Sequence[Attribution], ranks: Sequence[int] = ()) -> Difference:
    """What accounts for the change of the mean step from job ``a`` to job ``b``, each given rank by rank.

    ``ranks`` are the numbers of ranks in the order of both; without them the mean rank of A is compared with that of B.
    Units that are numbered and change alike are summed, as ``layers.*``.

    Raises:
        ValueError: a trace has no step, a side has no trace, or there are ``ranks`` and not as many traces on a side.
    """
    for name, side in (("A", a), ("B", b)):
        if not side or any(not one.steps for one in side):
            raise ValueError(f"trace {name} has no step, so it has no mean step to compare")
        if ranks and len(side) != len(ranks):
            raise ValueError(f"{name} must have a trace for each of {len(ranks)} ranks, got {len(side)}")
    scale = _Scale(steps=math.lcm(*(one.steps for one in (*a, *b))), ranks=(len(a), len(b)), names=tuple(ranks))
    before, after = ([one.span_ns * (scale.steps // one.steps) for one in side] for side in (a, b))
    rows = _matched(*_alike(_side(a, scale), _side(b, scale)), scale)
    longer = max(scale.mean(sum(before), 0), scale.mean(sum(after), 1))
    changes = [_change(row, scale) for row in _summed(rows, scale, longer)]
    return Difference(
        a_ns=scale.mean(sum(before), 0), b_ns=scale.mean(sum(after), 1), delta_ns=scale.change(sum(before), sum(after)),
        changes=tuple(sorted(changes, key=lambda c: (-abs(c.delta_ns), c.kind, c.label))),
        ranks=tuple(
            RankChange(rank=rank, a_ns=x / scale.steps, b_ns=y / scale.steps, delta_ns=(y - x) / scale.steps)
            for rank, x, y in zip(ranks, before, after)
        ),
    )  # fmt: skip


def mean_steps(side: Sequence[Attribution]) -> list[float]:
    """Nanoseconds of each step that all ranks of a side have, in order, as a mean over the ranks."""
    return [fmean(of_step) for of_step in zip(*(one.step_ns for one in side))]


def _side(side: Sequence[Attribution], scale: _Scale) -> _Side:
    found: _Side = {}
    for place, one in enumerate(side):
        times = scale.steps // one.steps
        for owner in one.owners:
            part = found.setdefault(owner.work, _Part(ns=[0] * len(side)))
            part.ns[place] += owner.ns * times
            part.count += owner.count * times
            for name, ns in owner.kernels:
                part.kernels[name] += ns
    return found


def _alike(a: _Side, b: _Side) -> tuple[_Side, _Side]:
    """Both without phases, if one of them tells none."""
    if all(any(work.phase for work in side) for side in (a, b)):
        return a, b
    found: tuple[_Side, _Side] = ({}, {})
    for side, without in zip((a, b), found):
        for work, part in side.items():
            if (same := without.setdefault(msgspec.structs.replace(work, phase=None), part)) is not part:
                same.add(part)
    return found


def _matched(a: _Side, b: _Side, scale: _Scale) -> list[_Row]:
    """A row for what both do, level by level, and for what only one does."""
    rows, sides = list[_Row](), (dict(a), dict(b))
    for matched, key in _LEVELS:
        of_a, of_b = (_grouped(side, key) for side in sides)
        both = [one for one in of_a if one in of_b]
        if matched == "order":  # of calls that are as many on both sides, the n-th of one is the n-th of the other
            ordinals: list[dict[object, set[object]]] = [defaultdict(set), defaultdict(set)]
            for found, groups in zip(ordinals, (of_a, of_b)):
                for one in groups:
                    found[one[:-1]].add(one[-1])
            both = [one for one in both if one[-1] is not None and ordinals[0][one[:-1]] == ordinals[1][one[:-1]]]
        for one in both:
            work = _common(of_a[one], of_b[one], ordinal=matched == "order")
            parts = [_sum([side.pop(w) for w in of[one]], scale, place)
                     for place, (side, of) in enumerate(zip(sides, (of_a, of_b)))]  # fmt: skip
            rows.append(_Row(work=work, matched=matched, a=parts[0], b=parts[1]))
    for place, side in enumerate(sides):  # what only one does, calls of one operator with like inputs together
        for works in _grouped(side, _LEVELS[0][1]).values():
            parts = [_sum([], scale, 0), _sum([], scale, 1)]
            parts[place] = _sum([side[w] for w in works], scale, place)
            rows.append(
                _Row(work=_common(works, works), matched="", a=parts[0], b=parts[1], sides=(place == 0, place == 1))
            )
    return rows


def _grouped(side: _Side, key: _Key) -> dict[tuple[object, ...], list[Work]]:
    found = defaultdict(list)
    for work in side:
        found[key(work)].append(work)
    return found


def _sum(parts: Iterable[_Part], scale: _Scale, place: int) -> _Part:
    total = _Part(ns=[0] * scale.ranks[place])
    for part in parts:
        total.add(part)
    return total


def _common(a: Sequence[Work], b: Sequence[Work], *, ordinal: bool = False) -> Work:
    """What is the same of all works; of inputs that are one on each side, both."""
    first, every = a[0], (*a, *b)

    def same(name: str) -> object:
        return getattr(first, name) if len({getattr(work, name) for work in every}) == 1 else None

    def both(name: str) -> str:
        mine, theirs = ({getattr(work, name) or "" for work in side} for side in (a, b))
        if len(mine) > 1 or len(theirs) > 1:
            return ""
        (x,), (y,) = mine, theirs
        return x if x == y else f"{x or '?'} -> {y or '?'}"

    return msgspec.structs.replace(
        first, operator=both("operator") or family(first.operator), unit=same("unit"), dims=both("dims"),
        dtype=both("dtype"), ordinal=same("ordinal") if ordinal else None, bytes=same("bytes"),
        group=both("group") or None, by_name=any(work.by_name for work in every),
    )  # fmt: skip


def _summed(rows: Iterable[_Row], scale: _Scale, step: float) -> list[_Row]:
    """The same rows with numbered units that change alike as one; ``step`` is the longer side's, in nanoseconds."""
    alike, found = defaultdict(list), []
    for row in rows:
        general = None if row.work.unit is None else _NUMBER.sub("*", row.work.unit)
        alike[msgspec.structs.replace(row.work, unit=general), row.matched, row.sides].append(row)
    for (work, matched, sides), members in alike.items():
        apart = _apart(members, scale, step)
        together = [row for row, is_apart in zip(members, apart) if not is_apart]
        found += [row for row, is_apart in zip(members, apart) if is_apart]
        if len(together) == 1:
            found += together
        elif together:
            a, b = _sum([row.a for row in together], scale, 0), _sum([row.b for row in together], scale, 1)
            found.append(_Row(work=work, matched=matched, a=a, b=b, sides=sides, units=len(together)))
    return found


def _apart(rows: Sequence[_Row], scale: _Scale, step: float) -> list[bool]:
    """Which units change unlike the others.

    By more than a quarter of their mean time, five times their median deviation and a thousandth of the step.
    """
    changes = [scale.change(sum(row.a.ns), sum(row.b.ns)) for row in rows]
    if len(rows) < _FEW_UNITS:
        return [False] * len(rows)
    middle = median(changes)
    offs = [abs(change - middle) for change in changes]
    time = sum(max(scale.mean(sum(row.a.ns), 0), scale.mean(sum(row.b.ns), 1)) for row in rows) / len(rows)
    limit = max(_APART_OF_TIME * time, _APART_OF_SPREAD * median(offs), _APART_OF_STEP * step)
    return [off > limit for off in offs]


def _change(row: _Row, scale: _Scale) -> Change:
    by_rank = [(y - x, rank) for x, y, rank in zip(row.a.ns, row.b.ns, scale.names)]
    most = max(by_rank, key=lambda pair: abs(pair[0]), default=None)
    total_a, total_b = sum(row.a.ns), sum(row.b.ns)
    a_kernels, b_kernels = (
        tuple(sorted(part.kernels, key=lambda name: -part.kernels[name])[:_MOST_KERNELS]) for part in (row.a, row.b)
    )
    return Change(
        kind=row.work.kind, label=label_of(row.work), work=row.work, a_ns=scale.mean(total_a, 0),
        b_ns=scale.mean(total_b, 1), delta_ns=scale.change(total_a, total_b), a_count=scale.mean(row.a.count, 0),
        b_count=scale.mean(row.b.count, 1), new=not row.sides[0], gone=not row.sides[1], matched=row.matched,
        units=row.units, a_kernels=a_kernels, b_kernels=b_kernels,
        most_rank=None if most is None else most[1], most_ns=None if most is None else most[0] / scale.steps,
    )  # fmt: skip


def label_of(work: Work) -> str:
    """A work in words.

    >>> label_of(Work(kind="compute", operator="aten::mm", unit="layers.*", phase="forward", dims="[8,4]x[4,2]"))
    'aten::mm [8,4]x[4,2] in layers.*, forward'
    >>> label_of(Work(kind="comm", operator="all_gather", unit="layers.0", bytes=2**20, group="0, 8 ranks"))
    'all_gather 1.00 MiB (0, 8 ranks) in layers.0'
    """
    parts = [f"idle before {work.operator}" if work.kind == IDLE else work.operator, work.dims, work.dtype]
    if work.ordinal is not None:
        parts.append(f"#{work.ordinal + 1}")
    parts.append("" if work.bytes is None else format_bytes(work.bytes))
    parts.append(f"({work.group})" if work.group else "")
    parts.append(f"in {work.unit.strip('()')}" if work.unit else "")
    text = ", ".join(filter(None, (" ".join(filter(None, parts)), work.phase)))
    return f"{text} ({_CAUSES.get(work.bound, work.bound)})" if work.bound else text


MOST = 0.5
"""Shapes differ if the other job does not have those of this share of the time in operators that both call."""
_UNNAMED = "gpu"
"""Name of a device if the trace does not give one."""
_LEADING = re.compile(r"\[\d+")
_Shapes = dict[str, dict[str, int]]


class Unlike(msgspec.Struct, frozen=True, kw_only=True):
    """One respect in which two jobs differ before any change is measured, with what it is in each.

    For shapes, ``a`` and ``b`` are an example: the operator and the differing inputs that take most time.
    It says ``batch size`` where most inputs differ only in their leading sizes.
    """

    what: Literal["device", "world size", "batch size", "input shapes"]
    a: str
    b: str


def unlike(
    figures: tuple[Sequence[TraceFigures], Sequence[TraceFigures]],
    attributions: tuple[Sequence[Attribution], Sequence[Attribution]],
) -> tuple[Unlike, ...]:
    """In what two jobs differ, as far as their traces tell; a fused or replaced operator is no such difference."""
    devices = [", ".join(sorted({one.device for one in side} - {_UNNAMED})) for side in figures]
    sizes = [", ".join(map(str, sorted({one.world_size or 0 for one in side} - {0}))) for side in figures]
    found = []
    if all(devices) and devices[0] != devices[1]:
        found.append(Unlike(what="device", a=devices[0], b=devices[1]))
    if all(sizes) and sizes[0] != sizes[1]:
        found.append(Unlike(what="world size", a=sizes[0], b=sizes[1]))
    return (*found, *_unlike_shapes(_shapes(attributions[0]), _shapes(attributions[1])))


def _shapes(side: Iterable[Attribution]) -> _Shapes:
    """Nanoseconds of compute by operator and input shapes."""
    found: _Shapes = defaultdict(lambda: defaultdict(int))
    for attribution in side:
        for owner in attribution.owners:
            work = owner.work
            if work.kind == Kind.COMPUTE and work.dims and not work.by_name:
                found[work.operator][work.dims] += owner.ns
    return found


def _unlike_shapes(a: _Shapes, b: _Shapes) -> tuple[Unlike, ...]:
    if max(_missing_share(a, b, str), _missing_share(b, a, str)) < MOST:
        return ()
    without = max(_missing_share(a, b, _without_leading), _missing_share(b, a, _without_leading))
    same: Callable[[str], str] = _without_leading if without < MOST else lambda _: ""
    missing = [
        (ns, operator, dims)
        for operator in a.keys() & b.keys()
        for dims, ns in a[operator].items()
        if dims not in b[operator] and any(same(other) == same(dims) for other in b[operator])
    ]
    if not missing:
        return ()
    _, operator, dims = max(missing)
    there = {other: ns for other, ns in b[operator].items() if same(other) == same(dims)}
    what: Literal["batch size", "input shapes"] = "batch size" if without < MOST else "input shapes"
    other = max(there, key=lambda one: there[one])
    return (Unlike(what=what, a=f"{operator} {dims}", b=f"{operator} {other}"),)


def _missing_share(mine: _Shapes, other: _Shapes, key: Callable[[str], str]) -> float:
    """Share of the time in operators common to both that is spent in shapes only one of them has; 0 without any."""
    total = missing = 0
    for operator in mine.keys() & other.keys():
        there = {key(dims) for dims in other[operator]}
        total += sum(mine[operator].values())
        missing += sum(ns for dims, ns in mine[operator].items() if key(dims) not in there)
    return missing / total if total else 0.0


def _without_leading(dims: str) -> str:
    """Shapes without their leading sizes, which batch and sequence length make.

    >>> _without_leading("[8944,1024]x[1024,2816]")
    '[*,1024]x[*,2816]'
    """
    return _LEADING.sub("[*", dims)


_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Traces of A and of B; with ``ranks``, trace by trace of these ranks.

    ``unlike`` says in what the two jobs are not like for like; ``warnings`` are sentences for people.
    """

    a: tuple[Analysis, ...]
    b: tuple[Analysis, ...]
    ranks: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    unlike: tuple[Unlike, ...] = ()


_Sides = tuple[tuple[Analysis, ...], tuple[Analysis, ...]]


def pair(before: Sequence[Analysis], after: Sequence[Analysis]) -> Pairing:
    """Match the ranks of two jobs by number; if each side has one file, compare them even if the ranks differ.

    Jobs of different world sizes are compared by their mean ranks.

    Raises:
        TraceError: a side holds several jobs, names a rank twice, or has no rank in common with the other.
    """
    sides: _Sides = (tuple(before), tuple(after))
    ranks, warnings = tuple[int, ...](), list[str]()
    sizes = [{one.figures.world_size for one in side} - {None} for side in sides]
    if len(before) > 1 or len(after) > 1:
        for name, side in zip("AB", sides):
            first_of = {one.figures.job: one.path.name for one in reversed(side)}
            if len(first_of) > 1:
                names = ", ".join(first_of.values())
                count = f"{len(first_of)}, with {names}"
                raise TraceError(f"--against compares two jobs, but {name} holds {count}; name one file of each")
        if all(sizes) and sizes[0] != sizes[1]:
            counts = " and of ".join(f"{len(side)} of {name}'s ranks" for name, side in zip("AB", sides))
            warnings = [f"The world sizes differ, so ranks are not matched: the means of {counts} are compared."]
        else:
            by_rank = [{one.figures.rank: one for one in side if one.figures.rank is not None} for side in sides]
            if not (ranks := tuple(sorted(by_rank[0].keys() & by_rank[1].keys()))):
                raise TraceError(
                    "--against compares ranks of two jobs, but they have none in common; name one file of each"
                )
            for name, known in zip("AB", by_rank):
                others = sorted(known.keys() - set(ranks))
                named = ", ".join(map(str, others[:_MOST_NAMED])) + (", ..." if len(others) > _MOST_NAMED else "")
                if others:
                    warnings.append(f"Left out: rank{'s' if len(others) > 1 else ''} {named}, only in {name}.")
            sides = (tuple(by_rank[0][rank] for rank in ranks), tuple(by_rank[1][rank] for rank in ranks))
    warnings += [
        f"{name} has no device events: what it did on the device is unknown."
        for name, side in zip("AB", sides)
        if any(one.figures.host_only for one in side)
    ]
    a, b = ([one.attribution for one in side if one.attribution is not None] for side in sides)
    figures = tuple([one.figures for one in side] for side in sides)
    return Pairing(
        a=sides[0], b=sides[1], ranks=ranks, warnings=(*warnings, *unrecorded(a, b)),
        unlike=unlike((figures[0], figures[1]), (a, b)),
    )  # fmt: skip


def unrecorded(a: Sequence[Attribution], b: Sequence[Attribution]) -> tuple[str, ...]:
    """What one side or both do not record, so that works are matched by less."""
    found = []
    for what, key, instead in (
        ("input shapes (record_shapes=True)", "dims", "operators are matched by name and order"),
        ("units", "unit", "those of the other are not told apart"),
        ("phases", "phase", "forward and backward are not told apart"),
    ):
        lacking = [
            name
            for name, side in zip("AB", (a, b))
            if not any(getattr(owner.work, key) for one in side for owner in one.owners if owner.work.kind != IDLE)
        ]
        if len(lacking) == 1 or (lacking and what.startswith("input")):
            verb = "record" if len(lacking) > 1 else "records"
            found.append(f"{' and '.join(lacking)} {verb} no {what}: {instead}.")
    return tuple(found)
