"""The give-way index: what small kernels before a reduction cost when they run beside compute.

YaFSDP's "give-way effect": kernels that prepare a reduction (casts, copies into its buffer) run beside the backward
pass of the next unit, which holds most of the device, so they stretch, and the reduction starts late.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.collectives import ends_before, ran
from refshard.analysis.figures import GiveWay
from refshard.analysis.idle import NEVER, knows_launches, latest_launches
from refshard.events.timeline import UNKNOWN, Kind, Nanoseconds, Spans, Timeline

REDUCTIONS = frozenset(("reduce_scatter", "all_reduce", "all_to_all"))
MIN_SAMPLES = 5
"""Fewest undisturbed runs of a kernel that give its undisturbed duration."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reductions:
    """The reductions that ran, by launch: when that was, their start, and the end of what they had to follow.

    That is what came before on their lane, and the collective of the same unit that was launched before (of a hybrid
    mode, the other leg). ``units`` are codes of :attr:`Spans.units`.
    """

    launches: Nanoseconds
    starts: Nanoseconds
    before: Nanoseconds
    units: Nanoseconds


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
    samples: npt.NDArray[np.int64]
    scarcest: npt.NDArray[np.int64]


def give_ways(
    timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds, calibration: Timeline | None = None
) -> tuple[GiveWay, ...]:
    """The give-way index of each window: over the reductions r that start in it, sum of lost(r) / length of the window.

    lost(r) = max(0, |D_r within U(compute)| - sum of dur0 over P_r). P_r are the preparatory kernels of r's unit that
    were launched after the reduction before r and before r: what follows a reduction under its annotation, a division
    or a cast, prepares no other one. Reductions without any count nowhere. dur0 of a kernel is the median duration of
    its undisturbed runs, those that no other span overlaps, here or in ``calibration``; kernels are the same by name
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
    begun = np.sort(reductions.starts)
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


def _reductions(timeline: Timeline) -> _Reductions:
    rows = ran(timeline)
    code = {name: code for code, name in enumerate(timeline.spans.unit_names)}
    on_lane = {id(row): before for row, before in zip(rows, ends_before(rows))}
    ended: dict[str, int] = {}
    found = []
    for row in sorted(rows, key=lambda row: UNKNOWN if row[0].launched is None else row[0].launched):
        collective, _, start, end = row
        before = [UNKNOWN if on_lane[id(row)] is None else on_lane[id(row)]]
        if collective.unit is not None:
            before.append(ended.get(collective.unit, UNKNOWN))
            ended[collective.unit] = end
        if collective.op in REDUCTIONS and collective.launched is not None and collective.rows:
            unit = code.get(collective.unit or "", UNKNOWN)
            found.append((collective.launched, start, max(b for b in before if b is not None), unit))
    table = np.array(sorted(found), np.int64).reshape(-1, 4)
    return _Reductions(launches=table[:, 0], starts=table[:, 1], before=table[:, 2], units=table[:, 3])


def _preparations(timeline: Timeline, reductions: _Reductions, calibration: Timeline | None) -> _Preparations:
    spans = timeline.spans
    launches = latest_launches(spans)
    rows = np.flatnonzero(spans.of_kind(Kind.PREP) & (launches != NEVER))
    rows = rows[np.argsort(launches[rows], kind="stable")]
    reduction_of = np.searchsorted(reductions.launches, launches[rows], side="left")
    known = reduction_of < len(reductions.launches)
    rows, reduction_of = rows[known], reduction_of[known]
    units = spans.units[rows], reductions.units[reduction_of]
    own = (units[0] == units[1]) | (units[0] == UNKNOWN) | (units[1] == UNKNOWN)
    rows, reduction_of = rows[own], reduction_of[own]
    if not len(rows):
        none = np.empty(0, np.int64)
        zeros = none.astype(np.float64)
        return _Preparations(starts=none, durations=none, undisturbed=zeros, lost=zeros, samples=none, scarcest=none)
    which, first = np.unique(reduction_of, return_index=True)
    dur0, samples = _undisturbed(spans, rows, timeline if calibration is None else calibration)
    prepared = launches[rows[first]]
    compute = np.flatnonzero(spans.of_kind(Kind.COMPUTE) & (launches != NEVER))
    compute = compute[np.lexsort((spans.ends[compute], launches[compute]))]
    ends = np.concatenate(([UNKNOWN], spans.ends[compute]))  # of the last gradient kernel launched before
    gradients = ends[np.searchsorted(launches[compute], prepared, side="left")]
    begun = np.maximum.reduce([reductions.before[which], gradients, prepared])
    started = reductions.starts[which]
    beside = timeline.busy(Kind.COMPUTE).within(np.minimum(begun, started), started)
    undisturbed = np.add.reduceat(dur0, first)
    by_scarcity = np.lexsort((samples, reduction_of))
    order = np.argsort(started, kind="stable")
    return _Preparations(
        starts=started[order], durations=np.add.reduceat(spans.ends[rows] - spans.starts[rows], first)[order],
        undisturbed=undisturbed[order], lost=np.maximum(0.0, beside - undisturbed)[order],
        samples=samples[by_scarcity[first]][order], scarcest=rows[by_scarcity[first]][order],
    )  # fmt: skip


def _undisturbed(spans: Spans, rows: npt.NDArray[np.int64], source: Timeline) -> tuple[Floats, npt.NDArray[np.int64]]:
    """For each row the median duration of its kernel's undisturbed runs in ``source``, and how many there are."""
    runs = _undisturbed_runs(source.spans)
    _, representative, kernel = np.unique(spans.signatures[rows], return_index=True, return_inverse=True)
    found = [runs.get(_signature(spans, row), []) for row in rows[representative].tolist()]
    medians = np.array([np.median(durations) if durations else np.nan for durations in found])
    return medians[kernel], np.array([len(durations) for durations in found], np.int64)[kernel]


def _undisturbed_runs(spans: Spans) -> dict[str, list[int]]:
    """How long spans took beside which no other ran, of any kind and on any lane, by kernel."""
    rows = np.flatnonzero(spans.ends > spans.starts)
    starts, ends = spans.starts[rows], spans.ends[rows]
    alone = np.concatenate(([True], np.maximum.accumulate(ends)[:-1] <= starts[1:]))[: len(rows)]
    alone &= np.concatenate((ends[:-1] <= starts[1:], [True]))[: len(rows)]
    rows = rows[alone][np.argsort(spans.signatures[rows[alone]], kind="stable")]
    _, first = np.unique(spans.signatures[rows], return_index=True)
    found: dict[str, list[int]] = {}
    for same in np.split(rows, first[1:]) if len(rows) else []:
        found.setdefault(_signature(spans, int(same[0])), []).extend((spans.ends[same] - spans.starts[same]).tolist())
    return found


def _signature(spans: Spans, row: int) -> str:
    if spans.signature_names:
        return spans.signature_names[int(spans.signatures[row])]
    return spans.name_table[int(spans.names[row])]
