"""Why a rank is late: what it does between the end of one collective and its entry into the next.

An all-reduce makes the steps of all ranks equally long, and moves the wait for a late rank into the other ranks'
backward. So neither steps nor their phases tell which rank is late. If every rank needs every other, a collective ends
for all ranks at once. From there to its entry into the next, each rank does its own work, timed by its own clock.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.collectives import ran
from refshard.analysis.exposure import Match, Waits
from refshard.analysis.figures import Cause, ExposedSplit, LateCause, Lateness, LatePart, TraceFigures
from refshard.analysis.labels import when_named
from refshard.analysis.names import ALLOCATES, READS_INPUT, SURE
from refshard.analysis.operators import classes_of, launched_work
from refshard.analysis.overlap import idle_gaps, lone
from refshard.events.table import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Mask, Nanoseconds, Rows, Timeline, grouped, sums

_GROWTH, _RISING, _STEPS_FOR_A_TREND = 1.5, 0.9, 4
"""A rank's cost grows if it is this many times as high in the second half, and so many of all pairs of steps rise."""
_ENOUGH_ALIKE = 0.5
"""So much of a rank's compute must be work that the others do too, before its rate is compared by them."""
_FEW = 1e-9
"""Of counts that are differences of floats, what is still nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Works:
    """The compute of a trace's steps by what is done: ``keys`` are hashes of kernel, grid and shapes.

    ``counts`` and ``ns`` are per step; ``is_product`` says which are products, attention or convolutions.
    """

    keys: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.float64]
    ns: npt.NDArray[np.float64]
    is_product: Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTime:
    """What a rank has done up to each of its collectives, in the order of its figures.

    ``before`` and ``after`` hold, for each cause, nanoseconds from the first collective's start to the start and to the
    end of each. ``joins`` says at which ones no compute goes on as they end, so that all ranks go on together.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    joins: Mask
    before: Mapping[LateCause, Nanoseconds]
    after: Mapping[LateCause, Nanoseconds]
    works: Works


def own_time(trace: TraceFile, timeline: Timeline) -> OwnTime | None:
    """What the rank does around its collectives; None of a trace without any."""
    rows = ran(timeline)
    if not rows:
        return None
    starts, ends = (np.array([row[column] for row in rows], np.int64) for column in (2, 3))
    first, last = int(starts.min()), int(ends.max())
    busy, alone = timeline.busy(*Kind), lone(timeline)
    others = timeline.busy(*(kind for kind in Kind if kind is not Kind.COMM))
    gaps = idle_gaps(timeline, first, last)
    idle = Intervals(gaps.starts, gaps.ends)
    is_late = gaps.caused_by(Cause.LAUNCH, Cause.CALL) if timeline.on_device else np.ones(len(gaps.starts), np.bool_)
    reads = when_named(trace, READS_INPUT, HOST, ANNOTATION) & idle
    allocates = (when_named(trace, ALLOCATES, LAUNCH) & idle) - reads
    late = Intervals(gaps.starts[is_late], gaps.ends[is_late]) - reads - allocates
    sums_of = []
    for points in (starts, ends):
        begin = np.full(len(points), first)
        total, compute, copies, at_work, found, allocated, by_host = (
            one.within(begin, points)
            for one in (Intervals.of([(first, last)]), others, alone, busy, reads, allocates, late)
        )
        parts: dict[LateCause, Nanoseconds] = {
            "compute": compute - copies, "copies": copies, "communication": at_work - compute, "input": found,
            "allocator": allocated, "host": by_host, "idle": total - at_work - found - allocated - by_host,
        }  # fmt: skip
        sums_of.append(parts)
    joins = timeline.busy(Kind.COMPUTE).within(ends - 1, ends + 1) < 2
    return OwnTime(
        starts=starts, ends=ends, joins=joins, before=sums_of[0], after=sums_of[1], works=_works(trace, timeline)
    )


def _works(trace: TraceFile, timeline: Timeline) -> Works:
    work, spans = launched_work(trace, timeline), timeline.spans
    classes, steps = classes_of(trace, timeline, work), [one.step for one in timeline.host_windows]
    mine = work.steps != UNKNOWN if any(step is not None for step in steps) else np.ones(len(work.ns), np.bool_)
    kernels = spans.signatures[work.spans] if timeline.on_device else work.names
    names = spans.signature_names if timeline.on_device else trace.names
    if timeline.on_device:
        mine = mine & np.isin(spans.kinds[work.spans], [KINDS.index(kind) for kind in Kind if kind is not Kind.COMM])
    rows = np.flatnonzero(mine)
    firsts, group = grouped(kernels[rows], work.operands[rows])
    keys = []
    for row in rows[firsts].tolist():
        operands = trace.operands[work.operands[row]] if work.operands[row] != UNKNOWN else None
        text = names[kernels[row]].encode() + (b"" if operands is None else operands.dims + operands.types)
        keys.append(int.from_bytes(blake2b(text, digest_size=8).digest()))
    count = max(1, len([step for step in steps if step is not None]))
    return Works(
        keys=np.array(keys, np.uint64), counts=np.bincount(group, minlength=len(firsts)) / count,
        ns=sums(group, work.ns[rows], len(firsts)) / count, is_product=np.isin(classes[rows[firsts]], SURE),
    )  # fmt: skip


def lateness(figures: Sequence[TraceFigures], owns: Sequence[OwnTime | None], waits: Waits) -> list[Lateness | None]:
    """How late each rank of one job is, and why, in the order of ``figures``, which know what they waited for."""
    known = [place for place, one in enumerate(owns) if one is not None and figures[place].communication is not None]
    last, seen, excess = Counter[int](), Counter[int](), defaultdict[int, Counter[LateCause]](Counter)
    chains: dict[tuple[int, ...], list[Match]] = defaultdict(list)
    for match in waits.matches:
        if all(place in known for place in match):
            chains[tuple(sorted(match, key=lambda place: figures[place].rank or 0))].append(match)
    for places, matches in chains.items():
        _add(places, matches, figures, owns, (last, seen, excess))
    costs = _costs(figures, known)
    highest = np.max([costs[place] for place in known], axis=0) if known else np.zeros(0)
    reports = [figures[place].operators for place in known]
    flops = [one.flops / one.steps if one is not None else 0.0 for one in reports]
    compared = _compared([own.works for place in known if (own := owns[place]) is not None], flops)
    found: list[Lateness | None] = [None] * len(figures)
    for place, (slower, more, ratios) in zip(known, compared):
        if seen[place]:
            cost = costs[place]
            found[place] = Lateness(
                last=last[place], collectives=seen[place], cost_ns=int(cost.sum()), steps=tuple(cost.tolist()),
                leads=int(np.sum((cost == highest) & (cost > 0))), grows=_grows(cost.tolist()),
                parts=_parts(excess[place], slower, more, int(cost.sum())), **ratios,
            )  # fmt: skip
    return found


def _add(
    places: tuple[int, ...], matches: Sequence[Match], figures: Sequence[TraceFigures], owns: Sequence[OwnTime | None],
    sums_of: tuple[Counter[int], Counter[int], dict[int, Counter[LateCause]]],
) -> None:  # fmt: skip
    """Count who comes last to the collectives of the same ranks, and add by what it exceeds the others before."""
    last_of, seen, excess = sums_of
    mine = [own for place in places if (own := owns[place]) is not None]
    numbers = np.array([[one[place] for place in places] for one in matches], np.int64)
    numbers = numbers[np.argsort(mine[0].ends[numbers[:, 0]], kind="stable")]
    columns = list(enumerate(mine))
    starts, ends = (np.stack([getattr(own, key)[numbers[:, k]] for k, own in columns], 1) for key in ("starts", "ends"))
    durations = np.stack([
        np.array([figures[place].collectives[n].duration_ns for n in numbers[:, k].tolist()], np.int64)
        for k, place in enumerate(places)
    ], 1)  # fmt: skip
    # The latest collective that all ranks had left, and stood in, before any entered this one.
    joined = np.all([own.joins[numbers[:, k]] for k, own in columns], axis=0)
    joints = np.flatnonzero(joined if joined.any() else ~joined)
    reached = np.maximum.accumulate(ends[joints], axis=0)
    ended = [np.searchsorted(reached[:, k], starts[:, k], side="right") for k, _ in columns]
    place = np.minimum(np.min(ended, axis=0), np.searchsorted(joints, np.arange(len(numbers)))) - 1
    previous = np.where(place >= 0, joints[place], UNKNOWN)
    reference = figures[places[0]]
    in_steps = any(one.step is not None for one in reference.steps)
    counts = np.array([
        not in_steps or reference.collectives[number].step is not None for number in numbers[:, 0].tolist()
    ], np.bool_)  # fmt: skip
    last = np.argmin(durations, axis=1)
    waited = counts & (durations.max(axis=1) > durations.min(axis=1))
    for k, place in enumerate(places):
        seen[place] += int(counts.sum())
        last_of[place] += int(np.sum(waited & (last == k)))
    rows = np.flatnonzero(waited & (previous >= 0))
    for cause in mine[0].before:
        did = np.stack([
            own.before[cause][numbers[rows, k]] - own.after[cause][numbers[previous[rows], k]] for k, own in columns
        ], 1)  # fmt: skip
        of_last = did[np.arange(len(rows)), last[rows]]
        more = of_last - (did.sum(axis=1) - of_last) / (len(places) - 1)
        for k, place in enumerate(places):
            excess[place][cause] += round(float(more[last[rows] == k].sum()))


def _costs(figures: Sequence[TraceFigures], known: Sequence[int]) -> dict[int, Nanoseconds]:
    """Exposed nanoseconds that the others wait for each rank, a mean over them, by step; of one rank's step numbers."""

    def parts(place: int) -> Sequence[ExposedSplit]:
        found = figures[place].communication
        return () if found is None else found.steps or (found.whole,)

    numbers = sorted({one.step for place in known for one in parts(place)}, key=lambda step: (step is not None, step))
    column = {step: k for k, step in enumerate(numbers)}
    place_of = {figures[place].rank: place for place in known}
    found = {place: np.zeros(len(numbers), np.int64) for place in known}
    for place in known:
        for one in parts(place):
            for peer in one.waits_for:
                if peer.rank in place_of:
                    found[place_of[peer.rank]][column[one.step]] += peer.waited_ns
    return {place: cost // max(1, len(known) - 1) for place, cost in found.items()}


def _grows(cost: Sequence[int]) -> bool:
    count = len(cost)
    if count < _STEPS_FOR_A_TREND:
        return False
    rising = sum(cost[j] > cost[i] for j in range(count) for i in range(j))
    half = count // 2
    return rising >= _RISING * count * (count - 1) / 2 and sum(cost[-half:]) >= _GROWTH * sum(cost[:half]) > 0


def _parts(
    excess: Mapping[LateCause, int], slower: float | None, more: float | None, cost_ns: int
) -> tuple[LatePart, ...]:
    """The cost by what is longer, the longest first; compute as slower kernels and as more work, where known."""
    found = dict(excess)
    if slower is not None and more is not None and (total := max(slower, 0.0) + max(more, 0.0)):
        compute = found.pop("compute", 0)
        found["slower"] = round(compute * max(slower, 0.0) / total)
        found["work"] = compute - found["slower"]
    whole = sum(max(0, ns) for ns in found.values())
    longer = [
        LatePart(cause=cause, ns=part) for cause, ns in found.items() if (part := max(0, ns) * cost_ns // max(whole, 1))
    ]
    return tuple(sorted(longer, key=lambda one: (-one.ns, one.cause)))


_Compared = tuple[float | None, float | None, dict[str, Any]]


def _compared(every: Sequence[Works], flops: Sequence[float]) -> list[_Compared]:
    """For each rank by how much its compute in a step exceeds the others' mean, as the same work at another rate and as
    other work, and ratios of rates. ``flops`` are each rank's in a step, 0 if unknown.

    Where the ranks have little work in common, as with sequences of other lengths, FLOPs of products are the measure:
    all compute is taken to be as much slower as they are.
    """
    if len(every) < 2:
        return [(None, None, {})] * len(every)
    keys, place = np.unique(np.concatenate([one.keys for one in every]), return_inverse=True)
    split = np.cumsum([len(one.keys) for one in every])[:-1]
    places: list[Rows] = np.split(place, split)
    counts, ns = (
        np.bincount(place, np.concatenate([getattr(one, key) for one in every]), len(keys)) for key in ("counts", "ns")
    )
    found, products = list[_Compared](), [_products(one) for one in every]
    for one, mine, its in zip(every, places, flops):
        others = len(every) - 1
        their_counts, their_ns = (counts[mine] - one.counts) / others, (ns[mine] - one.ns) / others
        total = float(one.ns.sum() - (ns.sum() - one.ns.sum()) / others)
        ratios: dict[str, Any] = {"flops": its * others / (sum(flops) - its) if its and all(flops) else None}
        alike = their_counts > _FEW
        if one.ns[alike].sum() >= _ENOUGH_ALIKE * one.ns.sum() > 0:
            usual = np.zeros(len(mine))
            usual[alike] = their_ns[alike] / their_counts[alike] * one.counts[alike]
            slower: float | None = float((one.ns - usual)[alike].sum())
            for name, which in (
                ("same_work", alike), ("products", alike & one.is_product), ("rest", alike & ~one.is_product)
            ):  # fmt: skip
                ratios[name] = float(one.ns[which].sum() / usual[which].sum()) if usual[which].sum() else None
        elif ratios["flops"] is not None and (mean := (sum(products) - (own := _products(one))) / others) and own:
            ratios["same_work"] = own / (mean * ratios["flops"])
            slower = float(one.ns.sum()) * (1 - 1 / ratios["same_work"])
        else:
            slower = None
        found.append((slower, None if slower is None else total - slower, ratios))
    return found


def _products(one: Works) -> float:
    """Nanoseconds of its products, attention and convolutions in a step."""
    return float(one.ns[one.is_product].sum())
