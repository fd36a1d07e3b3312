"""What the host was doing when each span was launched: the operator that the span is part of, and its arguments."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.attribution import phases_of
from refshard.analysis.figures import (
    CLASSES,
    ClassFigures,
    Contention,
    KernelFigures,
    OperatorClass,
    OperatorFigures,
    OperatorReport,
    OperatorTotal,
    Slowdown,
)
from refshard.analysis.flops import TF32_KERNEL, Work, peaks_of, roofline, work_of
from refshard.analysis.grouping import grouped, sums
from refshard.analysis.names import OTHERS, SURE, class_of_kernel, class_of_operator, short_kernel_names
from refshard.analysis.owners import Nesting, Rows, column_at, named, nested_order, whole_problems
from refshard.analysis.spans import COMPUTE_OP, IN_GRAPH, device_order, main_thread
from refshard.analysis.windows import host_steps, step_at
from refshard.events.table import ANNOTATION, HOST, KERNEL, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Meaning, Nanoseconds, Spans, Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A row for each piece of work: a span of a device, or an operator of a CPU less those that it calls.

    ``spans`` are rows of :class:`~refshard.events.timeline.Spans` (on a CPU :data:`UNKNOWN`), ``calls`` the rows of
    :class:`HostEvents` of the operator that the work is for, or :data:`UNKNOWN`. ``names``
    index :attr:`TraceFile.names`, the work's own name where there is no operator, ``operands``
    :attr:`TraceFile.operands`.
    ``at`` is when the host was there, ``steps`` in which step, each :data:`UNKNOWN` where the trace does not say.
    """

    spans: Rows
    ns: npt.NDArray[np.int64]
    calls: Rows
    names: npt.NDArray[np.int32]
    operands: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.bool_]) -> "Launched":
        """Some of them."""
        return Launched(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


def launched_work(trace: TraceFile, timeline: Timeline) -> Launched:
    """All work of a trace, and the operator that each piece is for, by the rule of :mod:`refshard.analysis.owners`."""
    if not timeline.on_device:
        return _on_cpu(trace, timeline)
    spans, calls = timeline.spans, timeline.spans.calls.astype(np.int64)
    return Launched(
        spans=np.arange(len(spans)), ns=spans.ends - spans.starts, calls=calls, names=spans.operators,
        operands=column_at(trace.host.operands, calls), steps=spans.steps, at=spans.launches,
    )  # fmt: skip


def _on_cpu(trace: TraceFile, timeline: Timeline) -> Launched:
    """The main thread's operators, each less the time of those that it calls, and of collectives that it issues.

    They are those that count as compute, so that their sum is the union of these.
    """
    host, main = trace.host, main_thread(trace, host_steps(trace)[1])
    computes = named(trace, COMPUTE_OP)
    is_mine = np.isin(host.categories, (HOST, ANNOTATION)) & (host.threads == main)
    rows = np.flatnonzero(is_mine & (computes | named(trace, IN_GRAPH)) & (host.ends > host.starts))
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    own = Nesting.of(host.starts[rows], host.ends[rows]).own()
    rows, own = rows[computes[rows]], own[computes[rows]]
    whole = whole_problems(trace, rows)
    calls = np.where(whole == UNKNOWN, rows, whole)
    return Launched(
        spans=np.full(len(rows), UNKNOWN, np.int64), ns=own, calls=calls, names=host.names[calls],
        operands=host.operands[calls], steps=step_at(host.starts[rows], timeline.host_windows), at=host.starts[rows],
    )  # fmt: skip


def same_work(spans: Spans, rows: Rows, operands: npt.NDArray[np.int32]) -> Rows:
    """A number for each of the kernels ``rows``; those of one number do the same work. :data:`UNKNOWN`: who knows.

    Kernels do the same work if their names, grids and blocks are the same, and their operators' ``operands`` too.
    Where the trace has no operands, grid and block are not enough: kernels that loop over their data have one grid
    for many sizes. There, runs also need the same place in the same sequence of kernels: of a unit's forward,
    backward or optimizer step, as layers of one kind have, or of the whole step's for kernels of no unit.
    """
    found = np.full(len(rows), UNKNOWN, np.int64)
    shaped = operands != UNKNOWN
    found[shaped] = grouped(spans.signatures[rows[shaped]], operands[shaped])[1]
    placed = np.flatnonzero(spans.launches[rows] != UNKNOWN)
    places = _places(spans, rows[placed])
    known = np.array([name.endswith("]") for name in spans.signature_names] or [False])  # grid and block
    usable = ~shaped[placed] & known[spans.signatures[rows[placed]]]
    found[placed[usable]] = places[usable] + found.max(initial=UNKNOWN) + 1
    return found


def _places(spans: Spans, rows: Rows) -> Rows:
    """A number for each row: equal for those at one place of equal sequences."""
    if not len(rows):
        return rows
    blocks = (spans.steps[rows], spans.units[rows], phases_of(spans)[rows])
    order = np.lexsort((spans.launches[rows], *blocks))
    changes = np.any([np.diff(column[order]) != 0 for column in blocks], axis=0)
    first = np.append(True, changes)
    starts = np.flatnonzero(first)
    block = np.cumsum(first) - 1
    position = np.arange(len(rows)) - starts[block]
    # A sequence's fingerprint: equal ones have equal sums, others only by a chance of 2^-64.
    random = np.random.default_rng(0).integers(0, 2**64, len(spans.signature_names), np.uint64)
    tokens = random[spans.signatures[rows[order]]] * (2 * position.astype(np.uint64) + np.uint64(1))
    sequences = np.unique(np.add.reduceat(tokens, starts), return_inverse=True)[1]
    found = np.empty(len(rows), np.int64)
    found[order] = sequences[block] * len(rows) + position
    return found


ENOUGH = 3
"""So many runs of each sort are needed before they are compared."""
SIGNIFICANT = 1.96
"""Beyond so many standard deviations a difference of ranks is no chance, at 5 %."""
_MOST = 50


def find_contention(
    timeline: Timeline, rows: Rows, classes: npt.NDArray[np.int8], operands: npt.NDArray[np.int32],
    shorts: Mapping[int, str],
) -> Contention | None:  # fmt: skip
    """Compare the spans ``rows``, of these ``classes`` and ``operands``; ``shorts`` are their kernels' names by code.

    A run is beside communication if more than half of it is, and alone if nothing of it is. None if no run is beside
    communication.
    """
    spans, comm, works = timeline.spans, timeline.busy(Kind.COMM), same_work(timeline.spans, rows, operands)
    lengths = spans.ends[rows] - spans.starts[rows]
    within = comm.within(spans.starts[rows], spans.ends[rows])
    beside = 2 * within > lengths
    if not beside.any():
        return None
    mine = np.flatnonzero((beside | (within == 0)) & (works != UNKNOWN))
    sample, group = grouped(works[mine], classes[mine], spans.names[rows[mine]])
    found = _Comparison.of(group, beside[mine], lengths[mine], len(sample))
    enough, sample = found.enough, mine[sample]
    kinds = classes[sample].astype(np.int64)
    by_kernel = spans.names[rows[sample]] * len(CLASSES) + kinds

    def slowdowns(by: Rows, label: Mapping[int, str] | None) -> tuple[Slowdown, ...]:
        known = []
        for code in np.unique(by[enough]).tolist():
            kind = CLASSES[code % len(CLASSES)]
            name = kind if label is None else label[code // len(CLASSES)]
            known.append(found.over(enough & (by == code), name, kind))
        return tuple(sorted(known, key=lambda one: (-one.lost_ns, -one.beside_ns)))

    compared = np.zeros(len(rows), np.bool_)
    compared[mine] = beside[mine] & enough[group]
    return Contention(
        classes=slowdowns(kinds, None),
        kernels=slowdowns(by_kernel, shorts)[:_MOST],
        compared_ns=int(lengths[compared].sum()),
        beside_ns=int(lengths[beside].sum()),
        shapeless_ns=int(lengths[beside & ~compared & (operands == UNKNOWN)].sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Comparison:
    """Of each group: whether it has enough runs of both sorts, how many are ``beside``, the medians of both, and the
    rank sum of those beside: by how much it exceeds its expectation, and its variance, as :meth:`over` weighs them.
    """

    enough: npt.NDArray[np.bool_]
    runs: Rows
    slow: npt.NDArray[np.float64]
    plain: npt.NDArray[np.float64]
    excess: npt.NDArray[np.float64]
    variance: npt.NDArray[np.float64]

    @classmethod
    def of(cls, group: Rows, beside: npt.NDArray[np.bool_], lengths: Nanoseconds, count: int) -> "_Comparison":
        runs, alone = (np.bincount(group[which], minlength=count) for which in (beside, ~beside))
        ranks, ties = _ranks(group, lengths, count)
        every = np.maximum(2, runs + alone)  # of one run nothing is said
        excess = np.bincount(group[beside], ranks[beside], minlength=count) - runs * (every + 1) / 2
        variance = runs * alone / 12 * (every + 1 - ties / (every * (every - 1)))
        weights = 1 / (every + 1)
        return cls(
            enough=(runs >= ENOUGH) & (alone >= ENOUGH), runs=runs,
            slow=runs * _medians(group[beside], lengths[beside], count),
            plain=runs * _medians(group[~beside], lengths[~beside], count),
            excess=excess * weights, variance=variance * weights**2,
        )  # fmt: skip

    def over(self, groups: npt.NDArray[np.bool_], name: str, kind: OperatorClass) -> Slowdown:
        """All of some groups.

        Whether it is a slowdown is decided by Wilcoxon's rank sums, joined over the groups as by van Elteren (1960).
        """
        excess, variance = self.excess[groups].sum(), self.variance[groups].sum()
        slow, plain = round(self.slow[groups].sum()), round(self.plain[groups].sum())
        return Slowdown(
            name=name, kind=kind, runs=int(self.runs[groups].sum()), beside_ns=slow, alone_ns=plain,
            slower=bool(slow > plain and excess >= SIGNIFICANT * np.sqrt(variance) and variance > 0),
        )  # fmt: skip


def _ranks(groups: Rows, values: Nanoseconds, count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Each value's rank in its group, from 1, equal ones sharing their mean; and of each group the sum of t³ - t over
    its t equal values.
    """
    order = np.lexsort((values, groups))
    first = np.append(True, (np.diff(groups[order]) != 0) | (np.diff(values[order]) != 0))[: len(order)]
    starts, run = np.flatnonzero(first), np.cumsum(first) - 1
    equal = np.diff(np.append(starts, len(order)))
    sizes = np.bincount(groups, minlength=count)
    begins = (np.cumsum(sizes) - sizes)[groups[order]]
    ranks = np.empty(len(order), np.float64)
    ranks[order] = starts[run] - begins + (equal[run] + 1) / 2
    ties = np.zeros(count, np.int64)
    np.add.at(ties, groups[order][starts], equal**3 - equal)
    return ranks, ties


def _medians(groups: Rows, values: Nanoseconds, count: int) -> npt.NDArray[np.float64]:
    """The median of each group's values; 0 of a group without any."""
    order = np.lexsort((values, groups))
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    ranked = np.append(values[order], 0)
    low, high = first + np.maximum(0, sizes - 1) // 2, first + sizes // 2
    last = len(ranked) - 1
    return np.where(sizes > 0, (ranked[np.minimum(low, last)] + ranked[np.minimum(high, last)]) / 2, 0.0)


MOST = 60
"""Most operators, and kernels, in a report."""
_MOST_HELD = 3000
"""Of so many, by operator and shapes, FLOPs and bytes are counted."""
_LACKS = "no shapes of its arguments"
_OVER_LINK = "it copies from or to the host: the link bounds it, not the device's memory"
_TO_OR_FROM_HOST = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
_COMMUNICATION, _OPTIMIZER, _COPIES = map(CLASSES.index, ("communication", "optimizer", "copies"))


def operator_report(trace: TraceFile, timeline: Timeline, device: str) -> OperatorReport | None:
    """The operators and kernels of a trace's steps, by what they take; None of a trace that holds no work."""
    work = launched_work(trace, timeline)
    steps = [window.step for window in timeline.host_windows if window.step is not None]
    if steps:
        work = work.of(work.steps != UNKNOWN)
    if not len(work.ns):
        return None
    classes = _classes(trace, timeline, work)
    computes = classes != _COMMUNICATION
    mine, its = work.of(computes), classes[computes]
    work_ns, shorts, contention = int(mine.ns.sum()), dict[int, str](), None
    if timeline.on_device:
        spans, rows = timeline.spans, mine.spans
        codes = np.unique(spans.names[rows]).tolist()
        shorts = dict(zip(codes, short_kernel_names([spans.name_table[code] for code in codes])))
        # Of kernels alone: how long a copy takes depends on its bytes, which nothing here tells.
        is_kernel = (trace.device.categories[device_order(trace)] == KERNEL)[rows]
        contention = find_contention(timeline, rows[is_kernel], its[is_kernel], mine.operands[is_kernel], shorts)
    operators = _operators(trace, timeline, mine, its, device, shorts)
    totals = _totals(operators)
    kernels = _kernels(timeline, mine, its, shorts) if timeline.on_device else []
    peaks = peaks_of(device)
    return OperatorReport(
        steps=len(steps) or 1, work_ns=work_ns, classes=_class_figures(work.ns, classes, work_ns),
        totals=totals[:MOST], total_count=len(totals), operators=tuple(operators[:MOST]),
        operator_count=len(operators), kernels=tuple(kernels[:MOST]), kernel_count=len(kernels),
        contention=contention, hardware=peaks.profile if peaks else None, has_shapes=len(trace.operands) > 0,
    )  # fmt: skip


def _classes(trace: TraceFile, timeline: Timeline, work: Launched) -> npt.NDArray[np.int8]:
    """The class of each piece of work: by its operator, or else by its kernel.

    What the host launched in an optimizer's step is the optimizer's, but for products, attention and convolutions.
    """
    found = _by_name(trace.names, work.names, class_of_operator)
    is_copy = np.zeros(len(found), np.bool_)
    if timeline.on_device:
        spans = timeline.spans
        own = _by_name(spans.name_table, spans.names[work.spans], class_of_kernel)
        # An operator that stands for none is a kernel by its own name.
        found = np.where((found == OTHERS) | (work.calls == UNKNOWN), own, found)
        kinds = spans.kinds[work.spans]
        is_copy = kinds == KINDS.index(Kind.COPY)
        found = np.where(found == _COMMUNICATION, own, found)
        found = np.where(kinds == KINDS.index(Kind.COMM), _COMMUNICATION, found)
    of_optimizer = [(label.start, label.end) for label in timeline.labels if label.meaning & Meaning.OPTIMIZER]
    optimizes = Intervals.of(of_optimizer).within(work.at, work.at + 1) > 0
    is_sure = np.isin(found, (*SURE, _COMMUNICATION))
    found = np.where(~is_sure & is_copy, _COPIES, found)
    return np.where(~is_sure & optimizes, _OPTIMIZER, found).astype(np.int8)


def _by_name(
    table: Sequence[str], codes: npt.NDArray[np.int32], class_of: Callable[[str], int]
) -> npt.NDArray[np.int8]:
    """Classes of names by code; each name that occurs is looked at once."""
    used, group = np.unique(codes, return_inverse=True)
    return np.array([class_of(table[code]) for code in used.tolist()], np.int8)[group]


def _class_figures(ns: npt.NDArray[np.int64], classes: npt.NDArray[np.int8], work_ns: int) -> tuple[ClassFigures, ...]:
    """Classes that occur, the longest first and communication last."""
    found = []
    for code in np.unique(classes).tolist():
        mine = classes == code
        total = int(ns[mine].sum())
        share = None if code == _COMMUNICATION or not work_ns else total / work_ns
        found.append(ClassFigures(name=CLASSES[code], count=int(mine.sum()), ns=total, share=share))
    return tuple(sorted(found, key=lambda one: (one.share is None, -one.ns)))


def _operators(
    trace: TraceFile, timeline: Timeline, work: Launched, classes: npt.NDArray[np.int8], device: str,
    shorts: Mapping[int, str],
) -> list[OperatorFigures]:  # fmt: skip
    """All operators by their arguments' shapes, those that take longest first, with rates of the first ones."""
    sample, group = grouped(work.names, work.operands, classes)
    totals, work_ns = sums(group, work.ns, len(sample)), int(work.ns.sum())
    calls = _calls(group, work.calls, len(sample))
    tf32 = _holds(TF32_KERNEL, timeline, work, group, len(sample))
    over_link = _holds(_TO_OR_FROM_HOST, timeline, work, group, len(sample))
    found = []
    for rank, place in enumerate(np.argsort(-totals, kind="stable").tolist()):
        row = int(sample[place])
        code = int(work.names[row])
        name = shorts.get(code, trace.names[code]) if work.calls[row] == UNKNOWN else trace.names[code]
        operands = trace.operands[work.operands[row]] if work.operands[row] != UNKNOWN else None
        known = (
            work_of(name, operands) if operands and rank < _MOST_HELD else Work(shapes="", dtype=None, reason=_LACKS)
        )
        if over_link[place]:
            known = replace(known, flops=None, bytes=None, reason=_OVER_LINK)
        calls_here, ns = int(calls[place]), int(totals[place])
        found.append(
            OperatorFigures(
                name=name, kind=CLASSES[classes[row]], shapes=known.shapes or None, dtype=known.dtype, calls=calls_here,
                ns=ns, share=ns / work_ns if work_ns else 0.0, flops=known.flops, bytes=known.bytes,
                **_held(known, calls_here, ns / 1e9, device, tf32=bool(tf32[place])),
            )
        )  # fmt: skip
    return found


def _held(found: Work, calls: int, seconds: float, device: str, *, tf32: bool) -> dict[str, Any]:
    """The rate of some calls, and how close it comes to the peaks."""
    if found.reason or not seconds:
        return {"reason": found.reason or "it takes no time"}
    flops, size = (None if each is None else each * calls for each in (found.flops, found.bytes))
    held = roofline(peaks_of(device), device, dtype=found.dtype, flops=flops, size=size, seconds=seconds, tf32=tf32)
    return {"flops_per_s": flops / seconds if flops else None, **msgspec.structs.asdict(held)}


def _holds(
    pattern: "re.Pattern[str]", timeline: Timeline, work: Launched, group: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.bool_]:
    """Which groups hold a kernel or a copy with such a name."""
    found = np.zeros(count, np.bool_)
    if timeline.on_device:
        named = np.array([bool(pattern.search(name)) for name in timeline.spans.name_table] or [False])
        found[group[named[timeline.spans.names[work.spans]]]] = True
    return found


def _totals(operators: Sequence[OperatorFigures]) -> tuple[OperatorTotal, ...]:
    """Operators by name, those that take longest first."""
    members: dict[tuple[str, OperatorClass], list[OperatorFigures]] = {}
    for one in operators:
        members.setdefault((one.name, one.kind), []).append(one)
    found = [_total(name, kind, every) for (name, kind), every in members.items()]
    return tuple(sorted(found, key=lambda one: -one.ns))


def _total(name: str, kind: OperatorClass, every: Sequence[OperatorFigures]) -> OperatorTotal:
    counted = [one for one in every if one.flops and one.flops_per_s]
    held, peaked = ([o for o in every if getattr(o, key) is not None] for key in ("of_roofline", "of_peak"))
    return OperatorTotal(
        name=name, kind=kind, calls=sum(one.calls for one in every), shapes=len(every),
        ns=sum(one.ns for one in every), share=sum(one.share for one in every), known_ns=sum(one.ns for one in held),
        flops_per_s=_mean(counted, [one.flops_per_s for one in counted]),
        of_peak=_mean(peaked, [one.of_peak for one in peaked]),
        of_roofline=_mean(held, [one.of_roofline for one in held]),
    )  # fmt: skip


def _mean(over: Sequence[OperatorFigures], values: Sequence[float | None]) -> float | None:
    """Weighted by time, so that it is all the work over all the time; None of none."""
    total = sum(one.ns for one in over)
    return sum(one.ns * (value or 0.0) for one, value in zip(over, values)) / total if total else None


def _kernels(
    timeline: Timeline, work: Launched, classes: npt.NDArray[np.int8], shorts: Mapping[int, str]
) -> list[KernelFigures]:
    """All kernels and copies, those that take longest first."""
    names = timeline.spans.names[work.spans]
    sample, group = grouped(names, classes)
    totals, counts = sums(group, work.ns, len(sample)), np.bincount(group, minlength=len(sample))
    work_ns = int(work.ns.sum())
    return [
        KernelFigures(
            name=timeline.spans.name_table[names[row]], short=shorts[int(names[row])], kind=CLASSES[classes[row]],
            count=int(counts[place]), ns=int(totals[place]),
            share=int(totals[place]) / work_ns if work_ns else 0.0,
        )
        for place in np.argsort(-totals, kind="stable").tolist()
        for row in [int(sample[place])]
    ]  # fmt: skip


def _calls(group: npt.NDArray[np.int64], calls: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """How many calls the work of each group is of; work of which no call is known is one each."""
    order = np.lexsort((calls, group))
    group, calls = group[order], calls[order]
    is_new = np.ones(len(group), np.bool_)
    is_new[1:] = (group[1:] != group[:-1]) | (calls[1:] != calls[:-1]) | (calls[1:] == UNKNOWN)
    return np.bincount(group[is_new], minlength=count)
