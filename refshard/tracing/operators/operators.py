"""Which operators and kernels take the time of a step, at which rate, and what communication beside them costs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.events.table import KERNEL, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Meaning, Timeline
from refshard.tracing.device import device_order
from refshard.tracing.operators.alike import grouped
from refshard.tracing.operators.contention import find_contention
from refshard.tracing.operators.flops_of import Work, work_of
from refshard.tracing.operators.kernel_names import short_kernel_names
from refshard.tracing.operators.launched import Launched, launched_work
from refshard.tracing.operators.operator_classes import OTHERS, SURE, class_of_kernel, class_of_operator
from refshard.tracing.operators.operator_figures import (
    CLASSES,
    ClassFigures,
    Contention,
    KernelFigures,
    OperatorClass,
    OperatorFigures,
    OperatorReport,
    OperatorTotal,
)
from refshard.tracing.operators.roofline import TF32_KERNEL, peaks_of, roofline

MOST = 60
"""So many operators, and kernels, are told of a trace."""
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
    work_ns, shorts = int(mine.ns.sum()), _short_names(timeline, mine)
    operators = _operators(trace, timeline, mine, its, device, shorts)
    totals = _totals(operators)
    kernels = _kernels(timeline, mine, its, shorts) if timeline.on_device else []
    peaks = peaks_of(device)
    return OperatorReport(
        steps=len(steps) or 1,
        work_ns=work_ns,
        classes=_class_figures(work.ns, classes, work_ns),
        totals=totals[:MOST],
        total_count=len(totals),
        operators=tuple(operators[:MOST]),
        operator_count=len(operators),
        kernels=tuple(kernels[:MOST]),
        kernel_count=len(kernels),
        contention=_contention(trace, timeline, mine, its, shorts) if timeline.on_device else None,
        hardware=peaks.profile if peaks else None,
        has_shapes=len(trace.operands) > 0,
    )


def _short_names(timeline: Timeline, work: Launched) -> dict[int, str]:
    """Short names of a device's kernels by their code in the table of names."""
    if not timeline.on_device:
        return {}
    codes = np.unique(timeline.spans.names[work.spans]).tolist()
    return dict(zip(codes, short_kernel_names([timeline.spans.name_table[code] for code in codes])))


def _contention(
    trace: TraceFile, timeline: Timeline, work: Launched, classes: npt.NDArray[np.int8], shorts: Mapping[int, str]
) -> Contention | None:
    """Of kernels alone: how long a copy takes depends on its bytes, which nothing here tells."""
    is_kernel = (trace.device.categories[device_order(trace)] == KERNEL)[work.spans]
    return find_contention(timeline, work.spans[is_kernel], classes[is_kernel], work.operands[is_kernel], shorts)


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
    totals, work_ns = _sums(group, work.ns, len(sample)), int(work.ns.sum())
    calls = _calls(group, work.calls, len(sample))
    tf32 = _holds(TF32_KERNEL, timeline, work, group, len(sample))
    over_link = _holds(_TO_OR_FROM_HOST, timeline, work, group, len(sample))
    found = []
    for rank, place in enumerate(np.argsort(-totals, kind="stable").tolist()):
        row = int(sample[place])
        code = int(work.names[row])
        name = shorts.get(code, trace.names[code]) if work.calls[row] == UNKNOWN else trace.names[code]
        operands = trace.operands[work.operands[row]] if work.operands[row] != UNKNOWN else None
        told = work_of(name, operands) if operands and rank < _MOST_HELD else Work(shapes="", dtype=None, reason=_LACKS)
        if over_link[place]:
            told = replace(told, flops=None, bytes=None, reason=_OVER_LINK)
        calls_here, ns = int(calls[place]), int(totals[place])
        found.append(
            OperatorFigures(
                name=name, kind=CLASSES[classes[row]], shapes=told.shapes or None, dtype=told.dtype, calls=calls_here,
                ns=ns, share=ns / work_ns if work_ns else 0.0, flops=told.flops, bytes=told.bytes,
                **_held(told, calls_here, ns / 1e9, device, tf32=bool(tf32[place])),
            )
        )  # fmt: skip
    return found


def _held(told: Work, calls: int, seconds: float, device: str, *, tf32: bool) -> dict[str, Any]:
    """The rate of some calls, and how close it comes to the peaks."""
    if told.reason or not seconds:
        return {"reason": told.reason or "it takes no time"}
    flops, size = (None if each is None else each * calls for each in (told.flops, told.bytes))
    held = roofline(peaks_of(device), device, dtype=told.dtype, flops=flops, size=size, seconds=seconds, tf32=tf32)
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
        name=name,
        kind=kind,
        calls=sum(one.calls for one in every),
        shapes=len(every),
        ns=sum(one.ns for one in every),
        share=sum(one.share for one in every),
        known_ns=sum(one.ns for one in held),
        flops_per_s=_mean(counted, [one.flops_per_s for one in counted]),
        of_peak=_mean(peaked, [one.of_peak for one in peaked]),
        of_roofline=_mean(held, [one.of_roofline for one in held]),
    )


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
    totals, counts = _sums(group, work.ns, len(sample)), np.bincount(group, minlength=len(sample))
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


def _sums(group: npt.NDArray[np.int64], ns: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Nanoseconds of each group, exactly."""
    found = np.zeros(count, np.int64)
    np.add.at(found, group, ns)
    return found


def _calls(group: npt.NDArray[np.int64], calls: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """How many calls the work of each group is of; work of which no call is known is one each."""
    order = np.lexsort((calls, group))
    group, calls = group[order], calls[order]
    is_new = np.ones(len(group), np.bool_)
    is_new[1:] = (group[1:] != group[:-1]) | (calls[1:] != calls[:-1]) | (calls[1:] == UNKNOWN)
    return np.bincount(group[is_new], minlength=count)
