"""What the operators and kernels of a trace take, as data.

Times are sums of durations: two kernels that run at once count twice.
"""

from typing import Literal, get_args

import msgspec

OperatorClass = Literal[
    "GEMM", "attention", "convolution", "normalisation", "elementwise", "optimizer", "copies", "others", "communication"
]
CLASSES: tuple[OperatorClass, ...] = get_args(OperatorClass)
"""By their code."""


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All work of one class in all steps: ``ns`` of ``count`` kernels (on a CPU: operators).

    ``share`` is of all work but communication; communication's is None.
    """

    name: OperatorClass
    count: int
    ns: int
    share: float | None


class OperatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All calls in all steps of one operator with arguments of the same shapes and types.

    ``ns`` is what their kernels took (on a CPU: the operators without others that they call). ``share`` is of all work
    but communication. ``flops`` and ``bytes`` are of one call, the latter the least that it must move; ``flops_per_s``
    is achieved, ``of_peak`` that over the data sheet's peak for the operands' type, ``of_roofline`` the time that the
    peaks of computing and of memory allow, over the time taken. ``bound`` says which of the two peaks allows less.
    ``reason`` says why there is no ``of_roofline``.
    """

    name: str
    kind: OperatorClass
    shapes: str | None
    dtype: str | None
    calls: int
    ns: int
    share: float
    flops: int | None = None
    bytes: int | None = None
    flops_per_s: float | None = None
    of_peak: float | None = None
    of_roofline: float | None = None
    bound: Literal["compute", "memory"] | None = None
    reason: str | None = None


class OperatorTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All calls in all steps of one operator, whatever their arguments' shapes, of which there are ``shapes``.

    Rates are over the calls for which they are known, ``known_ns`` of ``ns``; ``of_roofline`` is the time that the
    peaks allow these over the time that they took.
    """

    name: str
    kind: OperatorClass
    calls: int
    shapes: int
    ns: int
    share: float
    known_ns: int = 0
    flops_per_s: float | None = None
    of_peak: float | None = None
    of_roofline: float | None = None


class KernelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All runs in all steps of one kernel; ``name`` as the trace has it, ``short`` what tells it from others."""

    name: str
    short: str
    kind: OperatorClass
    count: int
    ns: int
    share: float


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer kernels run beside communication than alone.

    Only runs of the same work are compared, as :mod:`~.alike` tells, with three or more each way. ``runs`` are those
    with more than half of their time in communication. ``beside_ns`` and ``alone_ns`` are their time by the median of
    runs beside it and of runs without any. They are ``slower`` if it is more and no chance: the rank sums of runs
    beside and alone differ at the 5 % level. Else nothing is lost.
    """

    name: str
    kind: OperatorClass
    runs: int
    beside_ns: int
    alone_ns: int
    slower: bool

    @property
    def lost_ns(self) -> int:
        """What communication costs these kernels; 0 where they are not slower beside it."""
        return self.beside_ns - self.alone_ns if self.slower else 0

    @property
    def times(self) -> float | None:
        """How many times as long; None where they are not slower, or take no time alone."""
        return self.beside_ns / self.alone_ns if self.slower and self.alone_ns else None


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """What communication costs the kernels that run beside it, over all steps.

    ``classes`` and ``kernels`` are in order of the time lost; empty where no run could be compared. ``compared_ns`` is
    the time of the runs beside communication that could, of ``beside_ns`` of all such runs; ``shapeless_ns`` is of
    those that could not and whose operators' shapes are unknown.
    """

    classes: tuple[Slowdown, ...]
    kernels: tuple[Slowdown, ...]
    compared_ns: int
    beside_ns: int
    shapeless_ns: int

    @property
    def lost_ns(self) -> int:
        """All that is lost."""
        return sum(one.lost_ns for one in self.classes)


class OperatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the operators and kernels of all ``steps`` take (of a trace without steps: of the whole, as one).

    ``work_ns`` is all work but communication. ``totals`` (by operator), ``operators`` (by operator and shapes) and
    ``kernels`` are those that take longest, out of ``total_count``, ``operator_count`` and ``kernel_count``; on a CPU
    there are no kernels. ``hardware`` is the profile that peaks come from. ``contention`` is None where no kernel ran
    beside communication.
    """

    steps: int
    work_ns: int
    classes: tuple[ClassFigures, ...]
    totals: tuple[OperatorTotal, ...]
    total_count: int
    operators: tuple[OperatorFigures, ...]
    operator_count: int
    kernels: tuple[KernelFigures, ...]
    kernel_count: int
    contention: Contention | None
    hardware: str | None
    has_shapes: bool
