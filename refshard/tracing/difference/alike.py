"""Whether two jobs are like for like: the same device, world size and input shapes."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from refshard.events.timeline import Kind
from refshard.tracing.difference.diff import Attribution
from refshard.tracing.figures import TraceFigures

MOST = 0.5
"""Shapes differ if the other job does not have those of this share of the time in operators that both call."""
_UNNAMED = "gpu"
"""What a device is called of which the trace has no name."""
_LEADING = re.compile(r"\[\d+")
_Shapes = dict[str, dict[str, int]]


class Unlike(msgspec.Struct, frozen=True, kw_only=True):
    """One respect in which two jobs differ before any change is measured, with what it is in each.

    Of shapes, ``a`` and ``b`` are an example: an operator with the inputs that take most time of those that differ.
    ``batch size`` is said where most inputs differ in their leading sizes only.
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
    same = _without_leading if without < MOST else _nothing
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
    """Of the time in operators that both call, the share in shapes that the other does not have; 0 without any."""
    total = missing = 0
    for operator in mine.keys() & other.keys():
        there = {key(dims) for dims in other[operator]}
        total += sum(mine[operator].values())
        missing += sum(ns for dims, ns in mine[operator].items() if key(dims) not in there)
    return missing / total if total else 0.0


def _nothing(dims: str) -> str:
    """What all shapes have in common."""
    return dims[:0]


def _without_leading(dims: str) -> str:
    """Shapes without their leading sizes, which batch and sequence length make.

    >>> _without_leading("[8944,1024]x[1024,2816]")
    '[*,1024]x[*,2816]'
    """
    return _LEADING.sub("[*", dims)
