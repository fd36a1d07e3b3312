"""The time of collectives, units, the copies around them and preparatory kernels: functions of a timeline.

The give-way index measures YaFSDP's "give-way effect": kernels that prepare a reduction (casts, copies into its buffer)
run during the backward of the next unit, which occupies most of the device. So they take longer, and the reduction
starts late.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import CollectiveFigures, CopyOverhead, GiveWay, ReduceWait, UnitFigures
from refshard.analysis.overlap import NEVER, knows_launches, latest_launches
from refshard.events.timeline import (
    KINDS,
    UNKNOWN,
    Collective,
    Intervals,
    Kind,
    Label,
    Meaning,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
)

_ONE_WAY = frozenset(("all_gather", "reduce_scatter", "all_to_all"))
_WHOLE = frozenset(("broadcast", "reduce", "send", "recv", "send_recv", "peer_copy"))
NS = 1e-9


def bus_factor(op: str, group_size: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth in a group of n: (n-1)/n, twice that for an all-reduce, or 1.

    From doc/PERFORMANCE.md of nccl-tests, which counts the unsharded tensor's bytes. None for an operation that it does
    not cover, and where n matters and is unknown.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", None), bus_factor("scan", 4)
    (1.5, 0.75, 1.0, None)
    """
    if op in _WHOLE:
        return 1.0
    if not group_size or op not in _ONE_WAY | {"all_reduce"}:
        return None
    return (2 if op == "all_reduce" else 1) * (group_size - 1) / group_size


def ran(timeline: Timeline) -> list[tuple[Collective, str, int, int]]:
    """The collectives that the trace shows running, by start, with their lane, start and end."""
    found = [
        (c, c.lane, c.start, c.end)
        for c in timeline.collectives
        if c.lane is not None and c.start is not None and c.end is not None
    ]
    return sorted(found, key=lambda row: row[2:])


def ends_before(rows: Iterable[tuple[Collective, str, int, int]]) -> list[int | None]:
    """For each of :func:`ran`, the latest end of those before it on its lane; None for the first."""
    latest: dict[str, int] = {}
    found = []
    for _, lane, _, end in rows:
        found.append(latest.get(lane))
        latest[lane] = max(end, latest.get(lane, end))
    return found


def collective_figures(timeline: Timeline) -> tuple[CollectiveFigures, ...]:
    """Every collective that ran, by start.

    Its duration is that of all its kernels. Exposed is when it ran without U(compute), or without U of all that is no
    communication. The gap is from the end of what came before it on its lane to its start, 0 where they overlap; it is
    blocking if this one was launched no later than the gap began and compute runs in a part of it (None where the
    launch is unknown). The wait in the queue is at least 0, even if the clocks of host and device disagree.
    """
    rows = ran(timeline)
    compute = timeline.busy(Kind.COMPUTE)
    starts = np.array([start for _, _, start, _ in rows], np.int64)
    before = ends_before(rows)
    gap_starts = np.array(
        [start if b is None else min(b, start) for b, (_, _, start, _) in zip(before, rows)], np.int64
    )
    times = _times(timeline, rows, (compute, _but_communication(timeline)))
    computing = (compute.within(gap_starts, starts) > 0).tolist()
    found = []
    for (one, lane, start, _), (duration, exposed, exposed_any), silent, beside in zip(rows, times, before, computing):
        factor = bus_factor(one.op, one.group_size)
        rate = None if one.bytes is None or not duration else one.bytes / (duration * NS)
        blocking = None if silent is None or one.launched is None else one.launched <= silent and beside
        found.append(
            CollectiveFigures(
                op=one.op, unit=one.unit, step=one.step, group=one.group, group_size=one.group_size, dtype=one.dtype,
                lane=lane, start_ns=start, duration_ns=duration, exposed_ns=exposed, exposed_any_ns=exposed_any,
                queued_ns=None if one.launched is None else max(0, start - one.launched), bytes=one.bytes,
                algorithm_bandwidth=rate, bus_bandwidth=None if rate is None or factor is None else rate * factor,
                gap_ns=None if silent is None else max(0, start - silent), gap_blocking=blocking,
                sequence=one.sequence,
            )
        )  # fmt: skip
    return tuple(found)


def _times(
    timeline: Timeline, rows: list[tuple[Collective, str, int, int]], hiding: tuple[Intervals, Intervals]
) -> list[list[int]]:
    """Nanoseconds in which each collective ran, and how many of them each of ``hiding`` did not run.

    In several kernels, the pauses between them are left out.
    """
    spans, owners, pieces = timeline.spans, [], []
    for place, (collective, _, start, end) in enumerate(rows):
        own = [(start, end)]
        if len(collective.rows) > 1:
            some = list(collective.rows)
            own = Intervals.union(spans.starts[some], spans.ends[some]).pairs
        owners += [place] * len(own)
        pieces += own
    starts, ends = np.array(pieces, np.int64).reshape(-1, 2).T
    found = np.zeros((len(rows), 3), np.int64)
    lengths = ends - starts
    columns = (lengths, *(lengths - by.within(starts, ends) for by in hiding))
    np.add.at(found, np.array(owners, np.int64), np.stack(columns, axis=1))
    counts: list[list[int]] = found.tolist()
    return counts


def unit_figures(timeline: Timeline) -> tuple[UnitFigures, ...]:
    """Every unit over the whole trace, by the start of its first span: the union of its own spans of each class.

    Exposed is the unit's communication without the compute, or without anything else, of any unit. Only collectives
    that ran count.
    """
    spans = timeline.spans
    hiding = (timeline.busy(Kind.COMPUTE), _but_communication(timeline))
    counts = [0] * len(spans.unit_names)
    code_of = {name: code for code, name in enumerate(spans.unit_names)}
    for collective, *_ in ran(timeline):
        if collective.unit in code_of:
            counts[code_of[collective.unit]] += 1
    order = np.argsort(spans.units, kind="stable")
    bounds = np.searchsorted(spans.units[order], np.arange(len(spans.unit_names) + 1))
    found = []
    for code, name in enumerate(spans.unit_names):
        rows = order[bounds[code] : bounds[code + 1]]
        if not len(rows):
            continue
        own = {}
        for place, kind in enumerate(KINDS):
            of_kind = rows[spans.kinds[rows] == place]
            own[kind] = Intervals.union(spans.starts[of_kind], spans.ends[of_kind])
        comm = own[Kind.COMM]
        exposed, exposed_any = (comm.length - int(by.within(comm.starts, comm.ends).sum()) for by in hiding)
        figures = UnitFigures(
            unit=name, compute_ns=own[Kind.COMPUTE].length, comm_ns=comm.length, prep_ns=own[Kind.PREP].length,
            copy_ns=own[Kind.COPY].length, exposed_ns=exposed, exposed_any_ns=exposed_any, collectives=counts[code],
        )  # fmt: skip
        found.append((rows[0], figures))
    return tuple(figures for _, figures in sorted(found, key=lambda pair: int(pair[0])))


def _but_communication(timeline: Timeline) -> Intervals:
    return timeline.busy(*(kind for kind in Kind if kind is not Kind.COMM))


def copy_overhead(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[CopyOverhead, ...]:
    """Device time of each window under copy-in and under copy-out annotations, as two unions.

    A span under both is a copy-in; communication never counts as a copy. The part of each union that overlaps compute
    other than these copies is hidden, the rest exposed; hidden and exposed add up to both unions.
    """
    spans = timeline.spans
    moving = ~spans.of_kind(Kind.COMM)
    into = moving & ((spans.under & Meaning.COPY_IN) != 0)
    out = moving & ((spans.under & Meaning.COPY_OUT) != 0) & ~into
    copy_in, copy_out = spans.covered(into), spans.covered(out)
    compute = spans.covered(spans.of_kind(Kind.COMPUTE) & ~into & ~out)
    hidden = (copy_in & compute).within(starts, ends) + (copy_out & compute).within(starts, ends)
    inward, outward = copy_in.within(starts, ends), copy_out.within(starts, ends)
    rows = zip(inward.tolist(), outward.tolist(), (inward + outward - hidden).tolist(), hidden.tolist())
    return tuple(CopyOverhead(copy_in_ns=i, copy_out_ns=o, exposed_ns=e, hidden_ns=h) for i, o, e, h in rows)


def reduce_waits(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[ReduceWait, ...]:
    """The host's waits for an earlier reduction in each window; a wait belongs, whole, where it starts."""
    labels = sorted((x for x in timeline.labels if x.meaning & Meaning.REDUCE_WAIT), key=lambda x: x.start)
    host = [label.end - label.start for label in labels]
    device = _device_waits(timeline, labels)
    at = np.array([label.start for label in labels], np.int64)
    first, last = np.searchsorted(at, starts), np.searchsorted(at, ends)
    columns: list[list[Any]] = [(last - first).tolist()]
    for values in (host, device):
        running = np.concatenate(([0], np.cumsum(np.array(values or [], np.int64))))
        columns.append([None] * len(starts) if values is None else (running[last] - running[first]).tolist())
    return tuple(ReduceWait(count=n, host_ns=h, device_ns=d) for n, h, d in zip(*columns))


def _device_waits(timeline: Timeline, labels: list[Label]) -> list[int] | None:
    """For each wait, how long the lane with the most compute stood still around it.

    That is from the end of the last span launched on it before the wait began to the start of the first one launched
    later, never below 0, and 0 where there is no such span. Waits between the same two launches share one gap, which
    is the first's. None without device events or launches.
    """
    spans = timeline.spans
    if not timeline.on_device or not knows_launches(spans):
        return None
    rows = np.flatnonzero(spans.lanes == spans.main_lane())
    launches = latest_launches(spans)[rows]
    order = np.argsort(launches, kind="stable")
    last_end = np.maximum.accumulate(spans.ends[rows][order])
    next_start = np.minimum.accumulate(spans.starts[rows][order][::-1])[::-1]
    at = np.searchsorted(launches[order], np.array([label.start for label in labels], np.int64), side="left")
    found = np.zeros(len(labels), np.int64)
    _, first = np.unique(at, return_index=True)
    first = first[(at[first] > 0) & (at[first] < len(rows))]
    found[first] = np.maximum(0, next_start[at[first]] - last_end[at[first] - 1])
    return [int(ns) for ns in found]


REDUCTIONS = frozenset(("reduce_scatter", "all_reduce", "all_to_all"))
MIN_SAMPLES = 5
"""Fewest undisturbed runs of a kernel that give its undisturbed duration."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Preparations:
    """What preceded each reduction that has preparatory kernels, in order of the reductions' start.

    ``durations`` and ``undisturbed`` are sums over a reduction's kernels, ``lost`` is what it lost; ``samples`` is of
    the kernel with the fewest undisturbed runs, and ``scarcest`` a row of that kernel.
    """

    starts: Nanoseconds
    durations: Nanoseconds
    undisturbed: Floats
    lost: Floats
    samples: Rows
    scarcest: Rows


def give_ways(
    timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds, calibration: Timeline | None = None
) -> tuple[GiveWay, ...]:
    """The give-way index of each window: over the reductions r that start in it, sum of lost(r) / length of the window.

    lost(r) = max(0, |D_r within U(compute)| - sum of dur0 over P_r). P_r are the preparatory kernels of r's unit that
    were launched after the reduction before r and before r: what follows a reduction under its annotation, a division
    or a cast, prepares no other one. Reductions without any count nowhere. dur0 of a kernel is the median duration of
    its undisturbed runs, which no other span overlaps, here or in ``calibration``; kernels are the same by name
    and launch geometry, and one with under 5 such runs leaves the window without an index. D_r lasts from the latest
    of: the end of the collective before r on its lane, of the one before it of its unit on any lane, of the last
    compute kernel launched before P_r, and the first launch of P_r; to the start of r. Stretch is the sum of durations
    over the sum of dur0.
    """
    spans = timeline.spans
    if not timeline.on_device:
        return (GiveWay(reason="a CPU trace has no kernels that could give way"),) * len(starts)
    if not knows_launches(spans):
        return (GiveWay(reason="the trace does not tell when kernels were launched"),) * len(starts)
    reductions = _reductions(timeline)
    found = _preparations(timeline, reductions, calibration)
    baseline = "unaccompanied" if calibration is None else "calibration"
    first, last = np.searchsorted(found.starts, starts), np.searchsorted(found.starts, ends)
    begun = np.sort(reductions[1])
    reduces = np.searchsorted(begun, ends) - np.searchsorted(begun, starts)
    return tuple(
        _give_way(spans, found, slice(first[i], last[i]), int(ends[i] - starts[i]), int(reduces[i]), baseline)
        for i in range(len(starts))
    )


def _give_way(spans: Spans, found: _Preparations, of: slice, span_ns: int, reduces: int, baseline: str) -> GiveWay:
    counted = len(found.starts[of])
    if not counted:
        reason = f"no preparatory kernels before any of {reduces} reductions" if reduces else "no reductions"
        return GiveWay(reason=reason)
    scarcest = int(np.argmin(found.samples[of]))
    samples = int(found.samples[of][scarcest])
    if samples < MIN_SAMPLES:
        kernel = spans.name_table[spans.names[found.scarcest[of][scarcest]]]
        kernel = kernel if len(kernel) <= 60 else f"{kernel[:57]}..."
        reason = f"{kernel} ran undisturbed {samples} times; {MIN_SAMPLES} are needed to tell how long it takes"
        return GiveWay(reduces=counted, samples=samples, baseline=baseline, reason=reason)
    lost, undisturbed = float(found.lost[of].sum()), float(found.undisturbed[of].sum())
    return GiveWay(
        index=lost / span_ns if span_ns else None, lost_ns=round(lost),
        stretch=float(found.durations[of].sum()) / undisturbed if undisturbed else None, reduces=counted,
        samples=samples, baseline=baseline,
    )  # fmt: skip


def _reductions(timeline: Timeline) -> tuple[Nanoseconds, ...]:
    """The reductions that ran, by launch: when that was, their start, the end of what they had to follow, and the code
    of their unit in :attr:`Spans.units`.

    They follow what came before on their lane, and the collective of the same unit that was launched before (of a
    hybrid mode, the other leg).
    """
    rows = ran(timeline)
    code = {name: code for code, name in enumerate(timeline.spans.unit_names)}
    on_lane = {id(row): UNKNOWN if before is None else before for row, before in zip(rows, ends_before(rows))}
    ended, found = dict[str, int](), []
    for row in sorted(rows, key=lambda row: UNKNOWN if row[0].launched is None else row[0].launched):
        one, _, start, end = row
        before = on_lane[id(row)]
        if one.unit is not None:
            before, ended[one.unit] = max(before, ended.get(one.unit, UNKNOWN)), end
        if one.op in REDUCTIONS and one.launched is not None and one.rows:
            found.append((one.launched, start, before, code.get(one.unit or "", UNKNOWN)))
    return tuple(np.array(sorted(found), np.int64).reshape(-1, 4).T)


def _preparations(
    timeline: Timeline, reductions: tuple[Nanoseconds, ...], calibration: Timeline | None
) -> _Preparations:
    spans = timeline.spans
    launches, (launched, begins, before, unit_of) = latest_launches(spans), reductions
    rows = np.flatnonzero(spans.of_kind(Kind.PREP) & (launches != NEVER))
    rows = rows[np.argsort(launches[rows], kind="stable")]
    reduction_of = np.searchsorted(launched, launches[rows], side="left")
    known = reduction_of < len(launched)
    rows, reduction_of = rows[known], reduction_of[known]
    units = spans.units[rows], unit_of[reduction_of]
    own = (units[0] == units[1]) | (units[0] == UNKNOWN) | (units[1] == UNKNOWN)
    rows, reduction_of = rows[own], reduction_of[own]
    if not len(rows):
        none = np.empty(0, np.int64)
        zeros = none.astype(np.float64)
        return _Preparations(starts=none, durations=none, undisturbed=zeros, lost=zeros, samples=none, scarcest=none)
    which, first = np.unique(reduction_of, return_index=True)
    dur0, samples = _undisturbed(spans, rows, (calibration or timeline).spans)
    prepared = launches[rows[first]]
    compute = np.flatnonzero(spans.of_kind(Kind.COMPUTE) & (launches != NEVER))
    compute = compute[np.lexsort((spans.ends[compute], launches[compute]))]
    ends = np.concatenate(([UNKNOWN], spans.ends[compute]))  # of the last gradient kernel launched before
    gradients = ends[np.searchsorted(launches[compute], prepared, side="left")]
    begun = np.maximum.reduce([before[which], gradients, prepared])
    started = begins[which]
    beside = timeline.busy(Kind.COMPUTE).within(np.minimum(begun, started), started)
    undisturbed = np.add.reduceat(dur0, first)
    by_scarcity = np.lexsort((samples, reduction_of))
    order = np.argsort(started, kind="stable")
    return _Preparations(
        starts=started[order], durations=np.add.reduceat(spans.ends[rows] - spans.starts[rows], first)[order],
        undisturbed=undisturbed[order], lost=np.maximum(0.0, beside - undisturbed)[order],
        samples=samples[by_scarcity[first]][order], scarcest=rows[by_scarcity[first]][order],
    )  # fmt: skip


def _undisturbed(spans: Spans, rows: Rows, source: Spans) -> tuple[Floats, Rows]:
    """For each row the median duration of its kernel's undisturbed runs in ``source``, and how many there are.

    A run is undisturbed if no other span of any kind, on any lane, ran at the same time.
    """
    alone = np.flatnonzero(source.ends > source.starts)
    starts, ends = source.starts[alone], source.ends[alone]
    is_alone = np.concatenate(([True], np.maximum.accumulate(ends)[:-1] <= starts[1:]))[: len(alone)]
    is_alone &= np.concatenate((ends[:-1] <= starts[1:], [True]))[: len(alone)]
    runs: dict[str, list[int]] = defaultdict(list)
    for row in alone[is_alone].tolist():
        runs[_signature(source, row)].append(int(source.ends[row] - source.starts[row]))
    _, representative, kernel = np.unique(spans.signatures[rows], return_index=True, return_inverse=True)
    found = [runs.get(_signature(spans, row), []) for row in rows[representative].tolist()]
    medians = np.array([np.median(durations) if durations else np.nan for durations in found])
    return medians[kernel], np.array([len(durations) for durations in found], np.int64)[kernel]


def _signature(spans: Spans, row: int) -> str:
    table, codes = (
        (spans.signature_names, spans.signatures) if spans.signature_names else (spans.name_table, spans.names)
    )
    return table[int(codes[row])]
